"""Architecture rules: import contracts, lint and types, cost of imports, forbidden modules and calls."""

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import msgspec
import pytest

from flowrt.errors import RemoteProtocolError
from flowrt.protocol.codec import decode, encode
from flowrt.protocol.messages import MAX_RECORD_BYTES, MAX_SIGNAL_BYTES, MESSAGES, RendezvousKey, SampleRecords

ROOT = Path(__file__).parents[2]
PRODUCT = sorted(path for folder in ("flowrt", "workers", "launch") for path in (ROOT / folder).rglob("*.py"))


def imports(path: Path) -> set[str]:
    modules: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            modules |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            modules.add((node.module or "").split(".")[0])
    return modules


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=600)


def test_import_contracts_hold() -> None:
    result = run("-c", "from importlinter.cli import lint_imports_command as c; c()", "--config", "setup.cfg")
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("command", [["ruff", "check", "."], ["ruff", "format", "--check", "."], ["mypy"]])
def test_lint_format_and_types_are_clean(command: list[str]) -> None:
    result = run("-m", *command)
    assert result.returncode == 0, result.stdout + result.stderr


def test_processes_run_modules_without_the_current_directory_on_their_path() -> None:
    """Otherwise a file there hides the module of Python that has its name. A server's Python may not know -P.

    ``flowrt/__init__.py`` detects a process that the user started so.
    """
    starters = [str(path.relative_to(ROOT)) for path in (ROOT / "flowrt").rglob("*.py") if '"-m"' in path.read_text()]
    assert sorted(starters) == [
        "flowrt/__init__.py",
        "flowrt/engines/sglang/server_process.py",
        "flowrt/engines/vllm/server_process.py",
    ]


def test_no_variable_is_called_one_or_found() -> None:
    """Nor a parameter: such names tell nothing of a value."""
    listed = subprocess.run(["git", "ls-files", "*.py", "scripts/house"], cwd=ROOT, capture_output=True, text=True)
    named = [
        f"{path}:{node.lineno}"
        for path in listed.stdout.split()
        for node in ast.walk(ast.parse((ROOT / path).read_text()))
        if (isinstance(node, ast.Name) and node.id in ("one", "found"))
        or (isinstance(node, ast.arg) and node.arg in ("one", "found"))
    ]
    assert listed.stdout
    assert named == []


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
def test_importing_network_and_control_modules_loads_no_torch(module: str) -> None:
    code = f"import {module}, sys; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    result = run("-c", code)
    assert result.returncode == 0, result.stderr


def test_a_controller_loads_only_what_it_uses() -> None:
    slow = {"aiohttp", "tokenizers", "numpy"}
    result = run("-c", f"import flowrt.launcher.controller_main, sys; print([*({slow} & {{*sys.modules}})])")
    assert result.stdout == "[]\n", result.stderr


def test_only_the_net_package_imports_zmq() -> None:
    importers = [str(path.relative_to(ROOT)) for path in PRODUCT if "zmq" in imports(path)]
    assert importers == ["flowrt/net/curve_keys.py", "flowrt/net/link.py"]


def test_one_module_writes_pickles_and_no_module_reads_them() -> None:
    """The exception serialises tensors for SGLang, which accepts them in a request in no other form."""
    picklers = [path for path in PRODUCT if imports(path) & {"pickle", "cloudpickle", "dill", "shelve", "marshal"}]
    assert [path.name for path in picklers] == ["tensor_pickles.py"]
    assert not any(word in picklers[0].read_text() for word in ("load(", "loads(", "Unpickler"))
    # torch's object collectives use pickle; the others read pickles or run code that comes with a model.
    forbidden = ("_object(", "object_list", "torch.load", "np.load", "allow_pickle")
    assert not [f"{path}: {word}" for path in PRODUCT for word in forbidden if word in path.read_text()]


