"""pass@k against all choices of k answers; standard errors against Python's statistics module."""

import itertools
import statistics as stdlib_statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowrt.algorithms.evaluation import mean_and_error, pass_at_k, statistics
from flowrt.recipes.metric_names import pass_ks


@pytest.mark.parametrize("answers", range(1, 9))
def test_pass_at_k_is_the_fraction_of_choices_with_a_correct_answer(answers: int) -> None:
    for solved in range(answers + 1):
        correct = [True] * solved + [False] * (answers - solved)
        for k in range(1, answers + 1):
            choices = [any(combination) for combination in itertools.combinations(correct, k)]
            assert pass_at_k(answers, solved, k) == pytest.approx(sum(choices) / len(choices), abs=1e-12)


def test_pass_at_k_of_many_answers_does_not_overflow() -> None:
    assert pass_at_k(10_000, 1, 5_000) == pytest.approx(0.5, abs=1e-9)


@pytest.mark.parametrize(("answers", "solved", "k"), [(4, 5, 1), (4, -1, 1), (4, 1, 0), (4, 1, 5)])
def test_impossible_counts_are_refused(answers: int, solved: int, k: int) -> None:
    with pytest.raises(ValueError, match="answers"):
        pass_at_k(answers, solved, k)


@given(st.lists(st.floats(-10, 10), min_size=2, max_size=20))
def test_the_standard_error_is_that_of_the_mean(values: list[float]) -> None:
    mean, error = mean_and_error(values)
    assert mean == pytest.approx(stdlib_statistics.fmean(values))
    assert error == pytest.approx(stdlib_statistics.stdev(values) / len(values) ** 0.5, abs=1e-9)


def test_statistics_of_greedy_and_of_sampled_answers() -> None:
    assert statistics([[1.0], [0.0]], 1.0, pass_ks(1)) == {
        "avg@1": 0.5,
        "avg@1_error": 0.5,
        "pass@1": 0.5,
        "pass@1_error": 0.5,
    }
    figures = statistics([[1.0, 0.0, 0.1, 1.0], [0.1, 0.0, 0.0, 0.0]], 1.0, pass_ks(4))
    assert (pass_ks(4), pass_ks(6), pass_ks(1)) == ([1, 2, 4], [1, 2, 4, 6], [1])
    assert figures["avg@4"] == pytest.approx((2.1 / 4 + 0.1 / 4) / 2)
    assert (figures["pass@1"], figures["pass@4"]) == (0.25, 0.5)
    assert figures["pass@2"] == pytest.approx((1 - 1 / 6) / 2)
