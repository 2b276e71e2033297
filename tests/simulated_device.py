"""A simulated accelerator: tensors that state its device, refuse to mix with those of the host, and compute on the CPU.

- Programs run whole and with real numbers, so that their results can be compared with those of the CPU bit for bit.
- Stricter than CUDA: index tensors have to be on the device too. Tensors of no dimension may be on the host, as in CUDA.
- What kernels an accelerator has, how fast it is and how it rounds are not simulated.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

aten = torch.ops.aten
COPIES = frozenset({aten.copy_.default, aten._to_copy.default})
WAITS = frozenset({aten._local_scalar_dense.default, aten.nonzero.default, aten.masked_select.default})
"""Operations whose result, or its shape, the host needs: CUDA waits for the device."""


class SimulatedTensor(torch.Tensor):
    """A tensor of the simulated device. Its elements are in ``host``."""

    host: torch.Tensor

    @staticmethod
    def __new__(cls, host: torch.Tensor, device: torch.device) -> "SimulatedTensor":
        made: SimulatedTensor = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            host.shape,
            strides=host.stride(),
            storage_offset=host.storage_offset(),
            dtype=host.dtype,
            device=device,
        )
        made.host = host
        return made

    def __repr__(self) -> str:  # type: ignore[override]
        return f"{self.host!r} on {self.device}"

    def tolist(self) -> Any:
        return self.cpu().tolist()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError(f"{func} on a tensor of the simulated device, which is not in use")


class SimulatedDevice(TorchDispatchMode):
    """While it is in use, tensors can be made on ``device``. Counts what the host waits for, by operation."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.device = torch.device(device, 0)
        self.waits: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        flat, spec = tree_flatten((args, kwargs))
        tensors = [one for one in flat if isinstance(one, torch.Tensor)]
        here = [one for one in tensors if isinstance(one, SimulatedTensor)]
        wanted = kwargs.get("device")
        self._check(func, tensors, bool(here))
        if here and wanted is not None and torch.device(wanted).type == "cpu" and not kwargs.get("non_blocking"):
            self.waits.append(str(func))
        elif func is aten.copy_.default and not isinstance(args[0], SimulatedTensor) and here:
            self.waits.append(str(func))
        elif here and (func in WAITS or _has_mask(func, tensors)):
            self.waits.append(str(func))
        kwargs.pop("pin_memory", None)
        if wanted is not None:
            on_device = torch.device(wanted).type == self.device.type
            kwargs["device"] = torch.device("cpu")
        else:
            on_device = isinstance(args[0], SimulatedTensor) if func in COPIES else bool(here)
        args, kwargs = tree_map_only(SimulatedTensor, lambda one: one.host, (args, kwargs))
        result = func(*args, **kwargs)
        known = {id(one.host): one for one in here}
        known |= {id(one): one for one in tensors if not isinstance(one, SimulatedTensor)}
        if wanted is not None and func is aten._to_copy.default and on_device:
            known = {}

        def wrapped(one: torch.Tensor) -> torch.Tensor:
            if id(one) in known:  # in place
                return known[id(one)]
            return SimulatedTensor(one, self.device) if on_device else one

        return tree_map_only(torch.Tensor, wrapped, result)

    def _check(self, func: Any, tensors: Sequence[torch.Tensor], here: bool) -> None:
        if not here or func in COPIES:
            return
        strange = [one for one in tensors if not isinstance(one, SimulatedTensor) and one.dim()]
        if strange:
            shapes = ", ".join(str(tuple(one.shape)) for one in strange)
            raise RuntimeError(f"{func}: tensors of {self.device} and of the host ({shapes}) in one operation")


def _has_mask(func: Any, tensors: Sequence[torch.Tensor]) -> bool:
    """Whether elements are chosen by a mask, so that the host needs their number."""
    return func is aten.index.Tensor and any(one.dtype is torch.bool for one in tensors[1:])
