"""A worker with a low limit of open files and many peers: idle lanes are retired and opened again, nothing is lost."""

import asyncio
import os
import random
import resource
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from flowrt.controller.state.transfers import Lanes
from flowrt.errors import TransferError
from flowrt.ids import WorkerId
from flowrt.protocol.messages import LaneTurn
from flowrt.runtime.resource_limits import descriptor_limit, raise_descriptor_limit
from flowrt.transport.lanes.channel import ColumnRun
from flowrt.transport.lanes.gloo import GlooTransport
from flowrt.transport.lanes.lane import LaneSet
from flowrt.transport.lanes.open_lanes import DESCRIPTORS_PER_LANE, most_open_lanes

MOST, PEERS, TURNS = 4, 12, 60
DEADLINE_S = 60.0
HUB = WorkerId("hub")


class Network:
    """A worker with ``MOST`` lanes and its peers, in one process, and the controller's part: order and retirement."""

    def __init__(self) -> None:
        self.lanes = Lanes()
        self.retired = 0
        transports = {"gloo": GlooTransport("127.0.0.1")}
        peers = [f"peer-{index}" for index in range(PEERS)]
        self.sets: dict[str, LaneSet] = {
            name: LaneSet(
                name,
                transports,
                DEADLINE_S,
                self._signal(name),
                most_open=MOST if name == HUB else PEERS,
                ask_to_retire=self._retire,
            )
            for name in (HUB, *peers)
        }

    def _signal(self, own: str) -> Callable[[str, str, str, bytes], None]:
        return lambda peer, lane, key, value: self.sets[peer].deliver(own, lane, key, value)

    def _retire(self, turn: LaneTurn) -> None:
        if self.lanes.retire(turn):
            self.retired += 1
            for end in (turn.sender, turn.receiver):
                asyncio.get_running_loop().call_soon(self.sets[end].retire, turn)

    async def move(self, peer: str, outward: bool, value: int) -> None:
        """Move one tensor between the hub and a peer."""
        sender, receiver = (HUB, WorkerId(peer)) if outward else (WorkerId(peer), HUB)
        turn = self.lanes.next_turn(sender, receiver, "samples")
        row = torch.full((1000,), value)
        sent = self.sets[sender].send(turn, [ColumnRun.of(row)])
        received = self.sets[receiver].receive(turn, [[row.nbytes]])
        (arrived,) = await received
        await sent
        assert torch.equal(arrived.view(torch.int64), row)

    async def close(self) -> None:
        for set_ in self.sets.values():
            await set_.close()


async def test_idle_lanes_make_room_for_others() -> None:
    network = Network()
    chosen = random.Random(0)
    before = len(os.listdir("/proc/self/fd"))
    most = 0
    try:
        for number in range(TURNS):
            await network.move(f"peer-{chosen.randrange(PEERS)}", chosen.random() < 0.5, number)
            most = max(most, len(os.listdir("/proc/self/fd")) - before)
    finally:
        await network.close()
    assert network.retired > PEERS
    assert most <= 4 * MOST  # both ends are in this process; those that are being closed count, too


async def test_more_lanes_at_once_than_may_be_open_take_turns() -> None:
    network = Network()
    try:
        await asyncio.gather(*(network.move(f"peer-{index}", outward=True, value=index) for index in range(PEERS)))
    finally:
        await network.close()
    assert network.retired >= PEERS - MOST


async def test_a_lane_that_gets_no_room_fails_with_the_limit_in_its_error() -> None:
    transports = {"gloo": GlooTransport("127.0.0.1")}
    lanes = LaneSet("a", transports, 1.0, lambda *_: None, most_open=0)
    turn = LaneTurn(sender="a", receiver="b", kind="samples", incarnation=0, sequence=0, transport="gloo")
    with pytest.raises(TransferError, match=r"all 0 lanes that the limit of open files \(\d+\) allows"):
        await lanes.send(turn, [ColumnRun.of(torch.ones(1))])
    await lanes.close()


def test_a_worker_raises_its_soft_limit() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, before[1]))
        assert descriptor_limit() == 256
        assert most_open_lanes() == 256 // 2 // DESCRIPTORS_PER_LANE
        assert raise_descriptor_limit() == resource.getrlimit(resource.RLIMIT_NOFILE)[1] > 256
        assert most_open_lanes() > 256 // 2 // DESCRIPTORS_PER_LANE
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.slow
@pytest.mark.parametrize("limit", [8, pytest.param(50, marks=pytest.mark.long)])
@pytest.mark.parametrize(
    "command",
    [
        ["flowrt", "run", "--run-dir", "run"],
        ["flowrt.launcher.controller_main", "--config", "config.toml"],
        ["flowrt.roles.reward", "--controller", "tcp://127.0.0.1:1", "--connect-timeout-s", "1"],
    ],
)
def test_a_limit_that_cannot_hold_a_process_of_a_run_is_refused_by_name(
    command: list[str], limit: int, tmp_path: Path
) -> None:
    words = shlex.join([sys.executable, "-m", *command])
    ended = subprocess.run(
        ["sh", "-c", f"ulimit -n {limit}; exec {words}"], capture_output=True, text=True, timeout=600, cwd=tmp_path
    )
    assert ended.returncode == 2, ended.stderr
    assert f"is {limit}, and each process of a run needs 64; raise it (ulimit -n" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert not list(tmp_path.iterdir())
