"""The public modules: `__all__` lists all of their public names."""

import ast
import importlib
import inspect
from pathlib import Path

import pytest

PUBLIC = ("flowrt.algorithms", "flowrt.api", "flowrt.asyncflow", "flowrt.grpo", "flowrt.tasks")


@pytest.mark.parametrize("name", PUBLIC)
def test_all_public_names_are_listed_once_and_exist(name: str) -> None:
    module = importlib.import_module(name)
    listed: list[str] = list(module.__all__)
    assert len(listed) == len(set(listed)), "a name is listed twice"
    assert [member for member in listed if not hasattr(module, member)] == []
    assert module.__file__ is not None
    defined = {
        node.name
        for node in ast.parse(Path(module.__file__).read_text()).body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and not node.name.startswith("_")
    }
    assert defined - set(listed) == set(), "public definitions that are not listed"


@pytest.mark.parametrize("name", PUBLIC)
def test_listed_classes_and_functions_have_docstrings(name: str) -> None:
    module = importlib.import_module(name)
    exported = {member: getattr(module, member) for member in module.__all__}
    definitions = {member for member, it in exported.items() if inspect.isclass(it) or inspect.isfunction(it)}
    assert [definition for definition in sorted(definitions) if not exported[definition].__doc__] == []
