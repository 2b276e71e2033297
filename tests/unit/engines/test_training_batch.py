"""Micro-batches are joined and their samples selected with every column that they have."""

from dataclasses import replace

import pytest
import torch

from flowrt.algorithms.algorithm import Groups
from flowrt.algorithms.support import Support
from flowrt.engines.base import Capture, TrainingBatch


def batch_of(first: int, samples: int) -> TrainingBatch:
    """Samples whose values are their numbers, from ``first`` on, in every column."""
    numbers = range(first, first + samples)
    values_N = torch.tensor([float(number) for number in numbers])
    number_N = values_N.long()
    return TrainingBatch(
        prompts=[torch.tensor([number]) for number in numbers],
        responses=[torch.tensor([number, number]) for number in numbers],
        rollout_logprobs=[torch.full((2,), -float(number)) for number in numbers],
        reference_logprobs=[torch.full((2,), -float(number)) for number in numbers],
        advantages_N=values_N,
        weights_N=values_N,
        groups_N=number_N,
        ages=[torch.tensor([number, number]) for number in numbers],
        credit=Groups(
            rewards_N=values_N,
            group_N=number_N,
            lengths_N=number_N,
            truncated_N=number_N > 0,
            staleness_N=number_N,
            kl_N=values_N.double(),
        ),
        supports=[Support(torch.tensor([number]), torch.tensor([1, 0])) for number in numbers],
        captures=[Capture(float(number)) for number in numbers],
    )


def test_joined_batches_have_the_samples_of_all_in_order() -> None:
    joined = TrainingBatch.joined([batch_of(0, 2), batch_of(2, 0), batch_of(2, 3)])
    assert [int(prompt) for prompt in joined.prompts] == [0, 1, 2, 3, 4] == joined.groups_N.tolist()
    for column in (joined.responses, joined.rollout_logprobs, joined.reference_logprobs, joined.ages):
        assert column is not None
        assert [abs(int(response[1])) for response in column] == [0, 1, 2, 3, 4]
    assert joined.credit is not None
    assert joined.credit.kl_N is not None
    assert joined.credit.kl_N.tolist() == joined.credit.rewards_N.tolist() == joined.advantages_N.tolist()
    assert joined.captures is not None
    assert [capture and capture.advantage for capture in joined.captures] == [0, 1, 2, 3, 4]
    assert len(TrainingBatch.joined([]).responses) == 0


def test_selected_samples_keep_every_column_but_the_arguments_of_credit() -> None:
    batch = batch_of(0, 5)
    chosen = batch.only([3, 1])
    assert [int(prompt) for prompt in chosen.prompts] == [3, 1] == chosen.weights_N.tolist()
    assert chosen.supports is not None
    assert [int(support.tokens_E) for support in chosen.supports] == [3, 1]
    assert chosen.captures is not None
    assert batch.captures is not None
    assert chosen.captures[0] is batch.captures[3]
    assert chosen.credit is None
    plain = replace(batch, reference_logprobs=None, ages=None, supports=None, captures=None).only([0])
    assert (plain.reference_logprobs, plain.ages, plain.supports, plain.captures) == (None, None, None, None)


def test_a_column_that_only_some_micro_batches_have_is_refused() -> None:
    with pytest.raises(ValueError, match="1 of 2 micro-batches have reference_logprobs"):
        TrainingBatch.joined([batch_of(0, 1), replace(batch_of(1, 1), reference_logprobs=None)])
