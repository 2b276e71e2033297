"""docs/extending.md works as written: its edits are applied to a copy of the product, where its commands are run."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/extending.md").read_text()
SECTIONS = re.findall(r"^## An? (\w+)$(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
KINDS = ("task", "policy", "filter", "role", "message", "engine")
MAX_FILES = 3
QUICK = [
    *("--sft.steps", "0", "--sft.answer-only-steps", "0", "--data.eval-prompts", "0", "--checkpoint.every", "0"),
    *("--build.layers", "1", "--build.hidden-size", "64"),
]


@dataclass(frozen=True)
class Block:
    """A block of code: its language, the file that it changes (empty: it is run), its text."""

    language: str
    path: str
    text: str


LONG = ("role", "engine", "message")
"""Extensions whose tests run with `make test-long` only."""


def blocks(section: str) -> list[Block]:
    matches = re.findall(r"^```(\w+)(?: (\S+))?\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
    return [Block(*match) for match in matches]


def applied(source: str, diff: str) -> str:
    """The source after a change. Raises ValueError unless the old lines occur exactly once."""
    lines = diff.splitlines(keepends=True)
    old, new = ("".join(line[1:] for line in lines if line[0] in kept) for kept in (" -", " +"))
    if source.count(old) != 1:
        raise ValueError(f"the old lines occur {source.count(old)} times, not once:\n{old}")
    return source.replace(old, new)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of the product."""
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "flowrt", tmp_path / "flowrt", ignore=ignored)
    return tmp_path


def run(copy: Path, *arguments: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(copy)}
    command = [sys.executable, *arguments]
    completed = subprocess.run(
        command, cwd=copy, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert completed.returncode == 0, completed.stdout[-2000:] + completed.stderr[-4000:]


def test_the_page_has_a_section_for_each_extension() -> None:
    assert tuple(kind for kind, _ in SECTIONS) == KINDS


@pytest.mark.parametrize(
    ("kind", "section"),
    [pytest.param(*section, id=section[0], marks=[pytest.mark.long] * (section[0] in LONG)) for section in SECTIONS],
)
def test_an_extension_works_as_shown_and_touches_few_files(kind: str, section: str, copy: Path) -> None:
    section_blocks = blocks(section)
    files = {block.path for block in section_blocks if block.path}
    assert 1 <= len(files) <= MAX_FILES, f"{kind}: {files}"
    for block in section_blocks:
        path = copy / block.path
        if block.path and block.language == "diff":
            path.write_text(applied(path.read_text(), block.text))
        elif block.path:
            assert not path.exists()
            path.write_text(block.text)
    runs = [block for block in section_blocks if not block.path]
    assert runs, f"the section of {kind} has no commands"
    for number, block in enumerate(runs):
        if block.language == "python":
            run(copy, "-c", block.text)
        for line in block.text.splitlines() if block.language == "sh" else ():
            run(copy, "-m", "flowrt.cli", *shlex.split(line)[1:], "--run-dir", str(copy / f"run-{number}"), *QUICK)
