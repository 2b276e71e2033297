"""The public surface for loops and engines of your own: bring what is yours, keep the rest.

`examples/custom_loop.py` is a loop with a dataflow of its own. For engines of your own in a GRPO run: `flowrt.grpo`.
Everything named in ``__all__`` is stable; what it is built from is not.
"""

import asyncio
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

from flowrt.client.batches import Batch
from flowrt.client.dataset import StreamDataset
from flowrt.client.greeting import connect
from flowrt.client.session import Session
from flowrt.client.stream import stream
from flowrt.client.swapping import pull_between
from flowrt.controller.admission import Admission, StrictLag
from flowrt.controller.batchers import Batcher, FixedTokens, GroupCount, Rows, TokenBudget
from flowrt.controller.core import Core
from flowrt.controller.decode_cost import DecodeCost
from flowrt.controller.dispatch import Dispatch, Fifo
from flowrt.controller.priority import Priority
from flowrt.controller.refresh import DelayedUpdate, Divergence, EveryN, Refresh, Rolling
from flowrt.controller.server import Server
from flowrt.controller.settings import Dataflow, LostMember, Policies, Settings
from flowrt.controller.sharing import Balanced, OnDemand, Sharing
from flowrt.controller.sticky import Sticky
from flowrt.controller.tail import TailLanes
from flowrt.errors import FlowError, Stopped
from flowrt.transport.rows import Packed
from flowrt.transport.weights import Snapshot
from flowrt.wire.keys import controller_keys, worker_keys
from flowrt.wire.loops import run_loop, serve_loop
from flowrt.wire.records import Column, Stage

__all__ = [
    "Admission",
    "Balanced",
    "Batch",
    "Batcher",
    "Column",
    "Dataflow",
    "DecodeCost",
    "DelayedUpdate",
    "Dispatch",
    "Divergence",
    "EveryN",
    "Fifo",
    "FixedTokens",
    "FlowError",
    "GroupCount",
    "LostMember",
    "OnDemand",
    "Packed",
    "Policies",
    "Priority",
    "Refresh",
    "Rolling",
    "Rows",
    "Server",
    "Session",
    "Settings",
    "Sharing",
    "Snapshot",
    "Stage",
    "Sticky",
    "Stopped",
    "StreamDataset",
    "StrictLag",
    "TailLanes",
    "TokenBudget",
    "connect",
    "controller",
    "play_all",
    "pull_between",
    "run_loop",
    "run_roles",
    "serve_loop",
    "stream",
    "worker_keys",
]

JOIN_S = 10.0


Role = Callable[[Session], Awaitable[None]]


@asynccontextmanager
async def controller(
    flow: Dataflow,
    settings: Settings,
    policies: Policies,
    run_dir: Path,
    address: str = "tcp://127.0.0.1:0",
    config: str = "",
    keys: Path | None = None,
) -> AsyncIterator[tuple[Server, str]]:
    """A controller on this event loop; gives the server and the address that workers connect to.

    ``config`` is handed to every worker as `Session.welcome.config`. The ledger and metrics go to ``run_dir``, which
    must exist. Leaving the block ends the run and waits until its workers have gone. ``keys`` is a directory that
    ``flowrt keys`` made; without one only this machine is listened to. Raises ConfigError when the address is taken.
    """
    core, known = Core(settings, flow, policies), None if keys is None else controller_keys(keys)
    server = Server(core, flow.columns, config, run_dir, heartbeat_s=1.0, wait_s=600.0, keys=known)
    bound = server.bind(address)
    async with server.running():
        yield server, bound


async def run_roles(flow: Dataflow, settings: Settings, policies: Policies, roles: Mapping[str, Role]) -> None:
    """A whole run in this process: a controller, and each role with a session of its own, until the run is complete.

    Raises what the first failing role raised, or Stopped when the run ended with another exit code than 0.
    """
    with tempfile.TemporaryDirectory(prefix="flowrt-") as run_dir:
        async with controller(flow, settings, policies, Path(run_dir)) as (server, address):
            await play_all(server, address, roles)


async def play_all(server: Server, address: str, roles: Mapping[str, Role]) -> None:
    """Each role with a session of its own, until the run of this controller is complete; raises as `run_roles` does."""
    async with asyncio.TaskGroup() as group:
        for name, role in roles.items():
            group.create_task(_play(await connect(address, name, name, JOIN_S), role))
    ended = server.ended
    if ended is not None and ended.code != 0:
        raise Stopped(ended.reason, ended.code)


async def _play(session: Session, role: Role) -> None:
    error = ""
    try:
        await role(session)
        await session.wait_stopped()
    except Stopped:
        return
    except BaseExceptionGroup as several:
        if several.split(Stopped)[1] is not None:
            raise
    except FlowError as raised:
        error = str(raised)
        raise
    finally:
        await session.close(error)
