"""Names in the documentation exist: pages, headings, files, configuration keys, flags, API names."""

import argparse
import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

from flowrt import api
from flowrt.cli import COMMANDS
from flowrt.recipes.config import RunConfig
from flowrt.recipes.data_config import DataSetConfig
from flowrt.recipes.tables import leaves

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
FOLDERS = ("bench", "docs", "examples", "flowrt", "launch", "scripts", "tests", "workers")
TABLES = (
    "data",
    "dispatch",
    "build",
    "sft",
    "rollout",
    "trainer",
    "loss",
    "checkpoint",
    "controller",
    "supervisor",
    "launch",
)
ARRAY_ENTRIES = {"data.sets": DataSetConfig(name="", path="")}
"""An example entry of each array of tables."""
FILE_SUFFIXES = ("py", "key", "pub", "log")
"""Suffixes of file names that look like configuration keys: `trainer.py`, `controller.pub`."""

each_page = pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])


def prose(page: Path) -> str:
    """The text of a page without its blocks of code."""
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """The names by which headings of a page can be linked to, as GitHub generates them."""
    titles = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def wrong_link(page: Path, target: str) -> str:
    """What is wrong with a relative link of a page; empty when it resolves."""
    name, _, anchor = target.partition("#")
    path = page.parent / name if name else page
    if not path.exists():
        return f"{target}: there is no {name}"
    if anchor and anchor not in anchors(path):
        return f"{target}: {path.name} has no heading {anchor!r}"
    return ""


def is_repository_path(word: str) -> bool:
    """Whether a word in backticks is a path of this repository."""
    path_like = "/" in word and re.fullmatch(r"[\w./*-]+", word) is not None
    return path_like and (word.split("/")[0] in FOLDERS or word.endswith(".py"))


def exists(word: str) -> bool:
    """A path from the root of the repository or from a folder of the package, with or without wildcards."""
    return any(ROOT.glob(word.rstrip("/"))) or any((ROOT / "flowrt").rglob(word.rstrip("/")))


@each_page
def test_links_resolve(page: Path) -> None:
    targets = re.findall(r"\]\(([^)\s]+)\)", prose(page))
    problems = [wrong_link(page, target) for target in targets if not re.match(r"https?:|mailto:", target)]
    assert [wrong for wrong in problems if wrong] == []


@each_page
def test_named_files_exist(page: Path) -> None:
    words = set(re.findall(r"`([^`\n]+)`", prose(page)))
    assert [word for word in sorted(words) if is_repository_path(word) and not exists(word)] == []


@each_page
def test_named_configuration_keys_and_flags_exist(page: Path) -> None:
    keys = {
        word
        for word in re.findall(r"`([a-z]+(?:\.[a-z_0-9]+)+)`", prose(page))
        if word.split(".")[0] in TABLES and word.rsplit(".", 1)[1] not in FILE_SUFFIXES
    }
    keys |= {flag.replace("-", "_") for flag in re.findall(r"--((?:[a-z]+\.)+[a-z0-9-]+)", page.read_text())}
    names, missing = [f"{name}." for name, _ in leaves(RunConfig)], []
    for key in sorted(keys):
        table, _, name = key.rpartition(".")
        if table in ARRAY_ENTRIES and hasattr(ARRAY_ENTRIES[table], name):
            continue
        if not any(name.startswith(f"{key}.") for name in names):
            missing.append(key)
    assert missing == []


def test_missing_links_and_files_are_detected() -> None:
    page = ROOT / "README.md"
    assert wrong_link(page, "docs/no_such_page.md")
    assert wrong_link(page, "docs/concepts.md#no-such-heading")
    assert not wrong_link(page, "docs/concepts.md#the-staleness-bound")
    assert is_repository_path("flowrt/no_such_file.py")
    assert not exists("flowrt/no_such_file.py")
    assert exists("controller/policies/*.py")


def test_every_page_is_reachable_from_the_readme() -> None:
    reached, pending = {ROOT / "README.md"}, [ROOT / "README.md"]
    while pending:
        page = pending.pop()
        for target in re.findall(r"\]\(([^)\s#]+)", prose(page)):
            path = (page.parent / target).resolve()
            path = path / "README.md" if path.is_dir() else path
            if path.suffix == ".md" and path.is_file() and path not in reached:
                reached.add(path)
                pending.append(path)
    assert [str(page.relative_to(ROOT)) for page in PAGES if page not in reached] == []


def reference() -> ModuleType:
    spec = importlib.util.spec_from_file_location("reference", ROOT / "scripts" / "reference.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_configuration_page_is_current() -> None:
    script = reference()
    assert script.PAGE.read_text() == script.page(), "run scripts/reference.py"


def test_the_api_page_has_every_public_name() -> None:
    text = (ROOT / "docs" / "reference" / "api.md").read_text()
    table = text.partition("## Engines")[0]
    assert sorted(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == sorted(api.__all__)


SAME = {"status": {"--run", "--controller"}, "drain": {"--controller"}}
"""Flags that are another spelling of an argument."""


@pytest.mark.parametrize("name", [name for name, command in COMMANDS.items() if command.add_arguments is not None])
def test_the_reference_of_commands_has_their_flags(name: str) -> None:
    add_arguments = COMMANDS[name].add_arguments
    assert add_arguments is not None
    add_arguments(parser := argparse.ArgumentParser())
    spellings = [[word for word in action.option_strings if word.startswith("--")] for action in parser._actions]
    lines = (ROOT / "docs" / "reference" / "cli.md").read_text().splitlines()
    [row] = [line.split(" | ")[0] for line in lines if line.startswith(f"| `flowrt {name} ")]
    written = set(re.findall(r"--[a-z][a-z-]*", row))
    assert written <= {word for words in spellings for word in words}
    needed = [words for words in spellings if words and words[0] != "--help" and "." not in words[0]]
    assert [words for words in needed if not written & set(words) and words[0] not in SAME.get(name, ())] == []
