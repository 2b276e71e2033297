"""run.html has a whole run in one file: it loads nothing else, and no text of the run becomes markup."""

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowrt.errors import FlowError
from flowrt.observability.page import single_file
from flowrt.observability.page.single_file import LEFT_OUT, answers, page, write
from flowrt.observability.run_reader import RunReader
from flowrt.recipes.config_io import defaults, to_toml
from tests.run_page import unpacked

HOSTILE = (
    "</script><img src=x onerror=alert(1)>",
    "<!--",
    "]]>",
    "\x00\x1b]52;c;eA==\x07",
    "\u202e\u2028\ud800",
    "x" * 9_999,
)


class Elements(HTMLParser):
    """The elements of a page, and what is in its scripts and styles."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.policy = ""
        self.inline: dict[str, list[str]] = {"script": [], "style": []}
        self._in = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        attributes = dict(attrs)
        self.links += [attributes[name] or "" for name in ("src", "href", "action") if attributes.get(name)]
        if attributes.get("http-equiv") == "Content-Security-Policy":
            self.policy = attributes["content"] or ""
        self._in = tag if tag in self.inline and attributes.get("type") is None else ""

    def handle_endtag(self, tag: str) -> None:
        self._in = "" if tag == self._in else self._in

    def handle_data(self, data: str) -> None:
        if self._in:
            self.inline[self._in].append(data)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    (tmp_path / "config.toml").write_text(to_toml(defaults("arithmetic")))
    lines = ({"step": step, "wall_s": step * 0.5, "reward": step / 9} for step in range(9))
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "logs").mkdir()
    return tmp_path


def test_the_page_is_self_contained_with_a_strict_policy(run_dir: Path) -> None:
    path = write(run_dir)
    assert path == run_dir / "run.html"
    assert path.stat().st_mode & 0o777 == 0o600
    text = path.read_text()
    elements = Elements(text)
    assert [link for link in elements.links if not link.startswith("#")] == []
    assert "url(" not in text
    assert "@import" not in text
    assert elements.policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe" not in elements.policy
    for kind, source in (("script", "script-src"), ("style", "style-src")):
        [allowed] = re.findall(rf"{source} ([^;]*);", elements.policy)
        digests = [
            base64.b64encode(hashlib.sha256(content.encode()).digest()).decode() for content in elements.inline[kind]
        ]
        assert allowed.split() == [f"'sha256-{digest}'" for digest in digests]
    embedded = unpacked(text)
    assert embedded["api/run"] == json.loads(json.dumps(RunReader(run_dir).run()))
    assert embedded["api/series?from=0"]["columns"]["wall_s"][-1] == 4
    assert "left_out" not in embedded


def test_no_text_of_a_run_becomes_markup(run_dir: Path) -> None:
    before = Elements(write(run_dir).read_text())
    events = [{"wall_s": 1, "step": 0, "kind": text, "text": text, "worker": text} for text in HOSTILE]
    (run_dir / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    (run_dir / "logs" / "trainer.log").write_bytes("\n".join(HOSTILE).encode(errors="surrogatepass"))
    (run_dir / "summary.json").write_text(json.dumps({"reason": HOSTILE[0], HOSTILE[1]: HOSTILE[2]}))
    text = write(run_dir).read_text()
    after = Elements(text)
    assert after.tags == before.tags
    assert after.policy == before.policy
    assert unpacked(text)["api/events?from=0"]["events"] == events
    assert not any(markup in text for markup in ("alert(1)", "\x1b", "\u202e"))


@settings(deadline=None, max_examples=25)
@given(
    st.recursive(st.none() | st.floats() | st.text(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner))
)
def test_any_embedded_answer_round_trips(answer: Any) -> None:
    embedded = unpacked(page({"api/run": answer}))["api/run"]
    assert json.dumps(embedded) == json.dumps(nulled(answer))


def nulled(value: Any) -> Any:
    """The value with null for numbers that JSON lacks."""
    match value:
        case float():
            return value if value - value == 0 else None
        case list():
            return [nulled(member) for member in value]
        case dict():
            return {key: nulled(content) for key, content in value.items()}
    return value


def test_answers_over_the_size_limit_are_left_out_in_order_and_named(run_dir: Path) -> None:
    contents = answers(RunReader(run_dir))
    noise = base64.b64encode(hashlib.shake_256(b"").digest(90_000)).decode()
    contents["api/sample/1"] = {"completion": noise}
    contents["api/samples?order=newest"] = {"samples": [{"id": 1, "completion": noise[::-1]}], "total": 1}
    size = len(page(contents))
    smaller = unpacked(page(contents, size - 1))
    assert smaller["left_out"] == "the tokens of its samples; flowrt watch on the run directory has them"
    assert "api/sample/1" not in smaller
    assert "api/samples?order=newest" in smaller
    smallest = unpacked(page(contents, size - 200_000))
    names = ", ".join(what for what, _ in LEFT_OUT[:5])
    assert smallest["left_out"] == f"{names}; flowrt watch on the run directory has them"
    assert not [path for path in smallest if path.startswith("api/sample")]
    with pytest.raises(FlowError, match="open it with flowrt watch"):
        page(contents, 1000)


def test_the_page_of_a_long_run_is_small(run_dir: Path) -> None:
    lines = (
        {
            "step": step,
            "wall_s": step * 0.5,
            **{f"metric_{name}": (step * 7919 % 1013) / 1013 + name for name in range(20)},
        }
        for step in range(20_000)
    )
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert write(run_dir).stat().st_size < 1 << 20


def test_a_directory_without_a_run_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["single_file", str(tmp_path)])
    assert single_file.main() == 1
    assert "is not a run directory" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
