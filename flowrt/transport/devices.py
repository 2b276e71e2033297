"""Devices that flowrt computes on and moves tensors between: CPU, CUDA, Ascend NPU.

- Only this file imports torch_npu, and only to use an NPU, not to detect one.
- Everything about NPUs is written against torch_npu's interface and HAS NOT RUN ON AN NPU.
- ``python -m flowrt.transport.devices NAME COUNT`` prints, in one sentence, why torch does not see this number of
  devices here; nothing if it does. The launcher asks a process of its own: it does not import torch, and a process
  that has initialised CUDA must not fork.
"""

import importlib.util
import os
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from flowrt.errors import ConfigError
from flowrt.ids import AUTO
from flowrt.runtime.resource_limits import memory_share

Kind = Literal["cpu", "cuda", "npu"]
BACKENDS: dict[Kind, str] = {"cpu": "gloo", "cuda": "nccl", "npu": "hccl"}
CUBLAS_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
ALLOCATORS: dict[Kind, str] = {"cuda": "PYTORCH_CUDA_ALLOC_CONF", "npu": "PYTORCH_NPU_ALLOC_CONF"}
"""Variables with the options of torch's allocator, which it reads when memory is first allocated."""
ALL_ALLOCATORS = "PYTORCH_ALLOC_CONF"
EXPANDABLE = "expandable_segments:True"
"""Memory of freed tensors serves those of other sizes, so that a process keeps to its share of a device."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory of a device: used by this process, now and at its peak, and the total of the device."""

    used_bytes: int
    peak_bytes: int
    total_bytes: int


