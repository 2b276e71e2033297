"""Channels between accelerators, with a fake group: failed work, hanging work, interruption."""

import os
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from flowrt.errors import TransferError
from flowrt.transport.lanes.channel import ColumnRun, SignalStore, TransferRateLimit
from flowrt.transport.lanes.device import DeviceChannel, _abort_on_error

LANE = "a>b/samples/0"
NAMES = ("TORCH_HCCL_ASYNC_ERROR_HANDLING", "HCCL_ASYNC_ERROR_HANDLING")


class Group:
    """A fake group, and the work objects that it returns."""

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
    pace = TransferRateLimit(LANE, deadline_s)
    pace.begin()
    return DeviceChannel(group=group, abort=group.end, store=store, device=torch.device("cpu"), rate_limit=pace)


def transfer(channel: DeviceChannel, sending: bool) -> Any:
    return channel.send([ColumnRun.of(torch.zeros(4))]) if sending else channel.receive([[16]])


@pytest.mark.parametrize("sending", [True, False])
def test_completed_work_with_an_exception_fails_the_transfer(sending: bool) -> None:
    """The receive buffer is uninitialised memory."""
    channel = channel_of(Group(lambda: True, RuntimeError("NCCL communicator was aborted")))
    with pytest.raises(TransferError, match=f"a chunk over lane {LANE} failed on cpu: NCCL communicator was aborted"):
        transfer(channel, sending)


@pytest.mark.parametrize("sending", [True, False])
def test_work_that_never_completes_fails_at_the_deadline(sending: bool) -> None:
    with pytest.raises(TransferError, match="nothing moved on cpu for 0 s, or the peer left"):
        transfer(channel_of(Group(lambda: False), 0.1), sending)


@pytest.mark.parametrize("sending", [True, False])
def test_transfer_can_be_interrupted(sending: bool) -> None:
    begun = threading.Event()

    def completed() -> bool:
        begun.set()
        return False

    channel = channel_of(Group(completed))

    def interrupt() -> None:
        if begun.wait(10):
            channel.interrupt()

    interrupting = threading.Thread(target=interrupt)
    interrupting.start()
    with pytest.raises(TransferError, match="or the peer left"):
        transfer(channel, sending)
    interrupting.join(10)


@pytest.mark.parametrize("name", [*NAMES, ""])
def test_errors_abort_the_lane_unless_the_user_set_otherwise(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    for each in NAMES:
        monkeypatch.delenv(each, raising=False)
    if name:
        monkeypatch.setenv(name, "1")
    with _abort_on_error(*NAMES):
        assert [os.environ.get(name) for name in NAMES] == [
            ("1" if variable == name else None) if name else ("2" if variable == NAMES[0] else None)
            for variable in NAMES
        ]
    assert [name for name in NAMES if name in os.environ] == ([name] if name else [])


def test_setting_of_torchrun_is_overridden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    with _abort_on_error("TORCH_NCCL_ASYNC_ERROR_HANDLING"):
        assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "2"
    assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "1"


def test_closing_a_channel_twice_aborts_its_group_once() -> None:
    group = Group(lambda: True)
    channel = channel_of(group)
    for _ in range(3):
        channel.close()
    assert group.ends == 1
