"""The one layer over devices, as far as a machine with a CPU alone can see it."""

import ast
import importlib.util
from pathlib import Path

import pytest
import torch
from flowrt.workers.probe import devices

from flowrt.errors import ConfigError
from flowrt.transport import transports
from flowrt.transport.devices import Device, choose

ROOT = Path(__file__).parents[2]


def test_the_cpu_has_no_index_and_speaks_gloo() -> None:
    device = choose("cpu", local_rank=3)
    assert device == Device("cpu")
    assert (device.torch, device.backend) == (torch.device("cpu"), "gloo")
    device.use()
    device.synchronise()


@pytest.mark.parametrize(("kind", "library"), [("cuda", "nccl"), ("npu", "hccl")])
def test_tensors_of_the_host_go_by_gloo_whatever_the_device(kind: str, library: str) -> None:
    assert Device(kind, 2).backend == f"cpu:gloo,{kind}:{library}"


def test_memory_of_the_host_is_this_process_in_the_machine() -> None:
    memory = choose("cpu").memory()
    assert 10_000_000 < memory.used_bytes <= memory.peak_bytes < memory.total_bytes


def test_the_same_seed_gives_the_same_numbers() -> None:
    device = choose("cpu")
    with torch.random.fork_rng(devices=[]):
        device.seed(5)
        first = torch.rand(3)
        device.seed(5)
        assert torch.equal(torch.rand(3), first)


def test_a_device_that_does_not_exist_is_refused_with_those_there_are() -> None:
    with pytest.raises(ConfigError, match="no device 'tpu'; use auto, cpu, cuda, npu"):
        choose("tpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there are CUDA devices here")
def test_a_rank_without_a_device_says_how_many_there_are() -> None:
    with pytest.raises(ConfigError, match="local rank 1 needs cuda device 1, but 0 are visible"):
        choose("cuda", local_rank=1)


@pytest.mark.skipif(importlib.util.find_spec("torch_npu") is not None, reason="torch_npu is installed here")
def test_an_npu_without_its_package_is_refused_with_the_fix() -> None:
    with pytest.raises(ConfigError, match="an NPU needs torch_npu of the same version as torch"):
        choose("npu")


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two CUDA devices as torch tells of them to a process that works on neither yet."""
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (10 + index, 20))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"GPU {index}")


@pytest.mark.usefixtures("two_gpus")
def test_a_process_that_has_just_begun_sees_the_devices_of_its_machine() -> None:
    assert devices() == [{"name": f"GPU {one}", "free_bytes": 10 + one, "total_bytes": 20} for one in range(2)]


@pytest.mark.usefixtures("two_gpus")
def test_lanes_between_devices_are_offered_last_by_who_works_on_none_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    assert transports.abilities()[-2:] == ("gloo", "nccl")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert transports.abilities()[-2:] == ("nccl", "gloo")
    monkeypatch.setattr(transports, "npu_is_here", lambda: True)
    assert transports.abilities()[-2:] == ("gloo", "hccl")


def test_only_the_layer_imports_torch_npu() -> None:
    product = [path for folder in ("flowrt", "workers", "launch") for path in (ROOT / folder).rglob("*.py")]
    importing = []
    for path in product:
        for node in ast.walk(ast.parse(path.read_text())):
            named = node.names if isinstance(node, ast.Import) else []
            module = node.module if isinstance(node, ast.ImportFrom) else ""
            asked = isinstance(node, ast.Constant) and node.value == "torch_npu" and path.name != "devices.py"
            if asked or module == "torch_npu" or any(alias.name == "torch_npu" for alias in named):
                importing.append(path.name)
    assert importing == []
