"""Data files: every format gives the same rows; mistakes are reported with file, line and field, ten at once."""

import gzip
import json
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from flowrt.errors import ConfigError
from flowrt.recipes.config import DataConfig
from flowrt.recipes.config_io import parse
from flowrt.recipes.data.base import Mistakes, Rows
from flowrt.recipes.data.files import open_rows
from flowrt.recipes.data.json_lines import JsonLines
from flowrt.recipes.tasks.problems import Problems, ProblemSet, check_rows, open_sets, problem
from flowrt.recipes.tasks.rows import read_rows

DATA = DataConfig(prompt_key="prompt", eval_prompts=0)
ROWS: list[dict[str, Any]] = [
    {"prompt": [{"role": "user", "content": f"{n} + 1?"}], "answer": str(n + 1), "level": n % 3} for n in range(40)
]


def check(rows: Rows, data: DataConfig, first_held_out: int) -> None:
    """Check a run's only data set."""
    check_rows([ProblemSet("", 1.0, rows, data, first_held_out)], data)


def lines(rows: list[Any]) -> bytes:
    return "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows).encode()


def save_to_disk(path: Path, rows: list[Any], parts: int = 2) -> Path:
    """A directory as `datasets.Dataset.save_to_disk` writes it."""
    path.mkdir(parents=True)
    names = [f"data-{part:05}-of-{parts:05}.arrow" for part in range(parts)]
    size = -(-len(rows) // parts)
    for part, name in enumerate(names):
        table = pa.Table.from_pylist(rows[part * size : (part + 1) * size])
        with pa.OSFile(str(path / name), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table, max_chunksize=7)
    (path / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))
    (path / "dataset_info.json").write_text("{}")
    return path


def snapshot(path: Path, rows: list[Any]) -> Path:
    """A snapshot of a data set on the Hub, with shards, another split, and a script that must not run."""
    (path / "data").mkdir(parents=True)
    for shard, start in enumerate((0, 25)):
        part = pa.Table.from_pylist(rows[start : start + 25])
        parquet.write_table(part, path / "data" / f"train-{shard:05}-of-00002.parquet", row_group_size=6)
    parquet.write_table(pa.Table.from_pylist(rows[:3]), path / "data" / "test-00000-of-00001.parquet")
    (path / "README.md").write_text("---\n---\n")
    (path / "script.py").write_text("raise SystemExit('a script of a data set was run')\n")
    return path


