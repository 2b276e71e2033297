"""The hccl lane against torch_npu's own sources: names and signatures, read without importing it."""

import ast
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

from flowrt.protocol.messages import MAX_SIGNAL_BYTES

WHEEL = "torch-npu==2.13.0"
DEVICE = Path(__file__).parents[2] / "flowrt" / "transport" / "lanes" / "device.py"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """The wheel: the file named by FLOWRT_TORCH_NPU_WHEEL, else downloaded."""
    local_path = os.environ.get("FLOWRT_TORCH_NPU_WHEEL")
    if local_path:
        return zipfile.ZipFile(local_path)
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "download", WHEEL, "--no-deps", "--quiet", "--dest", str(folder)]
    try:
        download = subprocess.run(command, capture_output=True, text=True, timeout=600)
    except subprocess.TimeoutExpired:
        pytest.skip(f"{WHEEL} could not be downloaded within 60 s")
    wheels = list(folder.glob("*.whl"))
    if download.returncode or not wheels:
        pytest.skip(f"{WHEEL} cannot be downloaded: {download.stderr.strip().splitlines()[-1:]}")
    return zipfile.ZipFile(wheels[0])


def source(wheel: zipfile.ZipFile, name: str) -> str:
    return wheel.read(f"torch_npu/{name}").decode()


def hccl_transport_class() -> ast.ClassDef:
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


def test_groups_are_constructed_as_in_torch_npu(wheel: zipfile.ZipFile) -> None:
    tree = ast.parse(source(wheel, "_init/registry/distributed.py"))
    creator = next(n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and "hccl" in n.name)
    called_names = [ast.unparse(node.func) for node in ast.walk(creator) if isinstance(node, ast.Call)]
    assert "torch_npu._C._distributed_c10d.ProcessGroupHCCL" in called_names
    assert "torch_npu._C._distributed_c10d.ProcessGroupHCCL.Options" in called_names
    assert "torch_npu._C._distributed_c10d.ProcessGroupHCCL" in ast.unparse(hccl_transport_class()).replace(
        "torch_npu()", "torch_npu"
    )
    their_options = attributes_set_on("pg_options", creator)
    our_options = attributes_set_on("options", hccl_transport_class())
    assert {"_timeout", "global_ranks_in_group", "is_high_priority_stream"} <= our_options & their_options
    header = source(wheel, "include/torch_npu/csrc/distributed/ProcessGroupHCCL.hpp")
    options = header[header.index("struct Options") :]
    options = options[: options.index("};")]
    assert all(re.search(rf"\b{name};", options) for name in our_options - their_options), our_options - their_options


def test_group_constructor_takes_store_rank_size_options(wheel: zipfile.ZipFile) -> None:
    header = " ".join(source(wheel, "include/torch_npu/csrc/distributed/ProcessGroupHCCL.hpp").split())
    assert (
        "ProcessGroupHCCL( const c10::intrusive_ptr<c10d::Store>& store, int rank, int size, "
        "c10::intrusive_ptr<Options> options"
    ) in header
    call = next(
        n for n in ast.walk(hccl_transport_class()) if isinstance(n, ast.Call) and ast.unparse(n.func) == "kind"
    )
    assert [ast.unparse(argument) for argument in call.args] == ["store", "rank", "2", "options"]


@pytest.mark.parametrize(("name", "arguments"), [("send", "int dstRank, int tag"), ("recv", "int srcRank, int tag")])
def test_send_and_recv_take_tensors_rank_and_tag(wheel: zipfile.ZipFile, name: str, arguments: str) -> None:
    header = " ".join(source(wheel, "include/torch_npu/csrc/distributed/ProcessGroupHCCL.hpp").split())
    assert f"c10::intrusive_ptr<c10d::Work> {name}(std::vector<at::Tensor>& tensors, {arguments}) override;" in header
    calls = [n for n in ast.walk(ast.parse(DEVICE.read_text())) if isinstance(n, ast.Call)]
    (call,) = [n for n in calls if ast.unparse(n.func) == f"self._group.{name}"]
    assert len(call.args) == 3


def test_called_methods_are_bound_by_the_group_itself(wheel: zipfile.ZipFile) -> None:
    """Overridden methods of c10d are called through it; the others must be bound by torch_npu."""
    header = " ".join(source(wheel, "include/torch_npu/csrc/distributed/ProcessGroupHCCL.hpp").split())
    group = header[header.index("struct Options") :]
    overriding = set(re.findall(r"(\w+)\([^()]*(?:\([^()]*\)[^()]*)*\) override", group))
    called = set(re.findall(r"\.(\w+)\(", source(wheel, "distributed/distributed_c10d.py")))
    channel = next(n for n in ast.walk(ast.parse(DEVICE.read_text())) if isinstance(n, ast.ClassDef) and "Ch" in n.name)
    used = set(re.findall(r"\bgroup\.(\w+)\(", ast.unparse(hccl_transport_class())))
    used |= set(re.findall(r"self\._group\.(\w+)\(", ast.unparse(channel)))
    assert used == {"send", "recv", "abort_hccl_comm"}
    assert {"send", "recv"} <= overriding
    assert "abort" not in overriding  # torch_npu has one with another signature
    assert used <= overriding | called, used
    assert "bool isCompleted() override" in header
    assert all(hasattr(torch.distributed.Work, name) for name in ("is_completed", "exception"))


def test_errors_of_a_group_do_not_end_the_process(wheel: zipfile.ZipFile) -> None:
    (call,) = [
        n
        for n in ast.walk(hccl_transport_class())
        if isinstance(n, ast.Call) and ast.unparse(n.func) == "_abort_on_error"
    ]
    newer, older = (ast.literal_eval(argument) for argument in call.args)
    library = wheel.read("torch_npu/lib/libtorch_npu.so")
    assert f"{older} is deprecated, please use {newer} instead".encode() in library
    assert f"{newer} should be 0, 1, 2, or 3".encode() in library
    assert "CleanUpOnly = 2" in source(wheel, "include/torch_npu/csrc/distributed/ProcessGroupHCCL.hpp")


def test_rendezvous_keys_of_hccl_fit_into_a_message(wheel: zipfile.ZipFile) -> None:
    """The group stores its root info under one key."""
    match = re.search(
        r"HCCL_ROOT_INFO_BYTES *= *(\d+);", source(wheel, "include/third_party/hccl/inc/hccl/hccl_types.h")
    )
    assert match is not None
    assert 4096 < int(match.group(1)) <= MAX_SIGNAL_BYTES


def test_device_functions_exist_in_torch_npu(wheel: zipfile.ZipFile) -> None:
    transport = DEVICE.parents[1]
    files = (DEVICE, transport / "devices.py", transport / "weights" / "snapshot.py")
    layer = "".join(path.read_text() for path in files)
    names = set(re.findall(r"(?:torch_npu\(\)\.npu|self\._module\(\)|\bmodule|\bnpu)\.(\w+)", layer)) - {"is_here"}
    assert names >= {"current_device", "set_device", "is_initialized", "mem_get_info", "Stream", "device_count"}
    (exported,) = [
        set(ast.literal_eval(node.value))
        for node in ast.parse(source(wheel, "npu/__init__.py")).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    ]
    assert names <= exported, names - exported
    stream_methods = set(re.findall(r"def (\w+)", source(wheel, "npu/streams.py")))
    assert {"wait_stream", "record_event", "synchronize"} <= stream_methods
