"""Tasks: their problems, their rewards and their data files."""

import json
import os
import random
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet
from tokenizers import Tokenizer

from flowrt.cli import main
from flowrt.errors import ConfigError
from flowrt.recipes.config import RunConfig
from flowrt.recipes.config_io import from_toml, parse, to_toml
from flowrt.recipes.tasks import registry
from flowrt.recipes.tasks.arithmetic import Arithmetic
from flowrt.recipes.tasks.base import Example, Recipe, Task
from flowrt.recipes.tasks.gsm8k import FINAL, Gsm8k
from flowrt.recipes.tasks.rows import read_rows

ROWS = [{"question": f"What is {n} + 1?", "answer": f"It is one more.\n#### {n + 1}"} for n in range(8)]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


def gsm8k_task(path: Path) -> Gsm8k:
    return Gsm8k(path, "question", "answer", eval_problems=2, vocab_size=300)


def test_arithmetic_solutions_are_correct_and_held_out_problems_untrained() -> None:
    task = Arithmetic(seed=3, eval_problems=200)
    training, held_out = task.training_problems(), task.held_out_problems()
    assert not {problem.prompt for problem in training} & {problem.prompt for problem in held_out}
    for problem in [*training[:500], *held_out]:
        expression = problem.prompt.rstrip("=").strip()
        assert str(eval(expression)) == problem.answer == problem.solution.rsplit(",", 1)[-1]
        assert problem.solution.count(",") == expression.count("+") + expression.count("-") - 1
    assert {len(problem.solution) for problem in training} == {1, 3, 5, 7, 9}


@pytest.mark.parametrize(("response", "reward"), [("8,6", 1.0), ("6", 1.0), ("8,5", 0.0), ("", 0.0), ("6,", 0.0)])
def test_arithmetic_rewards_the_last_number(response: str, reward: float) -> None:
    assert Arithmetic(0, 1).reward(response, "6") == reward


def test_the_arithmetic_tokenizer_round_trips() -> None:
    task = Arithmetic(0, 1)
    tokenizer = task.tokenizer()
    for problem in task.training_problems()[:50]:
        for text in (problem.prompt, problem.solution):
            assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_the_seed_determines_the_problems() -> None:
    first, again, other = (Arithmetic(seed, 1).training_problems()[:50] for seed in (1, 1, 2))
    assert first == again
    assert first != other


@pytest.mark.parametrize(
    ("response", "reward"),
    [
        ("so 7\n#### 7", 1.0),
        ("#### 1,000", 0.1),
        ("#### 7.0", 1.0),
        ("#### -7", 0.1),
        ("#### seven", 0.0),
        ("7", 0.0),
        ("#### 7 and more", 0.0),
    ],
)
def test_gsm8k_rewards_the_final_number(file: Path, response: str, reward: float) -> None:
    assert gsm8k_task(file).reward(response, "7") == reward


def test_gsm8k_holds_out_the_last_rows_and_its_tokenizer_round_trips(file: Path) -> None:
    task = gsm8k_task(file)
    assert [problem.answer for problem in task.held_out_problems()] == ["7", "8"]
    assert len(task.training_problems()) == 6
    tokenizer = task.tokenizer()
    text = "Ünïcode, digits 123\n#### 4"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert task.sft_example(random.Random(0), answer_only=False).solution.startswith("It is one more.")


def test_parquet_and_json_lines_give_the_same_rows(file: Path, tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    parquet.write_table(pa.Table.from_pylist(ROWS), path)
    rows = read_rows(path, ("question", "answer"))
    assert [row.values for row in rows] == [row.values for row in read_rows(file, ("question", "answer"))]
    assert rows[2].where == f"data file {path}, row 3"


def test_parquet_without_pyarrow_is_refused_with_the_install_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "rows.parquet"
    path.write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ConfigError, match=r"pip install 'flowrt\[data\]'"):
        read_rows(path, ("question",))


