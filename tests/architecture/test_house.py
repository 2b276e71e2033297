"""The rules of the house that a stranger can check: floors, types, what importing costs, what is never used."""

import ast
import dataclasses
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import get_type_hints

import pytest

from flowrt.errors import RemoteProtocolError
from flowrt.protocol.codec import decode, encode
from flowrt.protocol.messages import MAX_RECORD_BYTES, MAX_SIGNAL_BYTES, MESSAGES, RendezvousKey, SampleRecords

ROOT = Path(__file__).parents[2]
PRODUCT = sorted(path for folder in ("flowrt", "workers", "launch") for path in (ROOT / folder).rglob("*.py"))
BROAD = {"Exception", "BaseException"}


def imports(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add((node.module or "").split(".")[0])
    return found


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=240)


def test_the_floors_hold() -> None:
    result = run("-c", "from importlinter.cli import lint_imports_command as c; c()", "--config", "setup.cfg")
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("command", [["ruff", "check", "."], ["ruff", "format", "--check", "."], ["mypy"]])
def test_checked(command: list[str]) -> None:
    result = run("-m", *command)
    assert result.returncode == 0, result.stdout + result.stderr


def test_importing_flowrt_loads_no_torch() -> None:
    code = "import flowrt, sys; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert run("-c", code).returncode == 0


@pytest.mark.parametrize(
    "module",
    [
        "flowrt.net.link",
        "flowrt.controller.server.server",
        "flowrt.recipes.config_io",
        "flowrt.launcher.local_run",
        "flowrt.cli",
    ],
)
def test_what_talks_and_decides_loads_no_torch(module: str) -> None:
    code = f"import {module}, sys; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    result = run("-c", code)
    assert result.returncode == 0, result.stderr


def test_one_package_imports_zmq() -> None:
    found = [str(path.relative_to(ROOT)) for path in PRODUCT if "zmq" in imports(path)]
    assert found == ["flowrt/net/curve_keys.py", "flowrt/net/link.py"]


def test_nothing_imports_pickle_or_gathers_objects() -> None:
    """But for one file: SGLang takes tensors within a request in no other form. It writes pickles and reads none."""
    picklers = [path for path in PRODUCT if imports(path) & {"pickle", "cloudpickle", "dill", "shelve", "marshal"}]
    assert [path.name for path in picklers] == ["tensor_pickles.py"]
    assert not any(word in picklers[0].read_text() for word in ("load(", "loads(", "Unpickler"))
    # torch's object collectives pickle behind one's back, and these read pickles or run what comes with a model.
    behind = ("_object(", "object_list", "torch.load", "np.load", "allow_pickle", "trust_remote_code")
    assert not [f"{path}: {word}" for path in PRODUCT for word in behind if word in path.read_text()]


def test_no_message_can_carry_a_tensor() -> None:
    """Bytes stand in two fields only, which are read only up to a limit: rendezvous keys and stored samples."""
    fields = [
        f"{kind.__name__}.{field.name}"
        for kind in MESSAGES
        for field in dataclasses.fields(kind)
        if "bytes" in str(get_type_hints(kind)[field.name])
    ]
    assert fields == ["RendezvousKey.value", "SampleRecords.records"]
    assert (MAX_SIGNAL_BYTES, MAX_RECORD_BYTES) == (16 * 1024, 256 * 1024)
    longest = RendezvousKey("reward0", "lane", "key", bytes(MAX_SIGNAL_BYTES))
    assert decode(encode(longest)) == longest
    with pytest.raises(RemoteProtocolError, match=r"RendezvousKey\.value must be at most 16384 bytes"):
        decode(encode(dataclasses.replace(longest, value=bytes(MAX_SIGNAL_BYTES + 1))))
    with pytest.raises(RemoteProtocolError, match=r"SampleRecords\.records"):
        decode(encode(SampleRecords((bytes(MAX_RECORD_BYTES + 1),))))


def test_everything_is_caught_only_where_somebody_elses_code_runs() -> None:
    """Where a role, a user's reward, algorithm or template is called, and where a fork ends as python would."""
    broad = [
        str(path.relative_to(ROOT))
        for path in PRODUCT
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ExceptHandler)
        and (
            node.type is None
            or {n.id for n in ast.walk(node.type) if isinstance(n, ast.Name)} & {"Exception", "BaseException"}
        )
    ]
    assert sorted(broad) == [
        *(["flowrt/engines/prompts.py"] * 3),  # a chat template is a program, with errors of its own
        "flowrt/launcher/fork_server/child.py",
        *(["flowrt/launcher/prompt_check.py"] * 2),  # tokenizers raises nothing narrower
        "flowrt/observability/exporters/own.py",  # loading a user's exporter
        *(["flowrt/observability/exporters/process.py"] * 2),  # calling it
        "flowrt/observability/exporters/wandb_run.py",  # the end of wandb's run
        "flowrt/observability/token_texts.py",  # tokenizers raises nothing narrower
        "flowrt/recipes/tasks/task_file.py",  # loading a user's task, and calling it
        *(["flowrt/rewards/child.py"] * 2),  # loading a reward function, and calling it
        "flowrt/rewards/user_file.py",  # the text of what it raises
        *(["flowrt/roles/algorithm.py"] * 2),  # loading it, and calling it once
        "flowrt/roles/main.py",
    ]


def test_nothing_sleeps_to_synchronise() -> None:
    assert not [str(path) for path in PRODUCT if "time.sleep(" in path.read_text()]


def test_every_marker_marks_a_test() -> None:
    options = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
    tests = "".join(path.read_text() for path in (ROOT / "tests").rglob("*.py"))
    assert {marker.split(":")[0] for marker in options["markers"]} <= set(re.findall(r"pytest\.mark\.(\w+)", tests))


def test_a_class_name_has_one_meaning() -> None:
    places: dict[str, list[str]] = {}
    for path in PRODUCT:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert {name: found for name, found in places.items() if len(found) > 1} == {}
