"""Choice of a lane's transport: the best that both ends support, or the forced one."""

import pytest

from flowrt.controller.state.transfers import Lanes
from flowrt.ids import WorkerId

CUDA_A, CUDA_B = ("shm:a", "nccl", "gloo"), ("shm:b", "nccl", "gloo")
NPU_A, NPU_B = ("shm:a", "hccl", "gloo"), ("shm:b", "hccl", "gloo")
IDLE_A, IDLE_B = ("shm:a", "gloo", "nccl"), ("shm:b", "gloo", "nccl")
PLAIN_A, PLAIN_B = ("shm:a", "gloo"), ("shm:b", "gloo")
SENDER, RECEIVER = WorkerId("sender"), WorkerId("receiver")


def chosen(sender: tuple[str, ...], receiver: tuple[str, ...], forced: str = "auto") -> str:
    """The transport of the first turn from one worker to the other, after both have joined."""
    lanes = Lanes(forced)
    for worker, able in ((SENDER, sender), (RECEIVER, receiver)):
        assert lanes.fault(able) == ""
        lanes.join(worker, able)
    return lanes.next_turn(SENDER, RECEIVER, "samples").transport


@pytest.mark.parametrize(
    ("sender", "receiver", "transport"),
    [
        (CUDA_A, CUDA_B, "nccl"),
        (NPU_A, NPU_B, "hccl"),
        (NPU_A, CUDA_B, "gloo"),
        (CUDA_A, NPU_B, "gloo"),
        (CUDA_A, PLAIN_B, "gloo"),
        (PLAIN_A, PLAIN_B, "gloo"),
        (CUDA_A, IDLE_B, "gloo"),
        (IDLE_A, IDLE_B, "gloo"),
        (CUDA_A, CUDA_A, "shm"),
        (CUDA_A, NPU_A, "shm"),
        (CUDA_A, PLAIN_A, "shm"),
    ],
)
def test_lane_gets_the_best_common_transport(
    sender: tuple[str, ...], receiver: tuple[str, ...], transport: str
) -> None:
    assert chosen(sender, receiver) == transport
    assert chosen(receiver, sender) == transport


@pytest.mark.parametrize(
    ("sender", "receiver", "forced"),
    [
        (CUDA_A, CUDA_A, "gloo"),
        (CUDA_A, CUDA_A, "nccl"),
        (CUDA_A, CUDA_A, "shm"),
        (NPU_A, CUDA_B, "gloo"),
        (IDLE_A, CUDA_B, "nccl"),
        (IDLE_A, IDLE_A, "nccl"),
    ],
)
def test_forced_transport_is_used_instead_of_a_better_one(
    sender: tuple[str, ...], receiver: tuple[str, ...], forced: str
) -> None:
    assert chosen(sender, receiver, forced) == forced


def test_shared_memory_is_not_forced_across_namespaces() -> None:
    lanes = Lanes("shm")
    assert lanes.fault(PLAIN_A) == ""
    lanes.join(SENDER, PLAIN_A)
    assert lanes.fault(PLAIN_A) == ""
    assert lanes.fault(PLAIN_B) == (
        "lanes are forced to be shm, and it is not on the host of the others; use lanes = 'auto'"
    )
    lanes.forget(SENDER)
    assert lanes.fault(PLAIN_B) == ""


def test_unsupported_transport_is_not_forced() -> None:
    assert Lanes("hccl").fault(CUDA_A) == "lanes are forced to be hccl, and it can only do shm, nccl, gloo"
    assert Lanes("auto").fault(CUDA_A) == ""


def test_workers_without_transports_do_not_limit_others() -> None:
    lanes = Lanes("shm")
    lanes.join(WorkerId("observer"), ())
    assert lanes.fault(PLAIN_A) == ""


def test_abandoned_lane_is_chosen_again_from_current_transports() -> None:
    """The receiver rejoins under its name on another host, where shared memory does not work."""
    lanes = Lanes()
    lanes.join(SENDER, CUDA_A)
    lanes.join(RECEIVER, CUDA_A)
    first = lanes.next_turn(SENDER, RECEIVER, "samples")
    lanes.forget(RECEIVER)
    lanes.join(RECEIVER, CUDA_B)
    second = lanes.next_turn(SENDER, RECEIVER, "samples")
    assert (first.transport, second.transport) == ("shm", "nccl")
    assert first.incarnation != second.incarnation
