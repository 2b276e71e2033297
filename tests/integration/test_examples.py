"""The examples and the commands of the README do what they say."""

import importlib.util
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from flowrt.recipes.load import parse

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def test_the_custom_loop_is_short_and_learns() -> None:
    path = ROOT / "examples" / "custom_loop.py"
    assert len(path.read_text().splitlines()) < 60
    ended = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    found = re.search(r"paying arm: ([\d.]+)", ended.stdout)
    assert found is not None, ended.stdout
    assert float(found[1]) > 0.9


def commands() -> list[str]:
    blocks = re.findall(r"```sh\n(.*?)```", README, re.DOTALL)
    lines = [line.split("#")[0].strip() for block in blocks for line in block.splitlines()]
    return [line for line in lines if line]


def test_the_readme_has_commands() -> None:
    assert len(commands()) >= 4


@pytest.mark.parametrize("command", commands())
def test_every_command_of_the_readme_exists(command: str) -> None:
    words = shlex.split(command)
    if words[0] == "make":
        targets = {line.split(":")[0] for line in (ROOT / "Makefile").read_text().splitlines() if ":" in line}
        assert words[1] in targets
    elif words[:2] == ["flowrt", "run"]:
        assert parse(words[2:]).steps > 0
    elif words[0] == "python":
        assert (ROOT / words[1]).is_file()
        subprocess.run([sys.executable, *words[1:], "--help"], check=True, timeout=60, capture_output=True)
    else:
        assert words[0] in ("git", "cd"), f"what is {words[0]}?"


def test_the_figures_of_the_readme_are_those_of_the_results() -> None:
    spec = importlib.util.spec_from_file_location("figures", ROOT / "scripts" / "figures.py")
    assert spec is not None
    assert spec.loader is not None
    figures = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(figures)
    assert figures.with_figures(README) == README
