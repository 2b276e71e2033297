"""Unusable log-probabilities: a check of all samples of a pass equals a check of each of them."""

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from flowrt.engines.base import TrainingBatch
from flowrt.engines.training.loss_passes import all_recorded_logprobs, recorded_logprobs

VALUES = st.sampled_from([-1.0, -0.0, 0.009, 0.02, -86.0, -88.0, math.nan, math.inf, -math.inf])
GOOD = st.sampled_from([-1.0, -0.5, 0.0])


@st.composite
def columns(draw: st.DrawFn, lengths: list[int]) -> list[torch.Tensor]:
    """A value for each token; sometimes one that is unusable, or one too many."""
    drawn = [draw(st.lists(GOOD, min_size=length, max_size=length)) for length in lengths]
    if draw(st.booleans()) and any(lengths):
        row = draw(st.sampled_from([row for row, length in enumerate(lengths) if length]))
        drawn[row][draw(st.integers(0, lengths[row] - 1))] = draw(VALUES)
    if draw(st.integers(0, 5)) == 0 and drawn:
        drawn[draw(st.integers(0, len(drawn) - 1))].append(-1.0)
    return [torch.tensor(column, dtype=torch.float32) for column in drawn]


@given(st.data(), st.lists(st.integers(0, 4), max_size=5), st.booleans())
def test_a_check_of_all_samples_equals_a_check_of_each(
    data: st.DataObject, lengths: list[int], has_reference: bool
) -> None:
    batch = TrainingBatch(
        prompts=[torch.zeros(1, dtype=torch.int32)] * len(lengths),
        responses=[torch.zeros(length, dtype=torch.int32) for length in lengths],
        rollout_logprobs=data.draw(columns(lengths)),
        reference_logprobs=data.draw(columns(lengths)) if has_reference else None,
        advantages_N=torch.zeros(len(lengths)),
        weights_N=torch.ones(len(lengths)),
        groups_N=torch.zeros(len(lengths), dtype=torch.int64),
    )
    rows = data.draw(st.permutations(range(len(lengths))))
    actual = all_recorded_logprobs(batch, rows)
    expected = [recorded_logprobs(batch, row) for row in rows]
    assert [checked is None for checked in actual] == [checked is None for checked in expected]
    for checked, other in zip(actual, expected, strict=True):
        if checked is not None and other is not None:
            assert checked[0] is other[0]
            assert checked[1] is other[1]
