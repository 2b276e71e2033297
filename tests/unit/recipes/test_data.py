"""Data files: every format gives the same rows; mistakes are reported with file, line and field, ten at once."""

import dataclasses
import gzip
import json
import re
import struct
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from flowrt.engines.prompts import DataPrompt, as_message
from flowrt.errors import ConfigError
from flowrt.recipes.config_io import parse
from flowrt.recipes.data.base import Mistakes, Rows
from flowrt.recipes.data.files import open_rows
from flowrt.recipes.data.json_lines import JsonLines
from flowrt.recipes.data.prompt_scan import scan_prompts
from flowrt.recipes.data_config import DataConfig
from flowrt.recipes.tasks.problems import Problems, ProblemSet, check_rows, folded, open_sets, problem
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
        case "json":
            (folder / "rows.json").write_text(json.dumps(ROWS, indent=2))
            return folder / "rows.json"
        case "json.gz":
            (folder / "rows.json.gz").write_bytes(gzip.compress(json.dumps(ROWS).encode()))
            return folder / "rows.json.gz"
        case "feather":
            table = pa.Table.from_pylist(ROWS)
            with pa.OSFile(str(folder / "rows.feather"), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
                writer.write_table(table, max_chunksize=7)
            return folder / "rows.feather"
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


KINDS = ("jsonl", "jsonl.gz", "json", "json.gz", "feather", "parquet", "saved", "saved splits", "shards", "snapshot")


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
    expected = [row for row in content if isinstance(row, dict)]
    assert list(rows.scan()) == [rows.row(index) for index in range(len(rows))] == expected


@pytest.mark.parametrize(
    ("name", "content", "error"),
    [
        ("rows.jsonl.gz", gzip.compress(lines(ROWS), mtime=0)[:-30], "cannot be unpacked"),
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


ROW = {"prompt, text": "1 + 1?", "answer": "2"}


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("rows.csv", b'\n  \n"prompt, text",answer\n1 + 1?,2\n'),
        ("rows.csv", b'"prompt, text";answer\n1 + 1?;2\n'),
        ("rows.csv", b"prompt, text\tanswer\n1 + 1?\t2\n".replace(b"prompt, text", b'"prompt, text"')),
        ("ROWS.CSV", b'\xef\xbb\xbf"prompt, text",answer\n1 + 1?,2\n'),
        ("Rows.Csv.GZ", gzip.compress(b'"prompt, text",answer\n1 + 1?,2\n', mtime=0)),
        ("rows.jsonl", b'\xef\xbb\xbf\n{"prompt, text": "1 + 1?", "answer": "2"}\n'),
        ("rows.jsonl", b'\xef\xbb\xbf{"prompt, text": "1 + 1?", "answer": "2"}\n'),
    ],
)
def test_tables_and_lines_are_read_as_programs_write_them(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    for path in (tmp_path / name, tmp_path):
        rows = open_rows(path)
        assert list(rows.scan()) == [rows.row(0)] == [ROW]


NOT_HELD = {
    "timestamp[ms]": pa.array([0, 10**18, 0], pa.timestamp("ms")),
    "string": pa.StringArray.from_buffers(3, pa.py_buffer(struct.pack("<4i", 0, 1, 2, 3)), pa.py_buffer(b"a\xffb")),
    "list": pa.array([[0], [10**18], []], pa.list_(pa.timestamp("ms"))),
}


@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
@pytest.mark.parametrize("kind", NOT_HELD)
def test_values_that_python_cannot_hold_are_reported_by_row_and_column(kind: str, suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"rows.{suffix}"
    table = pa.table({"prompt": ["a", "b", "c"], "when": NOT_HELD[kind]})
    if suffix == "parquet":
        parquet.write_table(table, path)
    else:
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
    rows = open_rows(path)
    first, second, third = rows.scan()
    assert first == rows.row(0)
    assert third == rows.row(2)
    text = f"data file {path}, row 2: column 'when' of type {kind}"
    assert isinstance(second, ConfigError)
    assert str(second).startswith(text)
    with pytest.raises(ConfigError, match=re.escape(text)):
        rows.row(1)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("rows.csv", 'prompt,answer\r\n"a\n""b"", c",14\r\n\r\n"  d ",\r\n'),
        ("rows.csv", '\ufeffprompt;answer\n"a\n""b"", c";14\n"  d ";\n'),
        ("rows.tsv", 'prompt\tanswer\n"a\n""b"", c"\t14\n  d \t\n'),
        ("rows.csv.gz", 'prompt,answer\n"a\n""b"", c",14\n  d ,\n'),
    ],
)
def test_a_table_has_rows_of_text(tmp_path: Path, name: str, content: str) -> None:
    text = content.encode()
    (tmp_path / name).write_bytes(gzip.compress(text) if name.endswith(".gz") else text)
    for path in (tmp_path / name, tmp_path):
        rows = open_rows(path)
        assert list(rows.scan()) == [{"prompt": 'a\n"b", c', "answer": "14"}, {"prompt": "  d ", "answer": ""}]
        assert rows.row(1) == {"prompt": "  d ", "answer": ""}
        assert rows.where(0) == f"data file {tmp_path / name}, line 2"
        assert rows.where(1).endswith(("line 4", "line 5"))
        assert list(scan_prompts(rows, DATA).__next__().prompts) == [
            DataPrompt('a\n"b", c'),
            DataPrompt("  d "),
        ]


@pytest.mark.parametrize(
    ("name", "content", "error"),
    [
        ("rows.csv", b"prompt,answer\nx,1\ny\n", r", line 3 has 1 of the 2 fields that the first line names"),
        ("rows.csv", b"prompt,prompt\nx,1\n", r" has two columns 'prompt' in its first line"),
        ("rows.csv", b'prompt,answer\n"x,1\n', r", line 2 cannot be read: unexpected end of data; check its quotes"),
        ("rows.csv", b"prompt\n\xff\n", r" is not UTF-8 text after line 1: .*; convert it"),
        ("rows.csv", "prompt\n".encode("utf-16"), r" is UTF-16 text; convert it to UTF-8"),
        ("rows.tsv", b"PK\x03\x04rest", r" is a ZIP archive or an Excel sheet; unpack it, or save it as CSV"),
        (
            "rows.json",
            b'[{"prompt": "a"},\n {"prompt": ]',
            r" begins as a JSON array, and is not JSON: .* at line 2",
        ),
        (
            "rows.json",
            b'{\n "data": [1],\n "b": 2\n}',
            r" is one JSON object over several lines, with lists in 'data'",
        ),
        ("rows.json", b'{\n "a": 1\n}\n{\n "a": 2\n}', r" has JSON objects over several lines; write each row as on"),
        (
            "rows.txt",
            b"prompt,answer\nx,1\n",
            r" is not JSON Lines: it begins with 'prompt,answer'; if .* name it",
        ),
        ("rows.yaml", b"- prompt: a\n", r" is not JSON Lines: it begins with '- prompt: a'"),
        ("rows.jsonl", b"the first prompt\n", r" is not JSON Lines: it begins with 'the first prompt'"),
        ("rows.jsonl", b"<!DOCTYPE html>\n", r" is a web page or XML, maybe an error page"),
        ("rows.jsonl", b"version https://git-lfs.github.com/spec/v1\noid", r" is a pointer of Git LFS .*git lfs pull"),
        ("rows.jsonl.zst", b"\x28\xb5\x2f\xfdrest", r" is compressed with Zstandard; unpack it: zstd -d"),
        ("rows.pkl", b"\x80\x04rest", r" is a pickle, which is not loaded"),
        ("rows.bin", b"ab\0cd", r" is binary data"),
    ],
)
def test_a_file_without_rows_is_refused_with_what_it_is(tmp_path: Path, name: str, content: bytes, error: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=f"^data file {path}{error}"):
        check(open_rows(path), DATA, 1)


def test_an_array_of_values_that_are_no_rows_is_reported_by_row(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_text('[{"prompt": "a"}, 5, {"prompt": 1e999}]')
    with pytest.raises(ConfigError, match=r"rows.json, row 2 is int, not an object .*row 3: field 'prompt'"):
        check(open_rows(path), DATA, 3)


def test_descriptions_in_the_directory_are_not_rows(tmp_path: Path) -> None:
    (tmp_path / "dataset_infos.json").write_text("{}")
    (tmp_path / "train.json").write_text(json.dumps(ROWS))
    assert list(open_rows(tmp_path).scan()) == ROWS
    (tmp_path / "train.jsonl").write_bytes(lines(ROWS[:2]))  # JSON Lines come first
    assert list(open_rows(tmp_path).scan()) == ROWS[:2]


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
        (
            {"prompt": [message(content=None, name="x")]},
            r"line 2: field 'prompt\[0\].content' is NoneType, not text",
        ),
        (
            {"prompt": [message(), message("tool", content=None, tool_calls=[{"x": "half \ud83d"}]), message()]},
            r"line 2: field 'prompt\[1\]' has half a character",
        ),
        ({"prompt": [message()], "tools": 5}, "line 2: field 'tools', the tools, is no list of JSON objects, the sche"),
        ({"prompt": [message()], "tools": ["x"]}, "line 2: field 'tools', the tools, is no list of JSON objects"),
        ({"prompt": [message()], "tools": "search"}, "line 2: field 'tools', the tools, is not JSON: .*tools_key"),
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


TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"properties": {"a": {"type": "integer"}}}}}]
CALLS: list[dict[str, Any]] = [
    message(),
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}],
    },
    {"role": "tool", "content": "2", "tool_call_id": "1"},
]


