"""Device memory of publishing: ranks in lock step cannot hold the whole model on the device."""

from collections.abc import Iterator
from weakref import WeakSet

import pytest
import torch
import torch.distributed as dist

from flowrt.engines.fsdp import sharding
from flowrt.engines.fsdp.trainer import FsdpTrainer
from flowrt.engines.options import FsdpOptions, LoraOptions
from flowrt.transport.devices import Device


class GatheredTensor:
    """A tensor that was gathered on the device."""

    def to(self, device: str, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(3, device=device, dtype=dtype)


def test_publishing_holds_one_gathered_tensor_at_a_time_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    alive: WeakSet[GatheredTensor] = WeakSet()

    def gathered_tensors(*_: object, **__: object) -> Iterator[tuple[str, GatheredTensor]]:
        for name in "abc":
            assert not alive
            gathered = GatheredTensor()
            alive.add(gathered)
            yield name, gathered
            del gathered

    monkeypatch.setattr(sharding, "full_tensors", gathered_tensors)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    engine = FsdpTrainer.__new__(FsdpTrainer)
    engine.model, engine._device, engine._lora = None, Device("cpu"), LoraOptions()
    engine._fsdp = FsdpOptions(gather="pass", dtype="bfloat16")
    published = engine.parameters()
    assert not alive
    assert {name: tensor.dtype for name, tensor in published.items()} == dict.fromkeys("abc", torch.bfloat16)
