"""A simulated accelerator: tensors that report its device, refuse to mix with host tensors, and compute on the CPU.

- Programs run completely and compute real numbers, so that their results can be compared with those of the CPU.
- Stricter than CUDA: index tensors have to be on the device too. Tensors of no dimension may be on the host.
- Moving a module to the device unties its weights (`on_device` ties them again). Inference mode, which torch does not
  support for such tensors, has to be replaced by `without_inference_mode`.
- Available kernels, speed, rounding and concurrency of an accelerator are not simulated.

torch's device type "privateuseone" takes the name of an NPU. That cannot be undone: use it in a process of its own.
"""

import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

aten = torch.ops.aten
COPIES = frozenset({aten.copy_.default, aten._to_copy.default})
WAITS = frozenset(
    {
        aten._local_scalar_dense.default,
        aten.nonzero.default,
        aten.masked_select.default,
        aten._unique2.default,
        aten.repeat_interleave.Tensor,
        aten.equal.default,
    }
)
"""Operations whose result or output shape the host needs, so that it waits for the device."""


class SimulatedTensor(torch.Tensor):
    """A tensor of the simulated device. Its elements are in ``host``."""

    host: torch.Tensor

    @staticmethod
    def __new__(cls, host: torch.Tensor, device: torch.device) -> "SimulatedTensor":
        tensor: SimulatedTensor = torch.Tensor._make_wrapper_subclass(
            cls,
            host.shape,
            strides=host.stride(),
            storage_offset=host.storage_offset(),
            dtype=host.dtype,
            device=device,
        )
        tensor.host = host
        return tensor

    def __repr__(self) -> str:  # type: ignore[override]
        return f"{self.host!r} on {self.device}"

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def record_stream(self, stream: Any) -> None:
        assert isinstance(stream, RecordingNpu)
        stream.record_stream()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise RuntimeError(f"{func} on a tensor of the simulated device, which is not in use")


class SimulatedDevice(TorchDispatchMode):
    """While it is active, tensors can be created on ``device``.

    Attributes:
        device: the only simulated device.
        waits: the operations for which the host waited.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device = device
        self.waits: list[str] = []
        self._pinned: list[torch.Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        tensors = [tensor for tensor in tree_flatten((args, kwargs))[0] if isinstance(tensor, torch.Tensor)]
        on_this_device = [tensor for tensor in tensors if isinstance(tensor, SimulatedTensor)]
        self._check(func, tensors, on_this_device)
        if on_this_device and self._host_waits(func, args, kwargs, tensors):
            self.waits.append(str(func))
        if func is aten.is_pinned.default:
            return any(tensor.data_ptr() == args[0].data_ptr() for tensor in self._pinned)
        if func is aten._pin_memory.default:
            self._pinned.append(args[0].clone())
            return self._pinned[-1]
        pinned = kwargs.pop("pin_memory", None)
        wanted = kwargs.get("device")
        on_device = bool(on_this_device)
        if wanted is not None:
            on_device = torch.device(wanted).type == self.device.type
            kwargs["device"] = torch.device("cpu")
        elif func in COPIES:
            on_device = isinstance(args[0], SimulatedTensor)
        args, kwargs = tree_map_only(SimulatedTensor, lambda tensor: tensor.host, (args, kwargs))
        known = {id(tensor.host if isinstance(tensor, SimulatedTensor) else tensor): tensor for tensor in tensors}
        result = func(*args, **kwargs)
        if pinned:
            self._pinned.append(result)

        def wrapped(tensor: torch.Tensor) -> torch.Tensor:
            given = known.get(id(tensor))
            if given is not None and isinstance(given, SimulatedTensor) == on_device:
                return given  # in place
            return SimulatedTensor(tensor, self.device) if on_device else tensor

        return tree_map_only(torch.Tensor, wrapped, result)

    def _check(self, func: Any, tensors: Sequence[torch.Tensor], on_this_device: Sequence[torch.Tensor]) -> None:
        if not on_this_device or func in COPIES:
            return
        host_tensors = [tensor for tensor in tensors if not isinstance(tensor, SimulatedTensor) and tensor.dim()]
        if host_tensors:
            shapes = ", ".join(str(tuple(tensor.shape)) for tensor in host_tensors)
            raise RuntimeError(f"{func}: tensors of {self.device} and of the host ({shapes}) in one operation")

    def _host_waits(self, func: Any, args: Any, kwargs: Any, tensors: Sequence[torch.Tensor]) -> bool:
        if func is aten._to_copy.default:
            to_host = kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "cpu"
            return to_host and not kwargs.get("non_blocking")
        if func is aten.copy_.default:
            return not isinstance(args[0], SimulatedTensor) and not (kwargs.get("non_blocking") or args[2:] == (True,))
        indexed = func in (aten.index.Tensor, aten.index_put_.default)
        by_mask = indexed and any(
            tensor.dtype is torch.bool for tensor in tree_flatten(args[1])[0] if tensor is not None
        )
        return func in WAITS or by_mask


class RecordingNpu:
    """torch_npu.npu as far as flowrt calls it: records the names of calls."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        results = {
            "device_count": 1,
            "current_device": 0,
            "is_initialized": True,
            "is_available": True,
            "mem_get_info": (1 << 30, 2 << 30),
        }

        def call(*_: Any) -> Any:
            self.calls.append(name)
            return results.get(name, 0)

        return call

    def device(self, index: Any) -> AbstractContextManager[None]:
        self.calls.append("device")
        assert isinstance(index, int) or torch.device(index).type == "npu"
        return nullcontext()

    def stream(self, stream: "RecordingNpu") -> AbstractContextManager[None]:
        self.calls.append("stream")
        assert isinstance(stream, RecordingNpu)
        return nullcontext()

    def Stream(self) -> "RecordingNpu":
        return self._record("Stream")

    def current_stream(self) -> "RecordingNpu":
        return self._record("current_stream")

    def _record(self, name: str) -> "RecordingNpu":
        self.calls.append(name)
        return self


def without_inference_mode() -> None:
    """Make ``torch.inference_mode`` the same as ``torch.no_grad``. Call it before other modules are imported."""

    def mode(enabled: bool = True) -> Any:
        return torch.no_grad() if enabled else nullcontext()

    torch.inference_mode = mode  # type: ignore[assignment, misc]


def on_device(model: Any, device: torch.device) -> Any:
    """A model of transformers, moved to the simulated device."""
    model.to(device)
    model.tie_weights()
    return model


def simulate_npu() -> tuple[SimulatedDevice, RecordingNpu]:
    """Create an NPU in this process, and a module torch_npu that records calls. Call it once, after all imports."""
    module, calls = ModuleType("torch_npu"), RecordingNpu()
    _setup_privateuseone_for_python_backend("npu", backend_module=calls)
    torch._C._set_only_lift_cpu_tensors(True)  # so that a mode sees what torch.tensor does for a device
    module.__spec__ = ModuleSpec("torch_npu", None)
    module.npu = calls  # type: ignore[attr-defined]
    sys.modules["torch_npu"] = module
    return SimulatedDevice(torch.device("npu", 0)), calls