def test_an_invalid_parquet_file_is_reported_by_name(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    path.write_bytes(b"nonsense")
    with pytest.raises(ConfigError, match=r"rows\.parquet is not a Parquet file"):
        read_rows(path, ("question",))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"[" * 100_000, "line 2 is nested too deeply"),
        (b'{"question": {"a":' * 50_000, "line 2 is nested too deeply"),
        (b'{"question": "x", "n": ' + b"9" * 10_000 + b"}", "line 2 cannot be read: Exceeds the limit"),
        (b'{"question": ' + b"9" * 4000 + b"}", "line 2: field 'question' is int, not text"),
        (b'{"question": ""}', "line 2: field 'question', the prompt, is empty"),
        (b'{"question": " \\n"}', "line 2: field 'question', the prompt, is empty"),
        (
            b'{"question": "so \\ud83d"}',
            r"line 2: field 'question' has half a character \(\\ud83d, a lone surrogate\) at place 3",
        ),
        (b'{"question": "caf\xe9"}', "line 2 is not UTF-8 text"),
        (b'{"question": "caf\xc3\xa9"', "line 2 is not JSON"),
        (b"NaN", "line 2 is float, not an object"),
        (
            b"{" + b", ".join(b'"k%d": 1' % n for n in range(1000)) + b"}",
            r"line 2 has no field 'question'; it has .{200}…$",
        ),
    ],
    ids=lambda value: value[:12] if isinstance(value, bytes) else "",
)
def test_a_bad_row_is_reported_with_its_line(tmp_path: Path, line: bytes, message: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"question": "1+1?"}\n' + line + b"\n")
    with pytest.raises(ConfigError, match=message):
        read_rows(path, ("question",))


def test_a_byte_order_mark_is_accepted(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"question": "1+1?"}\r\n\r\n{"question": "2+2?"}')
    assert [(row.where.rpartition(", ")[2], row.values) for row in read_rows(path, ("question",))] == [
        ("line 1", ("1+1?",)),
        ("line 3", ("2+2?",)),
    ]


def test_a_path_that_is_not_a_regular_file_is_refused(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    for path, message in (
        (tmp_path, "is a directory"),
        (fifo, "is not a regular file"),
        (Path("/dev/zero"), "is not a regular file"),
        (tmp_path / ("x" * 300), "cannot be read: File name too long"),
        (tmp_path / "nowhere", "does not exist"),
    ):
        with pytest.raises(ConfigError, match=f"^data file {path} {message}"):
            read_rows(path, ("question",))


BACKTRACKING = re.compile(r"#### (-?[\d,]*\.?\d+)\s*$")


@given(st.lists(st.sampled_from(["#### ", "-", "1", "23", ",", ".", " ", "\n", "x", "٣"]), max_size=12).map("".join))
def test_the_final_number_pattern_agrees_with_the_backtracking_one(text: str) -> None:
    actual, expected = FINAL.search(text), BACKTRACKING.search(text)
    assert (actual and actual[1]) == (expected and expected[1])


def test_the_reward_of_two_million_digits_takes_linear_time(file: Path) -> None:
    """In quadratic time it would take hours."""
    response = "#### " + "1" * 2_000_000 + "x"
    assert gsm8k_task(file).reward(response, "7") == 0.0


class Echo(Task):
    """Copy the prompt."""

    def training_problems(self) -> Sequence[Example]:
        return [Example("a", "a", "a")]

    def held_out_problems(self) -> Sequence[Example]:
        return []

    def reward(self, response: str, answer: str) -> float:
        return float(response == answer)

    def sft_example(self, rng: random.Random, answer_only: bool) -> Example:
        raise NotImplementedError

    def tokenizer(self) -> Tokenizer:
        raise NotImplementedError


def test_a_new_task_is_a_class_and_a_registry_entry(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = Recipe("copies of the prompt", RunConfig(recipe="echo", steps=7), lambda _: Echo())
    monkeypatch.setitem(registry.RECIPES, "echo", recipe)
    config = parse(["echo", "--group-size", "3"])
    assert (config.recipe, config.steps, config.group_size) == ("echo", 7, 3)
    assert from_toml(to_toml(config)) == config
    assert registry.task_of(config).reward("a", "a") == 1.0
    registry.check_task(config, print)
    with pytest.raises(ConfigError, match="recipe echo has a built-in reward"):
        parse(["echo", "--reward", "mine.py"])
    assert main([]) == 2
    assert "echo        copies of the prompt" in capsys.readouterr().out