def write(kind: str, folder: Path) -> Path:
    """The rows in one of the formats."""
    match kind:
        case "jsonl":
            (folder / "rows.jsonl").write_bytes(lines(ROWS))
            return folder / "rows.jsonl"
        case "jsonl.gz":
            (folder / "rows.jsonl.gz").write_bytes(gzip.compress(lines(ROWS)))
            return folder / "rows.jsonl.gz"
        case "parquet":
            parquet.write_table(pa.Table.from_pylist(ROWS), folder / "rows.parquet", row_group_size=6)
            return folder / "rows.parquet"
        case "saved":
            return save_to_disk(folder / "saved", ROWS)
        case "saved splits":
            save_to_disk(folder / "all" / "train", ROWS)
            save_to_disk(folder / "all" / "test", ROWS[:2], parts=1)
            (folder / "all" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
            return folder / "all"
        case "shards":
            (folder / "shards").mkdir()
            for name, part in (("a", ROWS[:1]), ("b", ROWS[1:])):
                (folder / "shards" / f"{name}.jsonl").write_bytes(lines(part))
            return folder / "shards"
    return snapshot(folder / "hub", ROWS)


KINDS = ("jsonl", "jsonl.gz", "parquet", "saved", "saved splits", "shards", "snapshot")


@pytest.mark.parametrize("kind", KINDS)
def test_every_format_gives_the_same_rows_by_scan_and_by_index(kind: str, tmp_path: Path) -> None:
    rows = open_rows(write(kind, tmp_path))
    assert list(rows.scan()) == ROWS
    assert [rows.row(index) for index in reversed(range(len(rows)))] == ROWS[::-1]
    check(rows, DATA, len(rows))
    problems = Problems(rows, DATA, range(len(rows)))
    assert list(problems) == [problems[index] for index in range(len(ROWS))]
    assert problems[3].messages == (("user", "3 + 1?"),)
    assert json.loads(problems[3].answer) == {"answer": "4", "prompt": ROWS[3]["prompt"], "level": 0}


@pytest.mark.parametrize("kind", ["saved splits", "snapshot"])
def test_the_split_selects_files_of_a_directory(kind: str, tmp_path: Path) -> None:
    path = write(kind, tmp_path)
    assert list(open_rows(path, "test").scan()) == ROWS[: len(open_rows(path, "test"))] != ROWS
    with pytest.raises(ConfigError, match=r"has no .*split 'dev' \(data\.split\); it has 'train', 'test'"):
        open_rows(path, "dev")


def test_a_row_is_located_by_file_and_line(tmp_path: Path) -> None:
    assert open_rows(write("shards", tmp_path)).where(1) == f"data file {tmp_path}/shards/b.jsonl, line 1"
    path = tmp_path / "blank.jsonl"
    path.write_bytes(b'\n{"prompt": "a"}\n  \t\n\n{"prompt": "b"}\r\n \n')
    rows = JsonLines(path)
    assert [(rows.where(index)[-1], rows.row(index)) for index in (1, 0)] == [
        ("5", {"prompt": "b"}),
        ("2", {"prompt": "a"}),
    ]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.one_of(st.sampled_from(["", " ", "\t\r"]), st.dictionaries(st.text(), st.text(), max_size=3))))
def test_blank_lines_are_skipped(tmp_path_factory: pytest.TempPathFactory, content: list[Any]) -> None:
    path = tmp_path_factory.getbasetemp() / "generated.jsonl"
    path.write_bytes(lines(content))
    rows = JsonLines(path)
    expected = [one for one in content if isinstance(one, dict)]
    assert list(rows.scan()) == [rows.row(index) for index in range(len(rows))] == expected


@pytest.mark.parametrize(
    ("name", "content", "error"),
    [
        ("rows.jsonl.gz", gzip.compress(lines(ROWS))[:-30], "cannot be unpacked"),
        ("rows.jsonl.gz", b"\x1f\x8bnonsense", "cannot be unpacked"),
        ("rows.parquet", b"PAR1nonsense", "is not a Parquet file"),
        ("rows.arrow", b"nonsense", "is not an Arrow stream"),
        ("state.json", b"{", "is not JSON"),
        ("state.json", b"[]", "does not list the files of the rows"),
        ("state.json", b'{"_data_files": [{"filename": "../../a.arrow"}]}', "a.arrow does not exist"),
        ("readme.md", b"", "is a directory without files of rows"),
    ],
)
def test_damaged_files_are_reported_by_path(tmp_path: Path, name: str, content: bytes, error: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=f"^data file {tmp_path}.*{error}"):
        open_rows(tmp_path / name if name.startswith("rows") else tmp_path)


def test_a_directory_of_several_data_sets_is_refused(tmp_path: Path) -> None:
    write("shards", tmp_path)
    with pytest.raises(ConfigError, match=r"a directory of several data sets \('shards'\); name one"):
        open_rows(tmp_path)


@pytest.mark.parametrize("name", ["rows.parquet", "rows.arrow"])
def test_a_missing_pyarrow_is_reported_with_the_install_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (tmp_path / name).write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ConfigError, match=r"needs pyarrow: pip install 'flowrt\[data\]'"):
        open_rows(tmp_path / name)


def message(role: object = "user", content: object = "u", **more: object) -> dict[str, object]:
    return {"role": role, "content": content, **more}


