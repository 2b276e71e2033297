"""Generated texts go unchanged through the sample store to JSON Lines, and without control characters to a terminal."""

import io
import json
import os
import pty
import re
import termios
import threading
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from flowrt.controller.storage.sample_store import SAMPLES, SampleWriter
from flowrt.errors import ConfigError
from flowrt.launcher.terminal import PlainConsole, printable
from flowrt.launcher.views.samples import SampleOptions, show
from flowrt.observability.stored_samples import SampleFilter, SampleReader
from flowrt.protocol.sample_records import ScoredSample, encode_record, pack_text, stored_text, unpack_text
from tests.effort import examples

TEXTS = 500
"""Number of texts in a store."""
HOSTILE = (
    "\x1b]52;c;ZXZpbA==\x07",
    "\x1b[2J\x1b[31m",
    "\x9b31m",
    "</script><script>alert(1)</script>",
    "<!--",
    "\u202eright to left\u2066",
    "a\u200bb\ufeffc\u00ad",
    "\ud800 alone",
    "\udc80",
    "\0",
    "a\0b",
    "\r\n\t",
    "[red]markup[/red] :smile:",
    "%s {} \\x1b \\u0000",
    "NaN",
    "\U0001f600\u0301",
    "\u2028\u2029",
    "",
)
RANGES = ((0, 0x20), (0x20, 0x7F), (0x7F, 0xA1), (0x200B, 0x2070), (0xD7F0, 0xE010), (0x10000, 0x10FFFF), (0, 0x3000))


def random_text(random: Random) -> str:
    """A text of any characters, among them lone surrogates, and of hostile sequences for terminals and pages."""
    parts = []
    for _ in range(random.randrange(8)):
        if random.random() < 0.4:
            parts.append(random.choice(HOSTILE))
        else:
            first, end = random.choice(RANGES)
            parts.append("".join(chr(random.randrange(first, end)) for _ in range(random.randrange(12))))
    return "".join(parts)


def write_store(path: Path, texts: list[str]) -> None:
    writer = SampleWriter(path / SAMPLES, per_step=32, max_bytes=1 << 30, run_attempt=1, step=0)
    records = []
    for number, text in enumerate(texts):
        record = ScoredSample(
            flow="train",
            eval_name="",
            epoch=0,
            prompt=number,
            member=0,
            attempt=0,
            reward=0.0,
            parts=(),
            finish="stop",
            reason=f"error: {text}".encode(errors="replace").decode()[:500],
            is_single=False,
            spans=(0, 1),
            reward_s=0.0,
            data=(pack_text(text), pack_text(text[::-1]), b""),
        )
        data = encode_record(record)
        assert data is not None
        records.append((data, number))
    assert not writer.write(records)
    writer.close()


def terminal_output(path: Path, options: SampleOptions) -> bytes:
    """What ``flowrt samples`` writes to a terminal."""
    master, slave = pty.openpty()
    attributes = termios.tcgetattr(slave)
    attributes[1] &= ~termios.OPOST  # keep line ends as written
    termios.tcsetattr(slave, termios.TCSANOW, attributes)
    chunks: list[bytes] = []

    def read() -> None:
        try:
            while data := os.read(master, 65536):
                chunks.append(data)
        except OSError:  # the other end is closed
            return

    reader = threading.Thread(target=read)
    reader.start()
    with os.fdopen(slave, "w", encoding="utf-8") as file:
        show(path, options, PlainConsole(file=file, force_terminal=True, width=100))
    reader.join()
    os.close(master)
    return b"".join(chunks)


def check(path: Path, texts: list[str]) -> None:
    """Assert that the store and JSON Lines return the texts unchanged, and a terminal gets no control characters."""
    write_store(path, texts)
    kept = [unpack_text(stored_text(pack_text(text))) for text in texts]
    reversed_texts = [unpack_text(stored_text(pack_text(text[::-1]))) for text in texts]
    page = SampleReader(path).query(limit=len(texts))
    assert {row.prompt: (row.prompt_text, row.completion) for row in page.samples} == dict(
        enumerate(zip(kept, reversed_texts, strict=True))
    )
    out = path / "table.jsonl"
    show(path, SampleOptions(jsonl=out), Console(file=io.StringIO()))
    data = out.read_bytes()
    assert not {*range(32)} - {10} & {*data}
    lines = [json.loads(line) for line in data.decode("ascii").splitlines()]
    assert [(line["prompt"], line["completion"]) for line in lines] == [*zip(kept, reversed_texts, strict=True)]
    printed = terminal_output(path, SampleOptions(limit=len(texts))).decode()
    assert printable(printed) == printed
    assert not {*"\x1b\x9b\x07\x00\r"} & {*printed}
    assert printed.count("completion:") >= len(texts)


@pytest.mark.slow
def test_random_texts_round_trip_and_print_without_control_characters(tmp_path: Path) -> None:
    for seed in range(examples(20)):
        random, path = Random(seed), tmp_path / str(seed)
        path.mkdir()
        texts = [random_text(random) for _ in range(TEXTS)]
        whole = [text for text in texts if text.encode("utf-16", "surrogatepass").decode("utf-16", "replace") == text]
        assert [unpack_text(stored_text(pack_text(text))) for text in whole] == whole
        check(path, texts)


def test_long_and_hostile_texts_round_trip_and_print_safely(tmp_path: Path) -> None:
    check(tmp_path, [*HOSTILE, "<b>" * 300_000, "\ud800\udc00", "\udc00\ud800"])


@pytest.mark.filterwarnings("ignore:Possible nested set:FutureWarning")
@pytest.mark.filterwarnings("ignore:Possible set:FutureWarning")
@settings(max_examples=examples(100), deadline=None)
@given(st.text(max_size=12) | st.text("()[]{}*+?|\\^$.a1,", max_size=12))
def test_any_regular_expression_is_accepted_or_refused_with_a_message(pattern: str) -> None:
    try:
        re.compile(pattern)
    except re.error:
        with pytest.raises(ConfigError, match="is not a regular expression"):
            SampleFilter(grep=pattern).pattern()
    else:
        SampleFilter(grep=pattern).pattern()


def test_json_lines_can_go_to_standard_output(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_store(tmp_path, ["one", "\x1b[2J"])
    show(tmp_path, SampleOptions(jsonl=Path("-")), Console(file=io.StringIO()))
    out = capsys.readouterr().out
    assert [json.loads(line)["prompt"] for line in out.splitlines()] == ["one", "\x1b[2J"]
    assert "\x1b" not in out
