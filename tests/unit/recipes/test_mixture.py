"""Mixtures of data sets: shares exact in every window, each set in its own seeded order, and the same when resumed."""

import random
from collections import Counter
from fractions import Fraction
from itertools import islice

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from flowrt.errors import ConfigError
from flowrt.ids import data_set_of, prompt_name, prompt_number, row_of
from flowrt.recipes.data.mixture import Place, SetSize, alternate, largest_remainder, mixture, row_order

WEIGHTS = st.lists(
    st.one_of(st.integers(1, 20).map(float), st.floats(0.01, 100.0).map(lambda value: round(value, 2))),
    min_size=1,
    max_size=6,
)


def shares(weights: list[float]) -> list[Fraction]:
    exact = [Fraction(str(weight)) for weight in weights]
    return [weight / sum(exact) for weight in exact]


def places(sets: list[SetSize], count: int, epochs: int = 0) -> list[Place]:
    return list(islice(mixture(sets, 7, epochs, lambda place: place), count))


@settings(max_examples=200, deadline=None)
@given(WEIGHTS, st.integers(1, 24), st.integers(1, 40))
@example([0.7, 0.2, 0.1], 16, 100)
def test_shares_are_exact_within_one_in_any_prefix_and_two_in_any_window(
    weights: list[float], prompts_per_step: int, steps: int
) -> None:
    order = list(islice(alternate(weights), prompts_per_step * steps))
    for at, share in enumerate(shares(weights)):
        counts = [sum(data_set == at for data_set in order[: step * prompts_per_step]) for step in range(steps + 1)]
        excess = [count - share * step * prompts_per_step for step, count in enumerate(counts)]
        assert max(map(abs, excess)) < 1
        in_windows = max(excess) - min(excess)
        assert in_windows <= (1 if len(weights) <= 2 else 2)
        if weights == [0.7, 0.2, 0.1]:
            assert in_windows <= 1


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=5), st.integers(1, 5))
def test_shares_of_whole_prompts_are_exact_in_every_step(parts: list[int], times: int) -> None:
    weights = [part / 4 for part in parts]
    size = sum(parts) * times
    order = list(islice(alternate(weights), 5 * size))
    for start in range(0, 5 * size, size):
        assert Counter(order[start : start + size]) == {at: part * times for at, part in enumerate(parts)}


def test_a_single_set_has_the_order_of_a_run_without_sets() -> None:
    expected = []
    for epoch in range(3):
        order = list(range(11))
        random.Random(f"order 7 {epoch}").shuffle(order)
        expected += [(0, epoch, row) for row in order]
    mixed = places([SetSize("", 1.0, 11)], 33)
    assert [(place.data_set, place.epoch, place.row) for place in mixed] == expected
    assert [prompt_number(place.data_set, place.row) for place in mixed] == [row for _, _, row in expected]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.floats(0.1, 9.0), st.integers(1, 12)), min_size=2, max_size=4), st.integers(0, 60))
def test_each_set_repeats_and_a_resumed_run_continues_its_order(sizes: list[tuple[float, int]], passed: int) -> None:
    sets = [SetSize(f"set-{at}", weight, rows) for at, (weight, rows) in enumerate(sizes)]
    whole = places(sets, 120)
    for at, data_set in enumerate(sets):
        own = [(place.epoch, place.row) for place in whole if place.data_set == at]
        expected = [(epoch, row) for epoch in range(121) for row in row_order(7, data_set.name, epoch, data_set.rows)]
        assert own == expected[: len(own)]
    assert len(set(whole)) == len(whole)
    # A resumed run generates the same places and skips those that are done.
    done = set(whole[:passed])
    assert [place for place in places(sets, 120) if place not in done] == whole[passed:]


def test_the_order_of_a_set_depends_on_seed_name_and_epoch() -> None:
    orders = [tuple(row_order(*key, 40)) for key in ((1, "a", 0), (2, "a", 0), (1, "b", 0), (1, "a", 1), (1, "", 0))]
    assert len(set(orders)) == len(orders)
    assert row_order(1, "a", 0, 40) == list(orders[0])


def test_the_order_ends_when_any_set_has_completed_its_epochs() -> None:
    order = places([SetSize("large", 0.5, 100), SetSize("small", 0.5, 3)], 1000, epochs=2)
    assert Counter(place.data_set for place in order)[1] == 6
    assert abs(Counter(place.data_set for place in order)[0] - 6) <= 1


def test_a_skipped_prompt_is_replaced_by_another_of_the_same_set() -> None:
    sets = [SetSize("a", 0.75, 40), SetSize("b", 0.25, 40)]
    order = list(islice(mixture(sets, 7, 0, lambda place: place if place.row % 4 else None), 24))
    assert Counter(place.data_set for place in order) == {0: 18, 1: 6}
    assert all(place.row % 4 for place in order)
    with pytest.raises(ConfigError, match="data set b has no prompt that can be used; leave it out"):
        list(islice(mixture(sets, 7, 0, lambda place: None if place.data_set else place), 24))


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 500), WEIGHTS)
def test_held_out_rows_are_divided_by_the_largest_remainder(count: int, weights: list[float]) -> None:
    counts = largest_remainder(count, weights)
    assert sum(counts) == count
    assert all(abs(number - count * share) < 1 for number, share in zip(counts, shares(weights), strict=True))


def test_prompt_numbers_encode_data_set_and_row() -> None:
    assert prompt_number(0, 17) == 17
    number = prompt_number(2, 17)
    assert (data_set_of(number), row_of(number)) == (2, 17)
    assert [prompt_name(number, names) for names in (("a", "b", "c"), ())] == ["c:17", str(number)]
    assert prompt_name(17, ("a",)) == "17"
