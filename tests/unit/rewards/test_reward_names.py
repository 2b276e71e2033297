"""Names, weights and arguments of reward functions, and their combination into one reward."""

import math
from collections.abc import Sequence
from fractions import Fraction
from functools import partial
from typing import Any

import numpy
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from flowrt.errors import ConfigError
from flowrt.ids import UNSCORED
from flowrt.recipes.config import RunConfig
from flowrt.recipes.config_io import from_toml, parse, to_toml
from flowrt.recipes.grpo import dataflow
from flowrt.recipes.metric_names import metric_names
from flowrt.rewards.built_in import built_in
from flowrt.rewards.call_forms import RewardSample
from flowrt.rewards.options import RewardOptions
from flowrt.rewards.outcomes import Result, RewardOutcome
from flowrt.rewards.reward_names import RewardFunction, parse_function, parse_functions, with_paths
from flowrt.rewards.scoring import RewardScorer, SampleReward, combined, reward_columns
from flowrt.rewards.user_file import MISSING, Arguments, MissingColumn, note, outcome_of
from flowrt.runtime.user_module import Unusable


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("mine.py", RewardFunction("mine", "file", "mine.py:reward")),
        ("/a/mine.py:score", RewardFunction("score", "file", "/a/mine.py:score")),
        ("mine.py:format:0.1", RewardFunction("format", "file", "mine.py:format", 0.1)),
        ("mine.py:0.1", RewardFunction("mine", "file", "mine.py:reward", 0.1)),
        ("x=0.5*mine.py:score", RewardFunction("x", "file", "mine.py:score", 0.5)),
        ("math", RewardFunction("math", "math", "")),
        ("math:2", RewardFunction("math", "math", "", 2.0)),
        ("0*exact", RewardFunction("exact", "exact", "", 0.0)),
        ("length:100", RewardFunction("length", "length", "100")),
        ("length:100:0.5", RewardFunction("length", "length", "100", 0.5)),
        ("regex:a:1", RewardFunction("regex", "regex", "a:1")),
        ("n=0.1*regex:(a=b)*", RewardFunction("n", "regex", "(a=b)*", 0.1)),
        ("http:http://host:80", RewardFunction("http", "http", "http://host:80")),
        ("2*http:https://host/x?y=1*2", RewardFunction("http", "http", "https://host/x?y=1*2", 2.0)),
        ("judge:1e-1", RewardFunction("judge", "judge", "", 0.1)),
    ],
)
def test_a_reward_function_is_parsed_from_its_text(text: str, expected: RewardFunction) -> None:
    assert parse_function(text) == expected


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["maths"], "did you mean 'math'"),
        (["mine.txt:score"], "neither FILE.py:FUNCTION nor built in"),
        (["regex"], "write regex:PATTERN"),
        (["length"], "write length:N"),
        (["length:0"], "characters above 0"),
        (["length:x"], "characters above 0"),
        (["exact:x"], "takes nothing but a weight"),
        (["regex:("], "its pattern is wrong"),
        (["http:host"], "begins with http"),
        (["a=http://host:80/x"], "write http:http://host:80/x"),
        (["http:https://me:pw@host"], "user name or password, .*reward.key_variable"),
        (["math:-1"], "is no weight"),
        (["math:nan"], "is no weight"),
        (["inf*math"], "is no weight"),
        (["2*math:3"], "two weights"),
        (["math", "0.5*math"], "2 functions 'math'; name them"),
        (["math:0", "exact:0"], "sum to 0"),
        (["math"] * 33, "at most 32"),
        ([""], "neither FILE.py:FUNCTION nor built in"),
    ],
)
def test_invalid_reward_functions_are_refused(texts: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_functions(texts)


def test_the_functions_of_task_files_are_not_suggested() -> None:
    with pytest.raises(ConfigError, match="neither") as caught:
        parse_functions(["nothing"])
    assert "exact" in str(caught.value)
    assert "task" not in str(caught.value)


def test_only_the_path_of_a_file_is_replaced() -> None:
    assert with_paths("a.py=0.5*a.py:f", lambda path: f"/x/{path}") == "a.py=0.5*/x/a.py:f"
    assert with_paths("a.py:f:0.5", lambda path: f"/x/{path}") == "/x/a.py:f:0.5"
    assert with_paths("regex:a.py", lambda path: f"/x/{path}") == "regex:a.py"


def test_reward_flags_replace_the_functions_of_a_file(tmp_path: Any) -> None:
    parsed = parse(["custom", "--reward", "exact", "--reward=0.1*format:a b", "--reward.workers", "3"])
    assert parsed.reward.functions == ("exact", "0.1*format:a b")
    assert parsed.reward.workers == 3
    path = tmp_path / "config.toml"
    path.write_text(to_toml(parsed))
    assert parse(["--config", str(path)]).reward == from_toml(to_toml(parsed)).reward == parsed.reward
    assert parse(["--config", str(path), "--reward", "math"]).reward.functions == ("math",)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["arithmetic", "--reward", "exact"], "has a built-in reward"),
        (["gsm8k", "--reward.workers", "2"], "has a built-in reward"),
        (["custom", "--reward", "exact", "--reward.concurrency", "2"], "reward.concurrency .* changes nothing"),
        (["custom", "--reward", "exact", "--reward.judge.model", "x"], "reward.judge.model is .* changes nothing"),
        (["custom", "--reward", "exact", "--reward.code-sandbox", "limits"], "reward.code_sandbox .* changes nothing"),
        (["custom", "--reward", "http:http://x", "--reward.workers", "2"], "reward.workers .* changes nothing"),
        (["custom", "--reward", "judge"], "needs reward.judge.url"),
        (["custom", "--reward", "judge", "--reward.judge.url", "http://x"], "needs reward.judge.model"),
        (["custom", "--reward", "exact", "--reward.max-failures", "1.5"], "reward.max_failures is 1.5"),
        (["custom", "--reward", ""], "--reward needs a value"),
    ],
)
def test_options_without_effect_are_refused(flags: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(flags)


JUDGE = ["--reward", "judge", "--reward.judge.model", "m"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--reward.judge.url", "host"], "begins with http"),
        (["--reward.judge.url", "http://me:pw@x"], "user name or password, .*reward.key_variable"),
        (["--reward.judge.url", "http://x:port"], "wrong host or port"),
        (["--reward.judge.url", "http://x", "--reward.judge.prompt", "rate it"], r"no \{response\}"),
        (["--reward.judge.url", "http://x", "--reward.judge.pattern", "("], "which is wrong"),
    ],
)
def test_an_invalid_judge_is_refused(flags: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(["custom", *JUDGE, *flags])


def test_the_dataflow_and_the_metrics_have_the_columns_of_the_functions() -> None:
    options = RewardOptions(functions=("exact", "a=mine.py:f"), parts=("a/x",))
    config = RunConfig(recipe="custom", reward=options)
    names = ("reward/exact", "reward/a", "reward/a/x", "applies/exact", "applies/a")
    assert reward_columns(options)[:5] == names
    stage = next(stage for stage in dataflow(config).stages if stage.name == "reward")
    assert stage.makes == ("reward", *reward_columns(options))
    assert {*names, "reward_failures/timeout", "reward_failures/died"} <= metric_names(config)
    assert "reward_failures/http" not in metric_names(config)
    assert reward_columns(RewardOptions()) == ()


# ---- arguments


def arguments_of(function: Any, **columns: Any) -> tuple[list[Any], dict[str, Any]]:
    return Arguments(function).of("R", "A", columns)


def test_parameters_are_filled_by_their_names() -> None:
    def call(function: Any, **columns: Any) -> Any:
        positional, named = arguments_of(function, **columns)
        return function(*positional, **named)

    assert call(lambda response, answer: (response, answer)) == ("R", "A")
    assert call(lambda answer, response: (response, answer)) == ("R", "A")
    assert call(lambda answer, text: (text, answer)) == ("R", "A")
    assert call(lambda text, gold: (text, gold)) == ("R", "A")
    assert call(lambda response, gold: (response, gold)) == ("R", "A")
    assert call(lambda completion: completion) == "R"
    assert call(lambda response, level: (response, level), level=3) == ("R", 3)
    assert call(lambda text, prompt: (text, prompt), prompt="P") == ("R", "P")
    assert call(lambda completion, **row: (completion, row), prompt="P") == ("R", {"prompt": "P", "answer": "A"})
    assert call(lambda **row: row, x=1) == {"response": "R", "answer": "A", "x": 1}
    assert call(lambda text, gold, level=7: level) == 7
    assert call(lambda text, gold, level=7: level, level=2) == 2
    assert call(lambda text, gold, a=1, level=7: (a, level), level=2) == (1, 2)
    assert call(lambda text, gold, **row: row, x=1) == {"x": 1}
    assert call(lambda text, **row: row, x=1) == {"answer": "A", "x": 1}
    assert call(lambda *both: both) == ("R", "A")
    assert call(lambda response, *rest: (response, rest)) == ("R", ("A",))
    assert call(lambda *, answer, response: (response, answer)) == ("R", "A")

    def positional(text: str, gold: str, level: int = 7, /) -> tuple[str, str, int]:
        return text, gold, level

    assert call(positional) == ("R", "A", 7)
    assert call(positional, level=1) == ("R", "A", 1)
    assert call(max, x=1) == "R"  # a function without a signature
    # A column with a reserved name does not override it.
    assert call(lambda response, answer: (response, answer), response="x") == ("R", "A")


def test_a_parameter_without_a_value_is_named() -> None:
    with pytest.raises(MissingColumn, match=r"^level$"):
        arguments_of(lambda response, answer, level: 0, other=1)
    with pytest.raises(MissingColumn, match=r"^level$"):
        arguments_of(lambda response, answer, *, level: 0)
    for function in (lambda response, answer: 0, lambda text, gold: 0, lambda *, response, answer: 0):
        with pytest.raises(MissingColumn, match=r"^answer$"):
            Arguments(function).of("R", MISSING, {"prompt": "P"})
    assert Arguments(lambda text, **row: 0).of("R", MISSING, {"x": 1}) == (["R"], {"x": 1})
    assert Arguments(lambda text, gold=5: 0).of("R", MISSING, {}) == (["R", 5], {})
    assert Arguments(lambda *both: 0).of("R", MISSING, {}) == (["R"], {})
    with pytest.raises(TypeError, match="takes no argument"):
        Arguments(lambda: 0)


def test_columns_before_the_response_and_the_answer_do_not_count_if_neither_has_its_name() -> None:
    def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> None: ...

    assert arguments_of(compute_score, data_source="D", extra_info=1) == (["D", "R", "A", 1], {})
    assert arguments_of(compute_score, data_source="D") == (["D", "R", "A"], {})
    assert arguments_of(lambda a, b, text, gold=5: 0, a=1, b=2) == ([1, 2, "R"], {})
    with pytest.raises(MissingColumn, match=r"^lvel$"):
        arguments_of(lambda response, prompt, lvel: 0, prompt="P")
    with pytest.raises(MissingColumn, match=r"^extra$"):
        arguments_of(lambda text, gold, extra: 0)


@pytest.mark.parametrize("rows", [({"tests": 1}, {}), ({}, {"tests": 1})])
@pytest.mark.parametrize("function", [lambda response, tests=None: 0, lambda text, tests: 0, lambda tests, text: 0])
def test_a_parameter_that_gets_its_column_or_the_answer_is_refused(function: Any, rows: Any) -> None:
    arguments = Arguments(function)
    arguments.of("R", "A", rows[0])
    for _ in range(2):
        with pytest.raises(Unusable, match=r"'tests' is a column of some rows, and would get .* behind a \*"):
            arguments.of("R", "A", rows[1])


def test_a_parameter_that_can_only_get_its_column_has_its_default_without() -> None:
    for function in (lambda response, *, tests=None: tests, lambda response, answer, tests=None: tests):
        arguments = Arguments(function)
        rows: list[dict[str, object]] = [{"tests": 1}, {}]
        calls = [arguments.of("R", "A", row) for row in rows]
        assert [function(*positional, **named) for positional, named in calls] == [1, None]


# ---- results


@given(st.lists(st.tuples(st.floats(0, 100), st.floats(-100, 100), st.booleans()), min_size=1, max_size=6))
@example([(1.0, 1.0, False), (5e-324, 1.0, True)])
def test_weights_of_functions_that_do_not_apply_are_redistributed(drawn: list[tuple[float, float, bool]]) -> None:
    functions = [RewardFunction(str(index), "exact", "", weight) for index, (weight, _, _) in enumerate(drawn)]
    outcomes = [RewardOutcome(Result.OK if ok else Result.NOT_APPLICABLE, value * ok) for _, value, ok in drawn]
    applying = sum(Fraction(weight) for weight, _, ok in drawn if ok)
    total = sum(Fraction(weight) for weight, _, _ in drawn)
    value = sum(Fraction(weight) * Fraction(value) for weight, value, ok in drawn if ok)
    expected = value if all(ok for _, _, ok in drawn) else value * total / applying if applying else 0
    assert combined(functions, outcomes) == pytest.approx(float(expected), rel=1e-9, abs=1e-9)


def test_a_single_function_of_weight_1_is_the_reward() -> None:
    assert combined([RewardFunction("a", "exact", "")], [RewardOutcome(Result.OK, 0.1)]) == 0.1


@given(st.one_of(st.floats(), st.integers(), st.booleans(), st.text(), st.binary(), st.lists(st.floats()), st.none()))
def test_any_returned_value_has_an_outcome(value: object) -> None:
    outcome = outcome_of(value, 3)
    if value is None:
        assert outcome.result is Result.NOT_APPLICABLE
    elif isinstance(value, float | int) and abs(value) <= 3e38:
        assert outcome == RewardOutcome(Result.OK, float(value))
    else:
        assert outcome.result is Result.INVALID
        assert outcome.line == 3


def test_a_mapping_of_numbers_gives_their_sum_and_parts() -> None:
    assert outcome_of({"a": 1, "b": 0.5}, 0) == RewardOutcome(Result.OK, 1.5, {"a": 1.0, "b": 0.5})
    for wrong in ({}, {1: 2.0}, {"": 1.0}, {"a": None}, {"a": math.nan}, {"a/": 1.0}, {"/": 1.0}, {"a": 1, "_b/": 1}):
        assert outcome_of(wrong, 0).result is Result.INVALID, wrong


@pytest.mark.parametrize("name", ["a/", "/", "", "_", 1, None])
def test_a_name_that_no_part_can_have_is_no_name_of_a_logged_number(name: Any) -> None:
    assert outcome_of({"b": 1.0, name: 1.0}, 0).result is Result.INVALID
    with pytest.raises(Unusable, match="a name is text that does not end in /"):
        note({}, name, 1.0)
    logged: dict[str, float] = {}
    note(logged, "a/b", 1.0)
    assert logged == {"a/b": 1.0}


class Unwritable:
    def __repr__(self) -> str:
        raise ValueError


@pytest.mark.parametrize("value", [10**5000, Unwritable(), numpy.complex64(1), torch.tensor(1 + 2j)], ids=range(4))
def test_values_that_are_no_numbers_or_cannot_be_written_are_invalid(value: Any) -> None:
    for returned in (value, {"a": value}):
        outcome = outcome_of(returned, 3)
        assert (outcome.result, outcome.line) == (Result.INVALID, 3)


def test_logged_numbers_without_a_part_are_invalid_with_what_to_return() -> None:
    assert "for a row to which it does not apply it returns None" in outcome_of({"_a": 1}, 0).detail


def test_what_a_partial_function_has_bound_stays() -> None:
    def function(response: str, answer: str, step: int, **row: Any) -> Any:
        return step, row

    bound: Any = partial(function, step=33)
    positional, named = Arguments(bound).of("R", "A", {"step": 1, "x": 2}, {"step": 5})
    assert bound(*positional, **named) == (33, {"x": 2})


def test_parts_with_an_underscore_are_logged_and_not_summed() -> None:
    assert outcome_of({"score": 1, "_acc": 0.5, "_pred": "x", "_none": None}, 0) == RewardOutcome(
        Result.OK, 1.0, {"score": 1.0, "acc": 0.5}
    )
    assert outcome_of(2.0, 0, {"acc": 1.0}) == RewardOutcome(Result.OK, 2.0, {"acc": 1.0})
    for wrong in ({"_a": 1.0}, {"a": 1.0, "_a": 1.0}, {"_": 1.0}, {"a": 1.0, "_b": math.inf}, {"a": 3e38, "b": 3e38}):
        assert outcome_of(wrong, 0).result is Result.INVALID, wrong
    assert outcome_of({"a": 1.0}, 0, {"a": 1.0}).result is Result.INVALID


async def scored(options: RewardOptions, *outcomes: RewardOutcome) -> SampleReward:
    """The reward of a sample with these outcomes of its functions."""

    class Given(RewardScorer):
        async def outcomes_of(self, samples: Sequence[RewardSample]) -> list[list[RewardOutcome]]:
            return [list(outcomes) for _ in samples]

    scorer = Given(options)
    try:
        return await scorer.score("r", b'{"answer": "7"}')
    finally:
        await scorer.close()


async def test_parts_may_differ_by_row() -> None:
    options = RewardOptions(functions=("http:http://x",), parts=("http/a", "http/b"))
    sample = await scored(options, RewardOutcome(Result.OK, 1.0, {"a": 1.0, "new": 5.0}))
    assert (sample.reward, sample.failure) == (1.0, "")
    assert {name: value for name, value in sample.numbers.items() if value} == {
        "reward/http": 1.0,
        "reward/http/a": 1.0,
    }


@pytest.mark.parametrize(("first", "second"), [("invalid", "timeout"), ("timeout", "invalid"), ("http", "memory")])
async def test_the_reason_of_a_sample_is_that_of_the_function_which_its_sentence_names(first: str, second: str) -> None:
    options = RewardOptions(functions=("ok=exact", "a=exact", "b=exact"), max_failures=1.0)
    failed = (RewardOutcome(Result(result), detail=f"it was {result}") for result in (first, second))
    sample = await scored(options, RewardOutcome(Result.OK, 1.0), *failed)
    assert sample.reason == first
    assert sample.failure.startswith(f"reward function a: it was {first}, on ")


@pytest.mark.parametrize("on_failure", ["zero", "drop", "stop"])
async def test_a_sample_to_which_no_function_applies_is_counted_and_no_failure(on_failure: Any) -> None:
    options = RewardOptions(functions=("a=exact", "b=exact"), on_failure=on_failure, max_failures=0.0)
    none = RewardOutcome(Result.NOT_APPLICABLE)
    sample = await scored(options, none, none)
    assert (sample.failure, sample.reason, sample.numbers[UNSCORED]) == ("", "not_applicable", 1.0)
    sample = await scored(options, none, RewardOutcome(Result.OK, 1.0))
    assert (sample.reward, sample.reason, sample.numbers[UNSCORED]) == (2.0, "", 0.0)


@pytest.mark.parametrize("logged", [RewardOutcome(Result.OK, 3.0), RewardOutcome(Result.ERROR, detail="it failed")])
async def test_a_function_of_weight_0_scores_no_sample(logged: RewardOutcome) -> None:
    options = RewardOptions(functions=("a=exact:0.5", "b=exact:0"), max_failures=1.0)
    sample = await scored(options, RewardOutcome(Result.NOT_APPLICABLE), logged)
    assert (sample.reward, sample.reason, sample.numbers[UNSCORED]) == (0.0, "not_applicable", 1.0)
    assert (sample.numbers["reward/b"], sample.numbers["applies/b"]) == (logged.value, 1.0)
    sample = await scored(options, RewardOutcome(Result.OK, 2.0), logged)
    assert (sample.reward, sample.numbers[UNSCORED]) == (1.0, 0.0)


@pytest.mark.parametrize(
    ("text", "without", "expected"),
    [
        ("<think>maybe 7</think> 8", "empty", (" 8", "<think>maybe 7</think> 8")),
        ("<think>a</think>b</think>c", "empty", ("c", "<think>a</think>b</think>c")),
        ("<think>maybe 7", "empty", ("", "<think>maybe 7")),
        ("<think>maybe 7", "whole", ("<think>maybe 7", "<think>maybe 7")),
    ],
)
async def test_functions_score_what_follows_the_end_of_thinking_but_the_format_the_whole_turn(
    text: str, without: Any, expected: tuple[str, str]
) -> None:
    functions = ("exact", "format:.*")
    scorer = RewardScorer(RewardOptions(functions=functions, after="</think>", without_after=without))
    assert (
        tuple(scorer._seen(function, RewardSample(text, b"{}")).response for function in scorer.functions) == expected
    )
    scorer = RewardScorer(RewardOptions(functions=functions))
    assert {scorer._seen(function, RewardSample(text, b"{}")).response for function in scorer.functions} == {text}


# ---- built in


def value(text: str, response: str, answer: object = "7") -> float:
    return built_in(parse_function(text))(response, answer, {}).value


@pytest.mark.parametrize(
    ("text", "response", "answer", "expected"),
    [
        ("exact", " 7\n", "7", 1.0),
        ("exact", "7.", "7", 0.0),
        ("exact", "7", 7, 1.0),
        ("regex:[0-9]+", "6, then 7", "7", 1.0),
        ("regex:[0-9]+", "7, then 6", "7", 0.0),
        ("regex:answer: ([0-9]+)", "answer: 7.", 7, 1.0),
        ("regex:[0-9]+", "none", "7", 0.0),
        ("format:<a>.*</a>", " <a>x\ny</a> ", "7", 1.0),
        ("format:<a>.*</a>", "<a>x</a> and", "7", 0.0),
        ("length:4", "1234", "7", 0.0),
        ("length:4", "123456", "7", -0.5),
        ("length:4", "x" * 99, "7", -1.0),
    ],
)
def test_built_in_functions(text: str, response: str, answer: object, expected: float) -> None:
    assert value(text, response, answer) == expected


def test_math_compares_expressions() -> None:
    pytest.importorskip("math_verify")
    assert value("math", r"so it is \boxed{0.5}", "1/2") == 1.0
    assert value("math", r"so it is $\frac{2}{4}$", r"$\frac12$") == 1.0
    assert value("math", "so it is 0.6", "1/2") == 0.0
    assert value("math", "", 7) == 0.0
    assert value("math", "The answer is 7.", 7) == 1.0
