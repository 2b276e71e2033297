"""The channel of lanes between accelerators, with a group that does as it is told: errors come late, or never."""

import os
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from flowrt.errors import TransferError
from flowrt.transport.device import DeviceChannel, _errors_stay_here
from flowrt.transport.pace import Pace
from flowrt.transport.pieces import Run
from flowrt.transport.rendezvous import SignalStore

LANE = "a>b/samples/0"
NAMES = ("TORCH_HCCL_ASYNC_ERROR_HANDLING", "HCCL_ASYNC_ERROR_HANDLING")


class Group:
    """Both a group and all its works."""

    def __init__(self, completed: Callable[[], bool], error: Exception | None = None) -> None:
        self.is_completed, self._error = completed, error
        self.ends = 0

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int) -> "Group":
        return self

    recv = send

    def exception(self) -> Exception | None:
        return self._error

    def end(self) -> None:
        self.ends += 1


def channel_of(group: Group, deadline_s: float = 20.0) -> DeviceChannel:
    store = SignalStore(LANE, lambda *_: None, deadline_s)
    store.deliver("ready/1", b"1")
    pace = Pace(LANE, deadline_s)
    pace.begin()
    return DeviceChannel(group, group.end, store, torch.device("cpu"), pace)


def transfer(channel: DeviceChannel, sending: bool) -> Any:
    return channel.send([Run.of(torch.zeros(4))]) if sending else channel.receive([[16]])


@pytest.mark.parametrize("sending", [True, False])
def test_a_work_that_is_completed_because_it_failed_is_an_error(sending: bool) -> None:
    """What was to be received is memory that nobody has written to."""
    channel = channel_of(Group(lambda: True, RuntimeError("NCCL communicator was aborted")))
    with pytest.raises(TransferError, match=f"a piece over lane {LANE} failed on cpu: NCCL communicator was aborted"):
        transfer(channel, sending)


@pytest.mark.parametrize("sending", [True, False])
def test_what_never_completes_is_an_error_at_the_deadline(sending: bool) -> None:
    with pytest.raises(TransferError, match="nothing moved on cpu for 0 s, or the peer left"):
        transfer(channel_of(Group(lambda: False), 0.1), sending)


@pytest.mark.parametrize("sending", [True, False])
def test_a_transfer_can_be_interrupted(sending: bool) -> None:
    begun = threading.Event()

    def completed() -> bool:
        begun.set()
        return False

    channel = channel_of(Group(completed))
    interrupting = threading.Thread(target=lambda: begun.wait(10) and channel.interrupt())
    interrupting.start()
    with pytest.raises(TransferError, match="or the peer left"):
        transfer(channel, sending)
    interrupting.join(10)


@pytest.mark.parametrize("name", [*NAMES, ""])
def test_errors_of_lanes_stay_in_the_lane_unless_a_user_said_otherwise(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    for each in NAMES:
        monkeypatch.delenv(each, raising=False)
    if name:
        monkeypatch.setenv(name, "1")
    with _errors_stay_here(*NAMES):
        assert [os.environ.get(one) for one in NAMES] == [
            ("1" if one == name else None) if name else ("2" if one == NAMES[0] else None) for one in NAMES
        ]
    assert [one for one in NAMES if one in os.environ] == ([name] if name else [])


def test_what_torchrun_sets_for_every_process_is_nobodys_wish(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    with _errors_stay_here("TORCH_NCCL_ASYNC_ERROR_HANDLING"):
        assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "2"
    assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "1"


def test_a_group_is_aborted_once_however_often_its_channel_is_closed() -> None:
    group = Group(lambda: True)
    channel = channel_of(group)
    for _ in range(3):
        channel.close()
    assert group.ends == 1
