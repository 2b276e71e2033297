"""Weights copied to a device and back through pinned memory: complete, and ordered after its pending work."""

import pytest
import torch

from flowrt.transport.devices import Device
from flowrt.transport.weights.snapshot import Snapshot


def weights(device: torch.device) -> dict[str, torch.Tensor]:
    shapes = {"a": (3000, 4001), "bias": (7,), "b": (30_000_000,)}
    return {name: torch.randn(shape, device=device).bfloat16() for name, shape in shapes.items()}


def test_a_snapshot_is_pinned_and_includes_pending_computations(accelerator: Device) -> None:
    tensors = weights(accelerator.torch)
    for _ in range(50):  # still pending on the device when the snapshot is taken
        tensors["a"].mul_(1.01).add_(0.01)
    snapshot = Snapshot.take(1, tensors)
    expected = Snapshot.take(1, {name: tensor.cpu() for name, tensor in tensors.items()})
    tensors["a"].zero_()
    assert all(bucket.is_pinned() for bucket in snapshot.buckets)
    assert not any(bucket.is_pinned() for bucket in expected.buckets)
    assert all(map(torch.equal, snapshot.buckets, expected.buckets))
    assert snapshot.checksum() == expected.checksum()


@pytest.mark.parametrize("kind", ["taken pinned", "pinned while it is staged", "not pinned"])
def test_a_restored_version_is_complete_on_the_device_when_it_is_used(kind: str, accelerator: Device) -> None:
    new = weights(accelerator.torch)
    on_host = {name: tensor.cpu() for name, tensor in new.items()}
    snapshot = Snapshot.take(1, new if kind == "taken pinned" else on_host)
    if kind == "pinned while it is staged":
        snapshot = snapshot.pinned_for(accelerator.torch)
        assert all(bucket.is_pinned() for bucket in snapshot.buckets)
    target = {name: torch.zeros_like(tensor) for name, tensor in new.items()}
    snapshot.restore(target)
    copies = {name: tensor * 1 for name, tensor in target.items()}  # work that is queued next reads the complete copy
    assert all(torch.equal(copies[name].cpu(), on_host[name]) for name in on_host)
