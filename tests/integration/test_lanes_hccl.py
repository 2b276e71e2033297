"""The hccl lane against torch_npu's own sources: names and signatures, read without importing it."""

import ast
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from flowrt.wire.records import MAX_SIGNAL_BYTES

WHEEL = "torch-npu==2.13.0"
DEVICE = Path(__file__).parents[2] / "flowrt" / "transport" / "device.py"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """The wheel: a file named by FLOWRT_TORCH_NPU_WHEEL, else fetched."""
    given = os.environ.get("FLOWRT_TORCH_NPU_WHEEL")
    if given:
        return zipfile.ZipFile(given)
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "download", WHEEL, "--no-deps", "--quiet", "--dest", str(folder)]
    try:
        fetched = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except subprocess.TimeoutExpired:
        pytest.skip(f"{WHEEL} could not be fetched within 60 s")
    found = list(folder.glob("*.whl"))
    if fetched.returncode or not found:
        pytest.skip(f"{WHEEL} cannot be had: {fetched.stderr.strip().splitlines()[-1:]}")
    return zipfile.ZipFile(found[0])


def source(wheel: zipfile.ZipFile, name: str) -> str:
    return wheel.read(f"torch_npu/{name}").decode()


def ours() -> ast.ClassDef:
    tree = ast.parse(DEVICE.read_text())
    return next(node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == "HcclTransport")


def attributes_set_on(name: str, tree: ast.AST) -> set[str]:
    return {
        target.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) and target.value.id == name
    }


def test_groups_are_made_as_torch_npu_makes_them(wheel: zipfile.ZipFile) -> None:
    tree = ast.parse(source(wheel, "_init/registry/distributed.py"))
    creator = next(n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and "hccl" in n.name)
    made = [ast.unparse(node.func) for node in ast.walk(creator) if isinstance(node, ast.Call)]
    assert "torch_npu._C._distributed_c10d.ProcessGroupHCCL" in made
    assert "torch_npu._C._distributed_c10d.ProcessGroupHCCL.Options" in made
    assert "torch_npu._C._distributed_c10d.ProcessGroupHCCL" in ast.unparse(ours()).replace("torch_npu()", "torch_npu")
    theirs = attributes_set_on("pg_options", creator)
    mine = attributes_set_on("options", ours())
    assert {"_timeout", "global_ranks_in_group", "is_high_priority_stream"} <= mine & theirs
    header = source(wheel, "include/torch_npu/csrc/distributed/ProcessGroupHCCL.hpp")
    options = header[header.index("struct Options") :]
    options = options[: options.index("};")]
    assert all(re.search(rf"\b{name};", options) for name in mine - theirs), mine - theirs


def test_a_group_takes_store_rank_size_options(wheel: zipfile.ZipFile) -> None:
    header = " ".join(source(wheel, "include/torch_npu/csrc/distributed/ProcessGroupHCCL.hpp").split())
    assert (
        "ProcessGroupHCCL( const c10::intrusive_ptr<c10d::Store>& store, int rank, int size, "
        "c10::intrusive_ptr<Options> options"
    ) in header
    call = next(n for n in ast.walk(ours()) if isinstance(n, ast.Call) and ast.unparse(n.func) == "kind")
    assert [ast.unparse(argument) for argument in call.args] == ["store", "rank", "2", "options"]


@pytest.mark.parametrize(("name", "arguments"), [("send", "int dstRank, int tag"), ("recv", "int srcRank, int tag")])
def test_messages_take_tensors_rank_and_tag(wheel: zipfile.ZipFile, name: str, arguments: str) -> None:
    header = " ".join(source(wheel, "include/torch_npu/csrc/distributed/ProcessGroupHCCL.hpp").split())
    assert f"c10::intrusive_ptr<c10d::Work> {name}(std::vector<at::Tensor>& tensors, {arguments}) override;" in header
    calls = [n for n in ast.walk(ast.parse(DEVICE.read_text())) if isinstance(n, ast.Call)]
    (call,) = [n for n in calls if ast.unparse(n.func) == f"self._group.{name}"]
    assert len(call.args) == 3


def test_a_group_can_be_aborted_and_its_errors_kept_from_the_process(wheel: zipfile.ZipFile) -> None:
    header = source(wheel, "include/torch_npu/csrc/distributed/ProcessGroupHCCL.hpp")
    assert re.search(r"\bbool abort\(", header)
    variable = re.search(r'_errors_stay_here\("(\w+)"\)', ast.unparse(ours()).replace("'", '"'))
    assert variable is not None
    assert f'"{variable.group(1)}"' in header
    assert "CleanUpOnly = 2" in header


def test_what_the_ends_of_a_group_tell_each_other_fits_into_a_signal(wheel: zipfile.ZipFile) -> None:
    """The group puts its root info into the store, whole."""
    found = re.search(
        r"HCCL_ROOT_INFO_BYTES *= *(\d+);", source(wheel, "include/third_party/hccl/inc/hccl/hccl_types.h")
    )
    assert found is not None
    assert 4096 < int(found.group(1)) <= MAX_SIGNAL_BYTES


def test_the_devices_are_asked_by_names_that_exist(wheel: zipfile.ZipFile) -> None:
    names = set(re.findall(r"torch_npu\(\)\.npu\.(\w+)", ast.unparse(ours())))
    exported = source(wheel, "npu/__init__.py")
    assert names == {"current_device", "set_device"}
    assert all(f'"{name}"' in exported or f"def {name}" in exported for name in {*names, "is_initialized"})