def test_code_of_a_checkpoint_is_never_run() -> None:
    """transformers asks on the terminal whether to run it, unless it is told not to: `flowrt.engines.hf` tells it."""
    auto = re.compile(r"Auto\w+\.from_\w+\(")
    loaders = [path for path in PRODUCT if auto.search(path.read_text()) and path.name != "model_files.py"]
    assert [path.name for path in loaders] == ["hf.py"]
    text = loaders[0].read_text()
    calls = [text[call.start() : text.index("\n", text.index(")", call.end()))] for call in auto.finditer(text)]
    assert len(calls) == 6
    assert all("**NO_CODE" in call or "trust_remote_code=False" in call for call in calls)
    assert [path for path in PRODUCT if "trust_remote_code" in path.read_text()] == loaders
    assert not re.search(r"trust_remote_code\W+True", text)


def test_no_message_can_carry_a_tensor() -> None:
    """Only three fields contain bytes, all of limited size: packed spans, rendezvous keys and stored samples."""
    fields = [
        f"{kind.__name__}.{field.name}"
        for kind in MESSAGES
        for field in msgspec.structs.fields(kind)
        if "bytes" in str(field.type)
    ]
    assert fields == ["RendezvousKey.value", "Report.spans", "Report.resources", "SampleRecords.records"]
    assert (MAX_SIGNAL_BYTES, MAX_RECORD_BYTES) == (16 * 1024, 1024 * 1024)
    longest = RendezvousKey("reward0", "lane", "key", bytes(MAX_SIGNAL_BYTES))
    assert decode(encode(longest)) == longest
    with pytest.raises(RemoteProtocolError, match=r"RendezvousKey\.value: Expected `bytes` of length <= 16384"):
        decode(encode(msgspec.structs.replace(longest, value=bytes(MAX_SIGNAL_BYTES + 1))))
    with pytest.raises(RemoteProtocolError, match=r"SampleRecords\.records"):
        decode(encode(SampleRecords((bytes(MAX_RECORD_BYTES + 1),))))


def test_broad_excepts_occur_only_around_foreign_code() -> None:
    """Around calls of a role, a user's reward, algorithm or template, and at the exit of a forked process."""
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
        "flowrt/engines/hf.py",  # transformers computes with the fields of a user's config.json
        *(["flowrt/engines/prompts.py"] * 4),  # a chat template is a program; tokenizers raises nothing narrower
        "flowrt/engines/turns.py",
        "flowrt/launcher/fork_server/child.py",
        *(["flowrt/launcher/prompt_check.py"] * 2),  # tokenizers raises nothing narrower
        *(["flowrt/observability/exporters/process.py"] * 2),  # calling it
        "flowrt/observability/exporters/wandb_run.py",  # finishing wandb's run
        "flowrt/observability/token_texts.py",  # tokenizers raises nothing narrower
        *(["flowrt/rewards/child.py"] * 3),  # loading a reward function, and calling it, also an async one
        *(["flowrt/rewards/programs/process.py"] * 5),  # running a response's program and its tests
        *(["flowrt/rewards/programs/proxies.py"] * 5),  # calling them, and reading what the program sends
        "flowrt/rewards/reward_process.py",  # msgpack, given bytes that a reward function wrote
        "flowrt/rewards/user_file.py",  # the text of a returned value
        "flowrt/roles/algorithm.py",  # calling it once
        "flowrt/roles/main.py",
        *(["flowrt/runtime/user_module.py"] * 2),  # loading a user's file, calling it, and the text of what it raises
        "flowrt/transport/devices.py",  # the library of a driver, asked for the use of a device
    ]


def test_the_product_never_calls_time_sleep() -> None:
    assert not [str(path) for path in PRODUCT if "time.sleep(" in path.read_text()]


def test_every_marker_is_used() -> None:
    options = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
    tests = "".join(path.read_text() for path in (ROOT / "tests").rglob("*.py"))
    assert {marker.split(":")[0] for marker in options["markers"]} <= set(re.findall(r"pytest\.mark\.(\w+)", tests))


def test_class_names_are_unique() -> None:
    places: dict[str, list[str]] = {}
    for path in PRODUCT:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert {name: paths for name, paths in places.items() if len(paths) > 1} == {}
