"""Packing with shared prefixes loses no token, stores each prompt once, and restores every sample on the tiles."""

from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from flowrt.algorithms import cut_packed, pack_samples
from flowrt.algorithms.packing import MIN_FILL, PackedBatch
from flowrt.engines.descriptor import MAX_EXPANSION


@st.composite
def samples(draw: Any) -> tuple[list[Tensor], list[Tensor]]:
    """Some prompts, each with some members, in any order; responses of very different lengths, some empty."""
    ids = st.lists(st.integers(0, 5), min_size=1, max_size=7)
    prompts = draw(st.lists(ids, min_size=1, max_size=4))
    rows = draw(st.lists(st.sampled_from(prompts), min_size=1, max_size=12))
    dtype = draw(st.sampled_from([torch.int32, torch.int64]))
    lengths = [draw(st.one_of(st.integers(0, 3), st.integers(0, 40))) for _ in rows]
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1 << 30)))
    responses = [torch.randint(6, (length,), generator=generator, dtype=dtype) for length in lengths]
    return [torch.tensor(row, dtype=dtype) for row in rows], responses


def rows_of(packed: PackedBatch, value_F: Tensor) -> list[list[int]]:
    """The content of the tiles, row by row, with padding."""
    places, rows, begin = value_F[packed.source_N], [], 0
    for tile in packed.tiles:
        rows += places[begin : begin + tile.places].view(tile.rows, tile.length).tolist()
        begin += tile.places
    assert begin == len(places)
    return rows


@given(samples())
def test_each_prompt_is_stored_once_and_each_sample_is_whole(drawn: tuple[list[Tensor], list[Tensor]]) -> None:
    prompts, responses = drawn
    packed = pack_samples(prompts, responses)
    distinct = {tuple(prompt.tolist()) for prompt in prompts}
    assert len(packed.tokens_F) == sum(map(len, distinct)) + sum(max(len(each) - 1, 0) for each in responses)
    whole = [[*p.tolist(), *r.tolist()[:-1]] for p, r in zip(prompts, responses, strict=True)]
    shown, positions = rows_of(packed, packed.tokens_F), rows_of(packed, packed.positions_F)
    whole.sort(key=len, reverse=True)
    for number, expected in enumerate(whole):
        assert positions[number][: len(expected)] == list(range(len(expected)))
    kept = sorted(row[: len(expected)] for row, expected in zip(shown, whole, strict=True))
    assert kept == sorted(whole)
    for row, expected in zip(shown, whole, strict=True):
        assert MIN_FILL * len(row) <= len(expected) <= len(row)


@given(samples())
def test_every_response_token_is_predicted_by_the_one_before_it(drawn: tuple[list[Tensor], list[Tensor]]) -> None:
    prompts, responses = drawn
    packed = pack_samples(prompts, responses)
    assert packed.target_T.tolist() == torch.cat(responses).tolist()
    assert packed.sample_T.tolist() == [row for row, each in enumerate(responses) for _ in each]
    before = [[p.tolist()[-1], *r.tolist()[:-1]][: len(r)] for p, r in zip(prompts, responses, strict=True)]
    predicts = packed.predicts_U[packed.prediction_T]
    assert packed.tokens_F[predicts].tolist() == [token for row in before for token in row]
    where = [len(p) - 1 + n for p, r in zip(prompts, responses, strict=True) for n in range(len(r))]
    assert packed.positions_F[predicts].tolist() == where
    assert len(packed.predicts_U.unique()) == len(packed.predicts_U)


@given(samples())
def test_the_gradient_of_a_token_sums_over_all_its_places(drawn: tuple[list[Tensor], list[Tensor]]) -> None:
    packed = pack_samples(*drawn)
    value_FD = torch.randn(len(packed.tokens_F), 3, dtype=torch.float64, requires_grad=True)
    spread_ND = packed.scatter(value_FD)
    torch.testing.assert_close(packed.gather(spread_ND), value_FD)
    # Padding holds token 0, which attention ignores: its upstream gradient is 0.
    upstream_ND = torch.randn_like(spread_ND)
    used = {int(place) for places in (packed.first_F, *packed.further) for place in places}
    upstream_ND[[place for place in range(len(upstream_ND)) if place not in used]] = 0
    (gradient,) = torch.autograd.grad(spread_ND, value_FD, upstream_ND)
    (expected,) = torch.autograd.grad(value_FD.index_select(0, packed.source_N), value_FD, upstream_ND)
    torch.testing.assert_close(gradient, expected)
    leaf_ND = torch.randn_like(spread_ND).requires_grad_()
    upstream_FD = torch.randn_like(value_FD)
    (gradient,) = torch.autograd.grad(packed.gather(leaf_ND), leaf_ND, upstream_FD)
    (expected,) = torch.autograd.grad(leaf_ND.index_select(0, packed.first_F), leaf_ND, upstream_FD)
    torch.testing.assert_close(gradient, expected)


@given(samples(), st.integers(1, 120))
def test_passes_keep_to_their_budget_and_contain_every_sample(
    drawn: tuple[list[Tensor], list[Tensor]], budget: int
) -> None:
    prompts, responses = drawn
    passes = cut_packed(prompts, responses, budget, MAX_EXPANSION * budget)
    assert sorted(row for rows in passes for row in rows) == list(range(len(prompts)))
    for rows in passes:
        distinct = {tuple(prompts[row].tolist()) for row in rows}
        whole = sum(len(prompts[row]) + len(responses[row]) for row in rows)
        packed = sum(map(len, distinct)) + sum(len(responses[row]) for row in rows)
        assert len(rows) == 1 or (packed <= budget and whole <= MAX_EXPANSION * budget)
    if all(map(len, responses)):
        assert sorted(cut_packed(prompts, responses, 1, MAX_EXPANSION)) == [[row] for row in range(len(prompts))]