@pytest.mark.parametrize(
    ("row", "error"),
    [
        ({"answer": "1"}, "line 2 has no field 'prompt'; it has 'answer'; name one of them with --data.prompt-key"),
        ({"prompt": 5}, "line 2: field 'prompt' is int, not text or a list of messages"),
        ({"prompt": ""}, "line 2: field 'prompt', the prompt, is empty"),
        ({"prompt": []}, "line 2: field 'prompt', the prompt, is empty"),
        ({"prompt": [message(content=" ")]}, "line 2: field 'prompt', the prompt, is empty"),
        ({"prompt": ["hello"]}, r"line 2: field 'prompt\[0\]' is str, not a message with role and content"),
        (
            {"prompt": [message("bot")]},
            r"line 2: field 'prompt\[0\].role' is 'bot'; use one of system, developer, user",
        ),
        ({"prompt": [{"content": "u"}]}, r"line 2: in 'prompt\[0\]': row has no field 'role'; it has 'content'"),
        ({"prompt": [{"role": "user"}]}, r"line 2: field 'prompt\[0\].content' is missing, not text"),
        (
            {"prompt": [message(), message(content=[{"type": "image"}])]},
            r"line 2: field 'prompt\[1\].content' is list, not text \(only text is supported\)",
        ),
        ({"prompt": [message(tool_calls=[1])]}, r"line 2: field 'prompt\[0\]' has 'tool_calls'; only role and content"),
        (
            {"prompt": [message(), message("assistant")]},
            "line 2: field 'prompt' ends with a message of role assistant; leave it out, or set data.prefill",
        ),
        (
            {"prompt": [message(content="half \ud83d")]},
            r"line 2: field 'prompt\[0\].content' has half a character \(\\ud83d, a lone surrogate\) at place 5",
        ),
        ("[]", "line 2 is list, not an object with fields"),
        ('{"prompt": ', "line 2 is not JSON"),
    ],
)
def test_a_row_without_a_valid_prompt_is_reported_with_its_line(tmp_path: Path, row: object, error: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(lines([{"prompt": "fine"}, row, {"prompt": "fine too"}]))
    with pytest.raises(ConfigError, match=f"^data file {path}, {error}"):
        check(open_rows(path), DATA, 3)


@pytest.mark.parametrize(("wrong", "counted"), [(3, "3 mistakes"), (9, "9 mistakes"), (25, "at least 10 mistakes")])
def test_the_first_ten_mistakes_are_reported_together(tmp_path: Path, wrong: int, counted: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(lines([{"prompt": "fine", "answer": "1"}, *[{"prompt": n, "answer": n} for n in range(wrong)]]))
    for read in (lambda: check(open_rows(path), DATA, 1), lambda: read_rows(path, ("prompt", "answer"))):
        with pytest.raises(ConfigError) as refused:
            read()
        error = str(refused.value)
        assert error.startswith(f"{counted} in the data: data file {path}, line 2: field 'prompt' is int")
        others = ", ".join(str(line) for line in range(3, 2 + min(wrong, 10)))
        assert error.count("field 'prompt' is int") == 1
        assert error.endswith(f"(also lines {others})" if others else "list of messages")
        assert "\n" not in error


def test_mistakes_that_differ_in_a_number_or_a_prompt_are_listed_once() -> None:
    def add(mistakes: Mistakes, errors: tuple[str, ...]) -> None:
        for error in errors:
            mistakes.add(ConfigError(error))
        mistakes.report()

    def report(*errors: str) -> str:
        with pytest.raises(ConfigError) as refused:
            add(Mistakes(), errors)
        return str(refused.value)

    refusal = "the prompt is messages, and the checkpoint has no chat template"
    prompts = [f"prompt {text!r}: {refusal}" for text in ("it's 1", *map(str, range(20)))]
    assert report(*prompts) == f"at least 10 mistakes in the data: {prompts[0]} (and 9 more like it)"
    tokens = [f"data file x, line {n}: the prompt has token {90 + n}, and m a vocab_size of 80" for n in range(1, 13)]
    assert report(*tokens).endswith(f"data: {tokens[0]} (also lines 2, 3, 4, 5, 6, 7, 8, 9, 10)")
    columns = [f"data file x, line {n} is not JSON: Expecting value at column {n}" for n in (3, 5)]
    other = f"prompt 'a': {refusal}"
    assert report(*columns, other) == f"3 mistakes in the data: {columns[0]} (also line 5); {other}"


def test_answers_are_present_in_all_rows_or_in_none(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(lines([{"prompt": "a"}, {"prompt": "b"}]))
    check(open_rows(path), DATA, 2)
    assert json.loads(problem({"prompt": "a"}, DATA, "").answer) == {"prompt": "a", "answer": None}
    with pytest.raises(ConfigError, match="line 1 has no field 'gold'; it has 'prompt'"):
        check(open_rows(path), DataConfig(prompt_key="prompt", answer_key="gold"), 2)
    path.write_bytes(lines([{"prompt": "a", "answer": 1}, {"prompt": "b"}]))
    with pytest.raises(
        ConfigError, match="line 2 has no field 'answer'; it has 'prompt'; leave the column out of every"
    ):
        check(open_rows(path), DATA, 2)


def test_the_answer_may_be_nested_and_further_columns_are_kept(tmp_path: Path) -> None:
    row = {"prompt": "p", "reward_model": {"ground_truth": {"x": 1}}, "level": 3}
    parsed = problem(row, DataConfig(prompt_key="prompt", answer_key="reward_model.ground_truth"), "")
    assert json.loads(parsed.answer) == {**row, "answer": {"x": 1}}


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_rows_in_the_format_of_verl_are_accepted(tmp_path: Path, kind: str) -> None:
    """Its columns, with the answer nested in ``reward_model``; all of them reach the reward."""
    rows: list[dict[str, Any]] = [
        {
            "data_source": "openai/gsm8k",
            "prompt": [{"role": "user", "content": f"{n} + 1?"}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(n + 1)},
            "extra_info": {"index": n, "split": "train"},
        }
        for n in range(5)
    ]
    path = tmp_path / f"rows.{kind}"
    if kind == "jsonl":
        path.write_bytes(lines(rows))
    else:
        parquet.write_table(pa.Table.from_pylist(rows), path)
    data = DataConfig(path=str(path), prompt_key="prompt", answer_key="reward_model.ground_truth", eval_prompts=1)
    [opened] = open_sets(data)
    check_rows([opened], data)
    assert json.loads(opened.training[2].answer) == {**rows[2], "answer": "3"}
    assert opened.held_out[0].messages == (("user", "4 + 1?"),)
    wrong = DataConfig(path=str(path), prompt_key="prompt", answer_key="reward_model.truth", eval_prompts=1)
    with pytest.raises(ConfigError, match=r" 1 has no field 'reward_model\.truth'; it has 'data_source', 'prompt'"):
        check_rows(open_sets(wrong), wrong)


def test_held_out_prompts_among_the_training_rows_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(lines([{"prompt": "a  b"}, {"prompt": "c"}, {"prompt": "c"}, {"prompt": "a b "}]))
    error = r"line 1: the prompt is also held out for the evaluation, as 1 training prompts are \(the last 1 rows"
    with pytest.raises(ConfigError, match=error):
        check(open_rows(path), DATA, 3)
    check(open_rows(path), DataConfig(prompt_key="prompt", allow_overlap=True), 3)
    check(open_rows(path), DATA, 4)


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        (["--data.prefill", "True"], r"data\.prefill changes nothing in recipe arithmetic"),
        (["--data.allow-overlap", "True"], r"data\.allow_overlap changes nothing in recipe arithmetic"),
        (["--data.chat-template-kwargs", "x"], r"data\.chat_template_kwargs is 'x', which is not JSON"),
        (
            ["--data.chat-template", "none", "--data.system-prompt", "s"],
            r"data\.system_prompt is set, and data\.chat_template is none",
        ),
        (["--data", __file__, "--data.split", "test"], r"data\.split is 'test', and .* is a file"),
    ],
)
def test_options_without_effect_are_refused(flags: list[str], error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        parse(["arithmetic", *flags])
