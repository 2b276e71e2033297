"""Names in the glossary exist; scripts/house runs and reports all its metrics."""

import ast
import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from flowrt.recipes.config import RunConfig

ROOT = Path(__file__).parents[2]
GLOSSARY = (ROOT / "docs/glossary.md").read_text()
GROUPS = re.split(r"^## ", GLOSSARY, flags=re.MULTILINE)[1:]
CODE = sorted(set(re.findall(r"`([^`]+)`", GLOSSARY)))
METRICS = {
    *("files", "lines", "median_lines", "largest_lines", "tests_lines", "bench_lines", "examples_lines"),
    *("scripts_lines", "any_imports", "config_errors", "dialect_words"),
    *("extension_files_task", "extension_files_policy", "extension_files_filter", "extension_files_role"),
    *("extension_files_message", "extension_files_engine"),
}


def terms(group: str) -> list[str]:
    return [term.lower() for term in re.findall(r"^- \*\*(.+?)\*\*", group, flags=re.MULTILINE)]


def run_house(script: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(script), *arguments], capture_output=True, text=True, timeout=600)


def test_every_class_named_in_the_glossary_exists() -> None:
    classes = {
        node.name
        for path in (ROOT / "flowrt").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
    }
    named = {word for word in CODE if re.fullmatch(r"[A-Z][A-Za-z0-9]+", word)}
    assert len(named) > 100
    assert not named - classes


def test_every_configuration_key_named_in_the_glossary_exists() -> None:
    keys = [word for word in CODE if re.fullmatch(r"[a-z_]+\.[a-z_]+", word)]
    assert len(keys) > 10
    for key in keys:
        value: Any = RunConfig()
        for name in key.split("."):
            assert name in {field.name for field in dataclasses.fields(value)}, key
            value = getattr(value, name)


def test_every_path_named_in_the_glossary_exists() -> None:
    assert not [word for word in CODE if "/" in word and not (ROOT / word).exists()]


@pytest.mark.parametrize("group", GROUPS, ids=[group.split("\n")[0] for group in GROUPS])
def test_terms_of_a_group_are_in_alphabetical_order(group: str) -> None:
    assert terms(group) == sorted(terms(group))


def test_no_term_is_defined_twice() -> None:
    all_terms = [term for group in GROUPS for term in terms(group)]
    assert len(all_terms) == len(set(all_terms))


@pytest.mark.slow
def test_house_measures_every_metric(tmp_path: Path) -> None:
    result = run_house(ROOT / "scripts/house", "--json", str(tmp_path / "house.json"))
    assert result.returncode == 0, result.stderr
    metrics = json.loads((tmp_path / "house.json").read_text())["metrics"]
    assert metrics.keys() == METRICS
    assert all(f"{name} " in result.stdout for name in METRICS)
    zero = ("any_imports", "dialect_words")
    assert {name: metrics[name] for name in zero} == dict.fromkeys(zero, 0)


def test_house_names_a_page_that_is_missing(tmp_path: Path) -> None:
    """A tree without docs/extending.md: exit code 2 and one sentence."""
    script = tmp_path / "scripts/house"
    script.parent.mkdir()
    script.write_text((ROOT / "scripts/house").read_text())
    package = tmp_path / "flowrt/controller"
    package.mkdir(parents=True)
    (package / "core.py").write_text("")
    (tmp_path / "README.md").write_text("")
    result = run_house(script)
    assert result.returncode == 2
    assert "docs/extending.md has no section like '## A task'" in result.stderr
    assert len(result.stderr.splitlines()) == 1
