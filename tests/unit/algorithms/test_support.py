"""Log-probabilities over supports, against a masked log-softmax, and supports that do not fit their tokens."""

from typing import cast

import pytest
import torch

from flowrt.algorithms.support import Support, join_supports, last_supports, singletons, support_logprobs

VOCABULARY = 13
PREDICTION_T = torch.tensor([0, 0, 1, 3])  # two tokens share a prediction
TARGET_T = torch.tensor([4, 7, 2, 12])
SUPPORTS = [[4, 7, 1], [7, 4, 1], [2], [0, 12, 5, 6, 9]]
SUPPORT = Support(
    torch.tensor([token for support in SUPPORTS for token in support], dtype=torch.int32),
    torch.tensor([len(support) for support in SUPPORTS], dtype=torch.int32),
)


def masked_logprobs(logits_UV: torch.Tensor, temperature: float) -> torch.Tensor:
    """The definition: softmax over only the support."""
    rows = []
    for prediction, target, support in zip(PREDICTION_T.tolist(), TARGET_T.tolist(), SUPPORTS, strict=True):
        excluded = torch.ones(VOCABULARY, dtype=torch.bool).index_fill(0, torch.tensor(support), False)
        rows.append((logits_UV[prediction] / temperature).masked_fill(excluded, -torch.inf).log_softmax(0)[target])
    return torch.stack(rows)


@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.parametrize("offset", [0.0, 1000.0])
def test_values_and_gradients_are_those_of_a_masked_softmax(temperature: float, offset: float) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = (5 * torch.randn(4, VOCABULARY, generator=generator, dtype=torch.float64) + offset).requires_grad_()
    upstream_T = torch.tensor([1.0, -2.0, 3.0, 0.5], dtype=torch.float64)
    got, expected = (
        support_logprobs(logits, PREDICTION_T, TARGET_T, SUPPORT, temperature),
        masked_logprobs(logits, temperature),
    )
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)
    (gradient,) = torch.autograd.grad((got * upstream_T).sum(), logits)
    (expected_gradient,) = torch.autograd.grad((expected * upstream_T).sum(), logits)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-11, atol=1e-12)
    assert got[2] == 0  # the only token of its support


def test_the_support_of_the_whole_vocabulary_gives_the_log_softmax() -> None:
    logits = torch.randn(2, VOCABULARY, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    whole = Support(torch.arange(VOCABULARY).repeat(2), torch.tensor([VOCABULARY, VOCABULARY]))
    got = support_logprobs(logits, torch.tensor([0, 1]), torch.tensor([3, 5]), whole, 1.0)
    torch.testing.assert_close(got, logits.log_softmax(-1)[[0, 1], [3, 5]], rtol=1e-12, atol=1e-12)


def test_a_token_outside_of_its_support_is_refused() -> None:
    logits = torch.zeros(4, VOCABULARY)
    with pytest.raises(ValueError, match="not in its support"):
        support_logprobs(logits, PREDICTION_T, torch.tensor([5, 7, 2, 12]), SUPPORT, 1.0)
    with pytest.raises(ValueError, match="temperature is 0"):
        support_logprobs(logits, PREDICTION_T, TARGET_T, SUPPORT, 0.0)


@pytest.mark.parametrize(
    ("support", "fits"),
    [
        (SUPPORT, True),
        (singletons(TARGET_T), True),
        (SUPPORT.prefix(3), False),
        (Support(SUPPORT.tokens_E[:-1], SUPPORT.counts_T), False),
        (Support(torch.tensor([4, 4, 7, 2, 12]), torch.tensor([2, 1, 1, 1])), False),
        (Support(torch.tensor([4, 7, 2, 5]), torch.tensor([1, 1, 1, 1])), False),
        (Support(torch.tensor([4, 7, 2, 12]), torch.tensor([1, 0, 2, 1])), False),
    ],
)
def test_a_support_fits_if_it_has_its_token_and_no_duplicates(support: Support, fits: bool) -> None:
    assert support.fits(TARGET_T) is fits


def test_supports_are_cut_with_their_responses_and_joined_in_order() -> None:
    first, whole = SUPPORT.prefix(2), SUPPORT.prefix(None)
    assert (first.tokens_E.tolist(), first.counts_T.tolist()) == ([4, 7, 1, 7, 4, 1], [3, 3])
    assert first.fits(TARGET_T[:2])
    assert torch.equal(whole.tokens_E, SUPPORT.tokens_E)
    joined = join_supports([first, singletons(torch.tensor([9], dtype=torch.int32))])
    assert (joined.tokens_E.tolist(), joined.counts_T.tolist()) == ([4, 7, 1, 7, 4, 1, 9], [3, 3, 1])


def test_the_last_positions_of_many_supports_are_taken_without_the_others() -> None:
    unread = cast(Support, None)
    last = last_supports([unread, SUPPORT, singletons(torch.tensor([9, 8], dtype=torch.int32))], 3)
    own = SUPPORT.suffix(len(SUPPORT.counts_T) - 1)
    assert last.tokens_E.tolist() == [*own.tokens_E.tolist(), 9, 8]
    assert last.counts_T.tolist() == [*own.counts_T.tolist(), 1, 1]
