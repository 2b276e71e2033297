"""The servers that a bench measures, each in a process that prints its address and ends when its stdin ends.

python bench/control_plane/servers.py echo --reply HEX         answers every message with these bytes
python bench/control_plane/servers.py stream --run-dir DIR     a controller with one stage that reads rows of one flow
python bench/control_plane/servers.py training --run-dir DIR   a controller of a small training run

With --no-ledger a controller writes no ledger.
"""

import argparse
import asyncio
import cProfile
import logging
import sys
from collections.abc import Coroutine
from dataclasses import dataclass
from pathlib import Path

from common.children import raise_open_files, reply

from flowrt.controller.core import Core
from flowrt.controller.events import AppendLedger
from flowrt.controller.policies.batching import GroupCount
from flowrt.controller.policies.dispatch.base import Fifo
from flowrt.controller.policies.weight_sync import DelayedUpdate
from flowrt.controller.server.server import Server
from flowrt.controller.settings import Dataflow, Policies, Settings
from flowrt.controller.state.controller_restart import Entry
from flowrt.controller.storage.ledger import Ledger
from flowrt.net.link import server_socket
from flowrt.protocol.messages import Stage
from flowrt.runtime.event_loop import serve_loop

ANY_PORT = "tcp://127.0.0.1:0"
LONG_TIMEOUT_S = 3600.0
STREAM = Dataflow((), (Stage("consume", ("value",), ()),), tags=("value",))
TRAINING = Dataflow(
    (),
    (
        Stage("rollout", ("prompt",), ("response",), generates=True),
        Stage("reward", ("response",), ("reward",)),
        Stage("train", ("response", "reward"), (), flow="train", whole_groups=True),
    ),
    "train",
    "train",
    tags=("prompt",),
)


@dataclass(frozen=True, slots=True)
class TwoSteps:
    """Admits the groups of two steps at a time, of any staleness: no trainer here publishes weights."""

    def may_open(self, live_groups: int, groups_per_step: int) -> bool:
        return live_groups < 2 * groups_per_step

    def may_start(self, expected_step: int, version: int) -> bool:  # noqa: ARG002
        return True

    def may_train(self, step: int, oldest_version: int) -> bool:  # noqa: ARG002
        return True


POLICIES = Policies(TwoSteps(), Fifo(), GroupCount(4), DelayedUpdate())


class NoLedger(Ledger):
    """A ledger that discards its records."""

    def add(self, record: AppendLedger, at_s: float) -> None:
        pass

    def append_restart_log(self, entry: Entry) -> None:
        pass


async def echo(answer: bytes) -> None:
    """Answer every message with ``answer``: flowrt's server socket without codec and core."""
    raw = server_socket()
    send = raw.send
    address = raw.bind(ANY_PORT)
    raw.start(lambda frames: send([frames[0], answer]))
    reply(address)
    await input_ended()
    raw.close()


async def serve(flow: Dataflow, settings: Settings, run_dir: Path, ledger: bool) -> None:
    kept = (Ledger if ledger else NoLedger)(run_dir / "ledger.sqlite")
    core = Core(settings, flow, POLICIES)
    server = Server(core, "", run_dir, heartbeat_s=1.0, request_timeout_s=LONG_TIMEOUT_S, ledger=kept)
    address = server.bind(ANY_PORT)
    async with server.running():
        reply(address)
        await input_ended()


async def input_ended() -> None:
    """Wait until the parent of this process closes its input."""
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    loop.add_reader(sys.stdin, ended.set)
    await ended.wait()
    loop.remove_reader(sys.stdin)


def long_timeouts(**numbers: int) -> Settings:
    """Settings under which no worker counts as dead because the machine is busy."""
    return Settings(
        **numbers,  # type: ignore[arg-type]
        budget_rows=10_000_000,
        lease_s=LONG_TIMEOUT_S,
        worker_timeout_s=LONG_TIMEOUT_S,
        no_progress_timeout_s=LONG_TIMEOUT_S,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("role", choices=("echo", "stream", "training"))
    parser.add_argument("--run-dir", type=Path)
    parser.add_argument("--reply", type=bytes.fromhex, default=b"")
    parser.add_argument("--sources", type=int, default=1)
    parser.add_argument("--steps", type=int, default=1)
    parser.add_argument("--groups", type=int, default=1, help="groups a step")
    parser.add_argument("--no-ledger", action="store_true")
    parser.add_argument("--profile", type=Path, help="write a cProfile here")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.ERROR)
    raise_open_files()
    work: Coroutine[None, None, None]
    if arguments.role == "echo":
        work = echo(arguments.reply)
    elif arguments.role == "stream":
        work = serve(STREAM, long_timeouts(sources=arguments.sources), arguments.run_dir, not arguments.no_ledger)
    else:
        settings = long_timeouts(steps=arguments.steps, groups_per_step=arguments.groups)
        work = serve(TRAINING, settings, arguments.run_dir, not arguments.no_ledger)
    if arguments.profile is None:
        serve_loop(work)
        return
    profile = cProfile.Profile()
    profile.runcall(serve_loop, work)
    profile.dump_stats(arguments.profile)


if __name__ == "__main__":
    main()
