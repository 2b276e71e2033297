"""What the recipes pose and reward, and what they read."""

import json
import random
import sys
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet

from flowrt.errors import ConfigError
from flowrt.recipes.arithmetic import Arithmetic
from flowrt.recipes.datafile import read_rows
from flowrt.recipes.gsm8k import WordProblems

ROWS = [{"question": f"What is {n} + 1?", "answer": f"It is one more.\n#### {n + 1}"} for n in range(8)]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


def words(path: Path) -> WordProblems:
    return WordProblems(path, "question", "answer", eval_problems=2, vocab_size=300)


def test_arithmetic_is_right_and_held_out_problems_never_turn_up_in_training() -> None:
    subject = Arithmetic(seed=3, eval_problems=200)
    training, held_out = subject.training_problems(), subject.held_out_problems()
    assert not {problem.prompt for problem in training} & {problem.prompt for problem in held_out}
    for problem in [*training[:500], *held_out]:
        expression = problem.prompt.rstrip("=").strip()
        assert str(eval(expression)) == problem.answer == problem.solution.rsplit(",", 1)[-1]
        assert problem.solution.count(",") == expression.count("+") + expression.count("-") - 1
    assert {len(problem.solution) for problem in training} == {1, 3, 5, 7, 9}


@pytest.mark.parametrize(("response", "reward"), [("8,6", 1.0), ("6", 1.0), ("8,5", 0.0), ("", 0.0), ("6,", 0.0)])
def test_arithmetic_pays_for_the_last_number(response: str, reward: float) -> None:
    assert Arithmetic(0, 1).reward(response, "6") == reward


def test_arithmetic_text_survives_its_tokenizer() -> None:
    subject = Arithmetic(0, 1)
    tokenizer = subject.tokenizer()
    for problem in subject.training_problems()[:50]:
        for text in (problem.prompt, problem.solution):
            assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_the_same_seed_poses_the_same_problems_and_another_others() -> None:
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
def test_word_problems_pay_for_the_final_number(file: Path, response: str, reward: float) -> None:
    assert words(file).reward(response, "7") == reward


def test_word_problems_hold_the_last_rows_out_and_round_trip(file: Path) -> None:
    subject = words(file)
    assert [problem.answer for problem in subject.held_out_problems()] == ["7", "8"]
    assert len(subject.training_problems()) == 6
    tokenizer = subject.tokenizer()
    text = "Ünïcode, digits 123\n#### 4"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert subject.lesson(random.Random(0), bare=False).solution.startswith("It is one more.")


def test_parquet_reads_like_json_lines(file: Path, tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    parquet.write_table(pa.Table.from_pylist(ROWS), path)
    assert read_rows(path, ("question", "answer")) == read_rows(file, ("question", "answer"))


def test_a_parquet_file_without_pyarrow_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "rows.parquet"
    path.write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ConfigError, match=r"pip install 'flowrt\[parquet\]'"):
        read_rows(path, ("question",))


def test_what_is_no_parquet_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    path.write_bytes(b"nonsense")
    with pytest.raises(ConfigError, match=r"rows\.parquet is no parquet file"):
        read_rows(path, ("question",))