@dataclass(frozen=True, slots=True)
class Device:
    """One device of this machine; see `choose`."""

    kind: Kind
    index: int = 0

    @property
    def torch(self) -> torch.device:
        return torch.device("cpu") if self.kind == "cpu" else torch.device(self.kind, self.index)

    @property
    def backend(self) -> str:
        """Backend for `init_process_group`: gloo for host memory, the device's own library for its memory."""
        return "gloo" if self.kind == "cpu" else f"cpu:gloo,{self.kind}:{BACKENDS[self.kind]}"

    def use(self) -> None:
        """Make this the current device of the calling thread; each thread of a pool has its own.

        This process keeps to its share of the device's memory (`flowrt.runtime.resource_limits.memory_share`).
        """
        if self.kind == "cuda":
            # cuDNN's attention makes a plan, in half a second, for each new shape; a cache makes one in every step.
            torch.backends.cuda.enable_cudnn_sdp(False)
        if self.kind == "cpu":
            return
        if ALL_ALLOCATORS not in os.environ:
            os.environ.setdefault(ALLOCATORS[self.kind], EXPANDABLE)
        module = self._module()
        module.set_device(self.index)
        if (share := memory_share()) < 1:
            module.set_per_process_memory_fraction(share, self.index)

    def compute_deterministically(self) -> None:
        """Use deterministic kernels on an accelerator; on CUDA an operation that has none raises RuntimeError.

        Must be called before the first use of the device. No effect on a CPU, whose kernels are deterministic.
        """
        if self.kind == "cpu":
            return
        if self.kind == "cuda":  # cuBLAS reads it when it is first used
            os.environ.setdefault(CUBLAS_WORKSPACE, ":4096:8")
        # With warn_only the backward passes of attention stay as they are, and differ from run to run.
        torch.use_deterministic_algorithms(True, warn_only=self.kind != "cuda")
        # Memory is written before it is read: what torch would fill it with costs time alone.
        setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)  # noqa: B010 (a property without a type)

    def seed(self, seed: int) -> None:
        """Seed torch's generators, including that of the device."""
        torch.manual_seed(seed)

    def memory(self) -> Memory:
        """Memory in use: of a CPU the resident memory of this process, else what torch has allocated for tensors."""
        if self.kind == "cpu":
            used = resident_bytes()
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
            return Memory(used, max(used, peak), os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
        module = self._module()
        _, total = module.mem_get_info(self.index)
        return Memory(module.memory_allocated(self.index), module.max_memory_allocated(self.index), total)

    def _module(self) -> Any:
        return _module_of(self.torch)


class SideStream:
    """A stream of a device for work that is not to wait for that of the current stream, nor delay it.

    On a CPU work is done at once.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: Any = None

    @contextmanager
    def work(self) -> Iterator[None]:
        """Queue the work of this context here, after what is queued on the current stream; it is done at the end."""
        if self._device.type == "cpu":
            yield
            return
        module = _module_of(self._device)
        with module.device(self._device):
            if self._stream is None:
                self._stream = module.Stream()
            self._stream.wait_stream(module.current_stream())
            try:
                with module.stream(self._stream):
                    yield
            finally:
                self._stream.synchronize()


def keep_until_read(tensor: torch.Tensor) -> None:
    """Let the memory of a tensor serve others only after the work that is queued on the current stream.

    Else, once the last reference is gone, it serves the stream of its allocation, which may be another one.
    """
    if tensor.device.type != "cpu":
        tensor.record_stream(_module_of(tensor.device).current_stream())


def _module_of(device: torch.device) -> Any:
    """The module of torch with the streams of an accelerator."""
    return torch_npu().npu if device.type == "npu" else torch.cuda


@dataclass(frozen=True, slots=True)
class AcceleratorUse:
    """What this process uses of accelerators; numbers are sums over them."""

    count: int = 0
    allocated_bytes: int = 0
    """Memory of tensors."""
    reserved_bytes: int = 0
    """Memory that torch holds, with what is free in it."""
    total_bytes: int = 0
    busy_share: float = -1.0
    """Mean share of time in which a device computed, for any process, from 0 to 1; -1: unknown."""


def accelerator_use() -> AcceleratorUse:
    """What this process uses of accelerators on which it has tensors. Creates no context, and waits for no device.

    The share of time needs the driver's library (nvidia-ml-py for CUDA), and is unknown for parts of a device (MIG).
    """
    modules: list[Any] = [torch.cuda] if torch.cuda.is_initialized() else []
    if has_npu():
        modules.append(torch_npu().npu)
    devices = [(module, index) for module in modules for index in range(module.device_count())]
    used = [(module, index, reserved) for module, index in devices if (reserved := module.memory_reserved(index))]
    shares = [share for module, index, _ in used if (share := _busy_share(module, index)) >= 0]
    return AcceleratorUse(
        count=len(used),
        allocated_bytes=sum(module.memory_allocated(index) for module, index, _ in used),
        reserved_bytes=sum(reserved for _, _, reserved in used),
        total_bytes=sum(module.get_device_properties(index).total_memory for module, index, _ in used),
        busy_share=sum(shares) / len(shares) if shares else -1.0,
    )


_UNMEASURED: set[Any] = set()
"""Modules of accelerators whose share of time cannot be measured: not tried again."""


def _busy_share(module: Any, index: int) -> float:
    if module in _UNMEASURED:
        return -1.0
    try:
        return float(module.utilization(index)) / 100
    except Exception:  # noqa: BLE001 - errors of the driver's own library, which may be missing
        _UNMEASURED.add(module)
        return -1.0


def resident_bytes() -> int:
    """Resident memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def choose(name: str, local_rank: int = 0) -> Device:
    """The device for a process: cpu, cuda, npu, or auto (the accelerator of this machine, else cpu).

    Processes of one machine take one accelerator each, by ``local_rank``. Raises ConfigError if there are too few, or
    if the name is unknown.
    """
    if name == AUTO:
        name = "cuda" if cuda_is_here() else "npu" if npu_is_here() else "cpu"
    if name == "cpu":
        return Device("cpu")
    if name not in BACKENDS:
        raise ConfigError(f"there is no device {name!r}; use auto, {', '.join(BACKENDS)}")
    count = torch.cuda.device_count() if name == "cuda" else int(torch_npu().npu.device_count())
    if local_rank >= count:
        raise ConfigError(
            f"local rank {local_rank} needs {name} device {local_rank}, but {count} are visible here{_advice(name)}"
        )
    return Device("cuda" if name == "cuda" else "npu", local_rank)


def _advice(name: str) -> str:
    if name == "cuda" and torch.version.cuda is None and torch.version.hip is None:
        return f": torch {torch.__version__} is built without CUDA; install a build with it, or use device cpu"
    variable = "CUDA_VISIBLE_DEVICES" if name == "cuda" else "ASCEND_RT_VISIBLE_DEVICES"
    limit = f" ({variable} is {os.environ[variable]!r})" if variable in os.environ else ""
    return f"{limit}; load their driver, ask for devices (--gpus), use fewer ranks, or use device cpu"


def own_device(name: str) -> Device:
    """As `choose`, for this process: its local rank is that of torchrun (LOCAL_RANK), else 0."""
    return choose(name, int(os.environ.get("LOCAL_RANK", "0")))


def cuda_is_here() -> bool:
    """Whether this machine has a CUDA device. Creates no context on it."""
    return torch.cuda.is_available()


def npu_is_here() -> bool:
    """Whether this machine has an NPU and torch_npu is installed. Does not import torch_npu."""
    return any(Path("/dev").glob("davinci[0-9]*")) and importlib.util.find_spec("torch_npu") is not None


def has_cuda() -> bool:
    """Whether this process uses a CUDA device and torch has nccl. Creates no context."""
    return torch.distributed.is_nccl_available() and torch.cuda.is_initialized()


def has_npu() -> bool:
    """Whether this process uses an NPU."""
    npu = getattr(torch, "npu", None)
    return npu is not None and "torch_npu" in sys.modules and bool(npu.is_initialized())


def own_index(kind: Kind) -> int:
    """Index of the device that an engine of this process uses or would use. Raises ConfigError as `choose`."""
    return own_device(kind).index


def torch_npu() -> Any:
    """Import and return torch_npu. Raises ConfigError if it is not installed."""
    try:
        return importlib.import_module("torch_npu")
    except ImportError as error:
        raise ConfigError(
            f"an NPU needs torch_npu of the same version as torch {torch.__version__}: pip install 'flowrt[npu]' "
            f"({error})"
        ) from error


def main() -> None:
    name, count = sys.argv[1], int(sys.argv[2])
    try:
        choose(name, count - 1)
    except ConfigError as error:
        print(error)  # noqa: T201 (its output is the answer)


if __name__ == "__main__":
    main()
