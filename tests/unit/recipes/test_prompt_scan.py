"""The scan of all prompts: its decoder accepts the same rows as the general path, with the same prompts and errors."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowrt.engines.prompts import DataPrompt
from flowrt.recipes.data.base import Shards
from flowrt.recipes.data.difficulty import difficulties
from flowrt.recipes.data.json_lines import JsonLines
from flowrt.recipes.data.prompt_scan import BATCH, PromptBatch, _of_rows, scan_prompts
from flowrt.recipes.data_config import DataConfig

KEYS = ("prompt", "answer", "a", "a.b", "role", "content", "extra")
TEXT = st.one_of(
    st.text(max_size=6), st.sampled_from(["", " ", "\t\n", "\ud83d", "ok", "\u2003", "\x00", "assistant", "user"])
)
MESSAGE = st.dictionaries(
    st.sampled_from(["role", "content", "name", "tool_calls"]), st.one_of(TEXT, st.none()), max_size=3
)
VALID_MESSAGE = st.fixed_dictionaries({"role": st.sampled_from(["system", "user", "assistant"]), "content": TEXT})
VALUE = st.recursive(
    st.one_of(TEXT, st.integers(), st.floats(), st.booleans(), st.none(), MESSAGE, VALID_MESSAGE),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.sampled_from(KEYS), inner, max_size=3)),
    max_leaves=8,
)
PROMPT = st.one_of(TEXT, st.lists(st.one_of(VALID_MESSAGE, MESSAGE), max_size=3), VALUE)
ROW = st.one_of(
    st.fixed_dictionaries(
        {"prompt": PROMPT},
        optional={
            "answer": VALUE,
            "a": VALUE,
            "a.b": VALUE,
            "extra": VALUE,
            "role": VALUE,
            "tools": st.one_of(st.none(), st.just([]), st.just([{"name": "f"}]), st.just('[{"name": "f"}]'), VALUE),
        },
    ),
    st.fixed_dictionaries({"a": st.fixed_dictionaries({"b": PROMPT}, optional={"c": VALUE})}),
    VALUE,
)
CONFIGS = [
    DataConfig(prompt_key=prompt, answer_key=answer, prefill=prefill)
    for prompt, answer in (("prompt", "answer"), ("prompt", "a.b"), ("a.b", "answer"), ("a.b", "a.c"), ("a", "a"))
    for prefill in (False, True)
] + [DataConfig(prompt_key="prompt", tools_key=key) for key in ("", "a.b", "prompt", "answer")]


@st.composite
def line(draw: st.DrawFn) -> bytes:
    """A row as a line, sometimes damaged."""
    row, plain = draw(ROW), draw(st.booleans())
    try:
        text = json.dumps(row, ensure_ascii=plain).encode()
    except UnicodeEncodeError:
        text = json.dumps(row).encode()
    if draw(st.integers(0, 3)) == 0:
        at = draw(st.integers(0, len(text)))
        piece = draw(st.sampled_from([b"", b'"', b"\\", b"\xff", b"\x01", b"{", b"]", b",", b"0", b"9" * 5000, b" "]))
        text = text[:at] + piece + text[at + draw(st.integers(0, 2)) :]
    return text.replace(b"\n", b" ") + draw(st.sampled_from([b"\n", b"\r\n", b" \n", b"\n\n", b"\n \t\n"]))


def joined(batches: list[PromptBatch]) -> tuple[list[Any], list[int], list[str]]:
    prompts = [prompt for batch in batches for prompt in batch.prompts]
    without = [index for batch in batches for index in batch.without_answer]
    return prompts, without, [str(error) for batch in batches for error in batch.mistakes]


def assert_same(path: Path, data: DataConfig) -> None:
    rows = JsonLines(path)
    expected = joined(list(_of_rows(rows, 0, rows, data)))
    assert joined(list(scan_prompts(rows, data))) == expected
    assert len(expected[0]) == len(rows)


@pytest.mark.slow
@settings(max_examples=400, deadline=None)
@given(st.lists(line(), max_size=6), st.sampled_from(CONFIGS))
def test_the_scan_agrees_with_the_general_path_on_arbitrary_lines(
    tmp_path_factory: pytest.TempPathFactory, lines: list[bytes], data: DataConfig
) -> None:
    path = tmp_path_factory.getbasetemp() / "scanned.jsonl"
    path.write_bytes(b"".join(lines))
    assert_same(path, data)


@pytest.mark.parametrize(
    "text",
    [
        b'{"prompt": "a", "x": "\xff"}',
        b'{"prompt": "a", "x": ' + b"9" * (sys.get_int_max_str_digits() + 1) + b"}",
        b'{"prompt": "a", "x": ' + b"9" * sys.get_int_max_str_digits() + b"}",
        b'{"prompt": "a", "x": NaN}',
        b'{"prompt": "a", "x": "\\ud83d"}',
        b'{"prompt": "a", "prompt": 5}',
        b'\xef\xbb\xbf{"prompt": "a"}',
        b'{"prompt": "a", "x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"prompt": [{"role": "user", "content": "a", "name": null}]}',
    ],
)
def test_the_scan_agrees_with_the_general_path_on_ambiguous_json(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(text + b'\n{"prompt": "fine", "answer": 1}\n')
    assert_same(path, CONFIGS[0])


@pytest.mark.parametrize("key", ["\x1b", 'a "quote"', "back\\slash", "a.\n", "", ".", "a..b", "\u00e4.\U0001f600"])
def test_a_column_may_have_any_name(tmp_path: Path, key: str) -> None:
    path = tmp_path / "rows.jsonl"
    rows: list[Any] = [{key: "of this name", "answer": 1}, {"answer": 2}]
    for part in reversed(key.split(".")):
        rows[1] = {part: rows[1] if "answer" not in rows[1] else "nested"}
    path.write_text("\n".join(map(json.dumps, rows)))
    assert_same(path, DataConfig(prompt_key=key))
    prompts, _, mistakes = joined(list(scan_prompts(JsonLines(path), DataConfig(prompt_key=key))))
    assert prompts == [DataPrompt("of this name"), DataPrompt("nested")], mistakes
    path.write_text(json.dumps({key: 0.5}) + "\n" + json.dumps({key: 2}))
    assert list(difficulties(JsonLines(path), key)) == [0.5, 2.0]


def test_batches_and_shards_are_scanned_in_order(tmp_path: Path) -> None:
    parts = []
    for name, count in (("a", BATCH + 3), ("b", 2 * BATCH)):
        path = tmp_path / f"{name}.jsonl"
        rows: list[Any] = [{"prompt": f"{name} {n}", "answer": n} for n in range(count)]
        rows[BATCH - 1] = {"prompt": 5}
        del rows[0]["answer"]
        path.write_text("\n".join(map(json.dumps, rows)))
        parts.append(JsonLines(path))
    shards = Shards(parts)
    prompts, without, mistakes = joined(list(scan_prompts(shards, CONFIGS[0])))
    assert len(prompts) == len(shards) == 3 * BATCH + 3
    assert [at for at, prompt in enumerate(prompts) if prompt is None] == [BATCH - 1, 2 * BATCH + 2]
    assert prompts[BATCH + 2 : BATCH + 5] == [DataPrompt(f"a {BATCH + 2}"), DataPrompt("b 0"), DataPrompt("b 1")]
    assert without == [0, BATCH + 3]
    assert [mistake.partition(":")[0] for mistake in mistakes] == [
        f"data file {tmp_path}/{name}.jsonl, line {BATCH}" for name in ("a", "b")
    ]
