"""What flowrt imports is declared: by the base install, or by an extra that a message names."""

import ast
import re
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
FOR_USERS = sorted(set(EXTRAS) - {"dev"})


def names(requirements: list[str]) -> set[str]:
    """The normalised names of distributions."""
    return {re.sub(r"[-_.]+", "-", re.split(r"[\[<>=;~! ]", requirement)[0]).lower() for requirement in requirements}


def imported(folder: Path) -> set[str]:
    """The top-level names that the files of a folder import."""
    packages = set()
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                packages |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
                packages.add(node.module.partition(".")[0])
    return packages - sys.stdlib_module_names - {"flowrt"}


def test_no_script_has_the_name_of_a_package_that_it_would_hide() -> None:
    folders = [path for path in (ROOT / "bench").rglob("*") if any(path.glob("*.py"))]
    own = {folder.name for folder in folders} | {path.stem for path in (ROOT / "bench").glob("*.py")}
    hidden = imported(ROOT / "bench") - own | sys.stdlib_module_names
    scripts = [path for folder in [ROOT / "bench", *folders] for path in folder.glob("*.py")]
    assert [str(path) for path in scripts if path.stem in hidden] == []


def test_what_is_imported_is_a_dependency() -> None:
    declared = names(PROJECT["dependencies"]).union(*(names(EXTRAS[extra]) for extra in FOR_USERS))
    homes = packages_distributions()
    undeclared = {
        module: homes.get(module, ["not installed"])
        for module in imported(ROOT / "flowrt") | imported(ROOT / "examples")
        if not names(homes.get(module, [])) & declared
    }
    assert undeclared == {}


@pytest.mark.parametrize("extra", FOR_USERS)
def test_an_extra_is_in_the_first_page_and_in_a_message(extra: str) -> None:
    assert f"flowrt[{extra}]" in (ROOT / "docs" / "getting-started.md").read_text()
    assert any(f"flowrt[{extra}]" in path.read_text() for path in (ROOT / "flowrt").rglob("*.py"))


def test_no_message_or_page_names_an_extra_that_does_not_exist() -> None:
    texts = [*(ROOT / "flowrt").rglob("*.py"), *(ROOT / "docs").rglob("*.md"), ROOT / "README.md"]
    named = {name for path in texts for name in re.findall(r"flowrt\[(\w+)\]", path.read_text())}
    assert sorted(named - {"dev"}) == FOR_USERS
