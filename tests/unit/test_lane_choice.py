"""Which transport a lane gets: the best that both ends can do, in the same place, and only what a run was told."""

import pytest

from flowrt.controller.transfers import Lanes
from flowrt.ids import WorkerId

CUDA_A, CUDA_B = ("shm:a", "nccl", "gloo"), ("shm:b", "nccl", "gloo")
NPU_A, NPU_B = ("shm:a", "hccl", "gloo"), ("shm:b", "hccl", "gloo")
IDLE_A, IDLE_B = ("shm:a", "gloo", "nccl"), ("shm:b", "gloo", "nccl")
PLAIN_A, PLAIN_B = ("shm:a", "gloo"), ("shm:b", "gloo")
SENDER, RECEIVER = WorkerId("sender"), WorkerId("receiver")


def chosen(sender: tuple[str, ...], receiver: tuple[str, ...], forced: str = "auto") -> str:
    """The transport of the first turn from one to the other; both come in as they would in a run."""
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
def test_a_lane_gets_the_best_that_both_ends_can_do(
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
def test_a_forced_transport_is_taken_where_a_better_one_would_be(
    sender: tuple[str, ...], receiver: tuple[str, ...], forced: str
) -> None:
    assert chosen(sender, receiver, forced) == forced


def test_shared_memory_is_not_forced_on_a_worker_in_another_place() -> None:
    lanes = Lanes("shm")
    assert lanes.fault(PLAIN_A) == ""
    lanes.join(SENDER, PLAIN_A)
    assert lanes.fault(PLAIN_A) == ""
    assert lanes.fault(PLAIN_B) == (
        "lanes are forced to be shm, and it is not on the host of the others; use lanes = 'auto'"
    )
    lanes.forget(SENDER)
    assert lanes.fault(PLAIN_B) == ""


def test_what_a_worker_cannot_do_is_not_forced_on_it() -> None:
    assert Lanes("hccl").fault(CUDA_A) == "lanes are forced to be hccl, and it can only do shm, nccl, gloo"
    assert Lanes("auto").fault(CUDA_A) == ""


def test_workers_that_move_no_tensors_are_in_nobodys_way() -> None:
    lanes = Lanes("shm")
    lanes.join(WorkerId("observer"), ())
    assert lanes.fault(PLAIN_A) == ""


def test_a_lane_that_was_abandoned_is_chosen_anew_from_what_its_ends_can_do_now() -> None:
    """The receiver comes back on another host under its name: what shared memory did must not be tried again."""
    lanes = Lanes()
    lanes.join(SENDER, CUDA_A)
    lanes.join(RECEIVER, CUDA_A)
    first = lanes.next_turn(SENDER, RECEIVER, "samples")
    lanes.forget(RECEIVER)
    lanes.join(RECEIVER, CUDA_B)
    second = lanes.next_turn(SENDER, RECEIVER, "samples")
    assert (first.transport, second.transport) == ("shm", "nccl")
    assert first.incarnation != second.incarnation
