from itertools import pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st

from flowrt.algorithms import cut_by_tokens, kl_k3_T, pad_samples

LOGPROBS = st.floats(-60, 0, width=32)


def cost(lengths: list[int]) -> int:
    return len(lengths) * max(lengths)


@given(st.lists(st.integers(0, 30), max_size=40), st.integers(1, 80))
def test_a_cut_keeps_order_and_budget_and_fills_each_batch(lengths: list[int], budget: int) -> None:
    cuts = cut_by_tokens(lengths, budget)
    assert [index for cut in cuts for index in cut] == list(range(len(lengths)))
    for cut in cuts:
        assert len(cut) == 1 or cost([lengths[i] for i in cut]) <= budget
    for cut, following in pairwise(cuts):
        assert cost([lengths[i] for i in [*cut, following[0]]]) > budget


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(0, 6)), min_size=1, max_size=6), st.integers(0, 3))
def test_padding_loses_no_token(shapes: list[tuple[int, int]], pad_id: int) -> None:
    generator = torch.Generator().manual_seed(len(shapes))
    prompts = [torch.randint(4, (p,), generator=generator) for p, _ in shapes]
    responses = [torch.randint(4, (r,), generator=generator) for _, r in shapes]
    padded = pad_samples(prompts, responses, pad_id)
    assert padded.tokens_BL[padded.response_mask_BL].tolist() == torch.cat(responses).tolist()
    for row, prompt, response in zip(padded.tokens_BL, prompts, responses, strict=True):
        length = len(prompt) + len(response)
        assert row[:length].tolist() == [*prompt.tolist(), *response.tolist()]
        assert (row[length:] == pad_id).all()
    assert padded.sample_T.bincount(minlength=len(shapes)).tolist() == [r for _, r in shapes]


@given(st.lists(st.tuples(LOGPROBS, LOGPROBS), min_size=1, max_size=50))
def test_k3_is_never_negative_and_zero_at_equality(pairs: list[tuple[float, float]]) -> None:
    policy, reference = torch.tensor(pairs).unbind(1)
    estimate = kl_k3_T(policy, reference)
    assert bool((estimate >= 0).all())
    assert bool(estimate.isfinite().all())
    assert kl_k3_T(policy, policy.clone()).tolist() == [0.0] * len(pairs)
    apart = (policy - reference).abs() > 0.01
    assert bool((estimate[apart] > 0).all())
