"""Devices, as far as they can be tested on a machine with a CPU only."""

import ast
import importlib.util
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from flowrt.errors import ConfigError
from flowrt.launcher.doctor.probe import devices
from flowrt.runtime.resource_limits import MEMORY_SHARE
from flowrt.transport.devices import ALL_ALLOCATORS, ALLOCATORS, CUBLAS_WORKSPACE, EXPANDABLE, Device, Kind, choose
from flowrt.transport.lanes import lane

ROOT = Path(__file__).parents[3]


def test_cpu_has_no_index_and_uses_gloo() -> None:
    device = choose("cpu", local_rank=3)
    assert device == Device("cpu")
    assert (device.torch, device.backend) == (torch.device("cpu"), "gloo")
    device.use()


@pytest.mark.parametrize(("kind", "library"), [("cuda", "nccl"), ("npu", "hccl")])
def test_host_tensors_use_gloo_on_every_device(kind: Kind, library: str) -> None:
    assert Device(kind, 2).backend == f"cpu:gloo,{kind}:{library}"


def test_host_memory_is_that_of_this_process() -> None:
    memory = choose("cpu").memory()
    assert 10_000_000 < memory.used_bytes <= memory.peak_bytes < memory.total_bytes


def test_equal_seeds_give_equal_numbers() -> None:
    device = choose("cpu")
    with torch.random.fork_rng(devices=[]):
        device.seed(5)
        first = torch.rand(3)
        device.seed(5)
        assert torch.equal(torch.rand(3), first)


def test_unknown_device_raises_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="no device 'tpu'; use auto, cpu, cuda, npu"):
        choose("tpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there are CUDA devices here")
def test_rank_without_a_device_raises_with_their_number() -> None:
    with pytest.raises(ConfigError, match="local rank 1 needs cuda device 1, but 0 are visible"):
        choose("cuda", local_rank=1)


@pytest.mark.skipif(importlib.util.find_spec("torch_npu") is not None, reason="torch_npu is installed here")
def test_npu_without_torch_npu_raises_with_the_fix() -> None:
    with pytest.raises(ConfigError, match="an NPU needs torch_npu of the same version as torch"):
        choose("npu")


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two CUDA devices, as torch reports them to a process that uses neither."""
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (10 + index, 20))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"GPU {index}")


@pytest.mark.usefixtures("two_gpus")
def test_a_process_keeps_to_its_share_of_the_memory_of_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[tuple[float, int]] = []
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: None)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda *limit: limits.append(limit))
    for name in (*ALLOCATORS.values(), ALL_ALLOCATORS):
        monkeypatch.delenv(name, raising=False)
    Device("cuda", 1).use()
    assert (os.environ.pop(ALLOCATORS["cuda"]), limits) == (EXPANDABLE, [])
    monkeypatch.setenv(MEMORY_SHARE, "0.4000")
    monkeypatch.setenv(ALL_ALLOCATORS, "backend:native")
    Device("cuda", 1).use()
    assert (os.environ.get(ALLOCATORS["cuda"]), limits) == (None, [(0.4, 1)])
    monkeypatch.delenv(ALL_ALLOCATORS)
    monkeypatch.setenv(ALLOCATORS["cuda"], "backend:native")
    Device("cuda").use()
    assert (os.environ[ALLOCATORS["cuda"]], limits[1:]) == ("backend:native", [(0.4, 0)])


@pytest.mark.usefixtures("two_gpus")
def test_new_process_lists_the_devices_of_its_machine() -> None:
    assert devices() == [{"name": f"GPU {index}", "free_bytes": 10 + index} for index in range(2)]


@pytest.mark.usefixtures("two_gpus")
def test_device_transports_come_last_without_a_device_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    assert lane.available_transports()[-2:] == ("gloo", "nccl")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert lane.available_transports()[-2:] == ("nccl", "gloo")
    monkeypatch.setattr(lane, "npu_is_here", lambda: True)
    assert lane.available_transports()[-2:] == ("gloo", "hccl")


@pytest.mark.slow
def test_only_devices_imports_torch_npu() -> None:
    product = [path for folder in ("flowrt", "workers", "launch") for path in (ROOT / folder).rglob("*.py")]
    importing = []
    for path in product:
        for node in ast.walk(ast.parse(path.read_text())):
            named = node.names if isinstance(node, ast.Import) else []
            module = node.module if isinstance(node, ast.ImportFrom) else ""
            by_string = isinstance(node, ast.Constant) and node.value == "torch_npu" and path.name != "devices.py"
            if by_string or module == "torch_npu" or any(alias.name == "torch_npu" for alias in named):
                importing.append(path.name)
    assert importing == []


def test_cuda_is_deterministic_in_attention_too_and_has_no_plans_of_cudnn(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: dict[str, Any] = {}
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: chosen.update(index=index))
    monkeypatch.setattr(torch.backends.cuda, "enable_cudnn_sdp", lambda value: chosen.update(cudnn=value))
    monkeypatch.setattr(
        torch, "use_deterministic_algorithms", lambda value, *, warn_only: chosen.update(on=value, warns=warn_only)
    )
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    monkeypatch.setenv(CUBLAS_WORKSPACE, ":16:8")
    device = Device("cuda", 3)
    device.compute_deterministically()
    device.use()
    assert chosen == {"index": 3, "cudnn": False, "on": True, "warns": False}
    assert not getattr(torch.utils.deterministic, "fill_uninitialized_memory")  # noqa: B009