@pytest.mark.parametrize("kind", ["jsonl", "json", "parquet"])
def test_tools_and_calls_of_them_are_read(tmp_path: Path, kind: str) -> None:
    """A Parquet file has a null for each key that another row has; such nulls are no keys of the row."""
    other = [{**TOOLS[0], "strict": True}]
    called = [message(), {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"b": "x"}}}]}]
    rows = [
        {"prompt": CALLS, "tools": TOOLS, "answer": "1"},
        {"prompt": [*called, message()], "tools": other, "answer": "2"},
        {"prompt": [message()], "tools": None, "answer": "3"},
    ]
    path = tmp_path / f"rows.{kind}"
    if kind == "parquet":
        parquet.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_bytes(lines(rows) if kind == "jsonl" else json.dumps(rows).encode())
    [opened] = open_sets(DataConfig(path=str(path), prompt_key="prompt", eval_prompts=0))
    problems = list(opened.training)
    calls = [{key: value for key, value in call.items() if value is not None} for call in CALLS]
    assert [[as_message(turn) for turn in problem.messages] for problem in problems] == [
        calls,
        [*called, message()],
        [message()],
    ]
    assert [json.loads(problem.tools or "null") for problem in problems] == [TOOLS, other, None]
    [block] = opened.prompt_blocks()
    assert list(block.prompts) == [problem.as_prompt for problem in problems]
    assert json.loads(problems[0].answer)["prompt"] == calls


def test_tools_are_read_from_a_column_of_any_name(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(lines([{"prompt": [message()], "tools": 5, "extra": {"functions": json.dumps(TOOLS)}}]))
    data = DataConfig(path=str(path), prompt_key="prompt", tools_key="extra.functions", eval_prompts=0)
    [opened] = open_sets(data)
    check_rows([opened], data)
    assert json.loads(opened.training[0].tools) == TOOLS
    [without] = open_sets(dataclasses.replace(data, tools_key=""))
    assert without.training[0].tools == ""


def test_prompts_with_other_tools_or_calls_are_other_prompts() -> None:
    messages = tuple((str(call["role"]), "", json.dumps(call)) for call in CALLS)
    texts = {folded("", messages), folded("", messages[:2]), folded("", messages, json.dumps(TOOLS)), folded("x", ())}
    assert len(texts) == 4


def test_answers_are_present_in_all_rows_or_in_none(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(lines([{"prompt": "a"}, {"prompt": "b"}]))
    check(open_rows(path), DATA, 2)
    assert json.loads(problem({"prompt": "a"}, DATA, "").answer) == {"prompt": "a"}
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
