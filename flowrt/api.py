"""The public API for loops of your own: a dataflow, policies and roles on the runtime.

- `examples/custom_loop.py` is a complete loop; `flowrt.grpo` is the API for engines of your own in a GRPO run.
- Every name in ``__all__`` is stable; the modules that it comes from are not.
- A mistake in a dataflow or its settings raises ConfigError before anything starts.
"""

import asyncio
import functools
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

from flowrt.client.sample_tensors import Batch
from flowrt.client.session import Session, connect
from flowrt.client.streams import StageOutput, pull_between, run_stage, stream
from flowrt.client.torch_dataset import StreamDataset
from flowrt.controller.core import Core
from flowrt.controller.policies.admission import Admission, StrictLag
from flowrt.controller.policies.batching import Batcher, FixedTokens, GroupCount, SampleCount, TokenBudget
from flowrt.controller.policies.curriculum import Curriculum, EveryPrompt, SolveRate
from flowrt.controller.policies.dispatch.base import Dispatch, Fifo
from flowrt.controller.policies.dispatch.length_aware import DecodeCost, LengthAware
from flowrt.controller.policies.dispatch.priority import Priority
from flowrt.controller.policies.group_filter import AllOf, GroupFilter, KeepAll, RewardBand, ZeroVariance
from flowrt.controller.policies.rank_balancing import Balanced, OnDemand, RankBalancing
from flowrt.controller.policies.weight_sync import DelayedUpdate, Divergence, EveryN, Rolling, WeightSyncPolicy
from flowrt.controller.server.server import DEFAULT_OBSERVABILITY, Observability, Server
from flowrt.controller.settings import Dataflow, OnLostSample, Policies, Settings
from flowrt.controller.storage.sample_store import SampleStore
from flowrt.errors import EXIT_DISMISSED, EXIT_STALLED, ConfigError, FlowError, Stopped, suggested
from flowrt.net.curve_keys import controller_keys, worker_keys
from flowrt.protocol.messages import Column, Stage
from flowrt.runtime.event_loop import run_loop, serve_loop
from flowrt.runtime.waits import pause
from flowrt.transport.tensor_store import Packed
from flowrt.transport.weights.snapshot import Snapshot

__all__ = [
    "Admission",
    "AllOf",
    "Balanced",
    "Batch",
    "Batcher",
    "Column",
    "Curriculum",
    "Dataflow",
    "DecodeCost",
    "DelayedUpdate",
    "Dispatch",
    "Divergence",
    "EveryN",
    "EveryPrompt",
    "Fifo",
    "FixedTokens",
    "FlowError",
    "GroupCount",
    "GroupFilter",
    "KeepAll",
    "LengthAware",
    "Observability",
    "OnDemand",
    "OnLostSample",
    "Packed",
    "Policies",
    "Priority",
    "RankBalancing",
    "RewardBand",
    "Rolling",
    "SampleCount",
    "SampleStore",
    "Server",
    "Session",
    "Settings",
    "Snapshot",
    "SolveRate",
    "Stage",
    "StageOutput",
    "Stopped",
    "StreamDataset",
    "StrictLag",
    "TokenBudget",
    "WeightSyncPolicy",
    "ZeroVariance",
    "check_roles",
    "connect",
    "controller",
    "play_all",
    "pull_between",
    "run_loop",
    "run_roles",
    "run_stage",
    "serve_loop",
    "stream",
    "worker_keys",
]

JOIN_S = 10.0
DEADLOCK_S = 5.0
"""Seconds without progress after which a run in this process ends, if all of its roles wait for each other."""
DEADLOCK_POLL_S = 0.5


Role = Callable[[Session], Awaitable[None]]
"""The coroutine function of a role; it gets its worker's session. Completing roles call `Session.finished` in it."""


@asynccontextmanager
async def controller(
    flow: Dataflow,
    settings: Settings,
    policies: Policies,
    run_dir: Path,
    address: str = "tcp://127.0.0.1:0",
    config: str = "",
    keys: Path | None = None,
    observability: Observability = DEFAULT_OBSERVABILITY,
) -> AsyncIterator[tuple[Server, str]]:
    """Run a controller on this event loop; yields the server and the address that workers connect to, tcp://HOST:PORT.

    Leaving the block ends the run and waits until its workers have left.

    Args:
        flow: columns and stages.
        settings: sizes, roles and timeouts.
        policies: one policy for each decision of the controller.
        run_dir: an existing directory for the ledger and the metrics.
        address: address to listen on, tcp://HOST:PORT; port 0: any free port.
        config: text that every worker receives as `Session.welcome.config`.
        keys: a directory written by ``flowrt keys``; None: only loopback addresses are allowed.
        observability: what is kept of the run beyond ledger, metrics, events and attribution.

    Raises:
        ConfigError: the address is in use, or the keys cannot be read.
    """
    core = Core(settings, flow, policies)
    server_keys = None if keys is None else controller_keys(keys)
    server = Server(
        core=core,
        config=config,
        run_dir=run_dir,
        heartbeat_s=1.0,
        request_timeout_s=600.0,
        keys=server_keys,
        observability=observability,
    )
    try:
        bound = server.bind(address)
    except FlowError:
        server.close()
        raise
    async with server.running():
        yield server, bound


async def run_roles(flow: Dataflow, settings: Settings, policies: Policies, roles: Mapping[str, Role]) -> None:
    """Run a controller and all roles in this process, each with a session of its own, until the run is complete.

    Args:
        flow: columns and stages.
        settings: sizes, roles and timeouts.
        policies: one policy for each decision of the controller.
        roles: the coroutine function of each role, by name.

    Raises:
        ConfigError: the settings name a role that is not in ``roles``; nothing was started.
        Stopped: the run ended with an exit code other than 0, for example because all roles wait for each other
            (a role is missing, or has not called `Session.finished`).
        Exception: the first exception of a role, as it was raised.
    """
    check_roles(settings, roles)
    with tempfile.TemporaryDirectory(prefix="flowrt-") as run_dir:
        async with controller(flow, settings, policies, Path(run_dir)) as (server, address):
            await _play_all(server, address, roles, detect_deadlock=True)


def check_roles(settings: Settings, roles: Collection[str]) -> None:
    """Raise ConfigError if the settings name a role that is not in ``roles``."""
    for name in ("completing_roles", "critical_roles", "replaceable_roles", "checkpointing_roles"):
        for role in getattr(settings, name):
            if role not in roles:
                raise ConfigError(f"Settings.{name} names {role!r}, which is no role{suggested(role, roles)}")


async def play_all(server: Server, address: str, roles: Mapping[str, Role]) -> None:
    """Run each role with a session of its own until the run of this controller is complete.

    Workers of other processes may join the run. If a required worker does not join, the roles wait as long as the
    timeouts of `Settings` allow.

    Args:
        server: yielded by `controller`.
        address: yielded by `controller`.
        roles: the coroutine function of each role, by name.

    Raises:
        Stopped: the run ended with an exit code other than 0.
        Exception: the first exception of a role, as it was raised.
    """
    await _play_all(server, address, roles, detect_deadlock=False)


async def _play_all(server: Server, address: str, roles: Mapping[str, Role], detect_deadlock: bool) -> None:
    """`play_all`; ``detect_deadlock``: end the run if these roles wait for each other, as no other worker will join."""
    returned: set[str] = set()
    try:
        async with asyncio.TaskGroup() as group:
            for name, role in roles.items():
                session = await connect(address, name, name, JOIN_S)
                group.create_task(_play(session, role, functools.partial(returned.add, name)))
            if detect_deadlock:
                group.create_task(_end_deadlock(server, returned))
    except BaseExceptionGroup as several:
        raise _first(several) from None  # the other exceptions follow from the first
    ended = server.ended
    if ended is not None and ended.code != 0:
        raise Stopped(ended.reason, ended.code)


async def _end_deadlock(server: Server, returned: Collection[str]) -> None:
    """End the run once it is deadlocked; returns when the run has ended. ``returned``: names of completed roles."""
    while server.ended is None:
        await pause(DEADLOCK_POLL_S)
        if why := server.deadlock(returned, DEADLOCK_S):
            server.end(why, EXIT_STALLED)


def _first(error: BaseException) -> BaseException:
    """The first error in a nested group that is not `Stopped`; a `Stopped` if there is no other error."""
    while isinstance(error, BaseExceptionGroup):
        others = error.split(Stopped)[1]
        error = (others or error).exceptions[0]
    return error


async def _play(session: Session, role: Role, when_returned: Callable[[], None]) -> None:
    error = ""
    try:
        await role(session)
        when_returned()
        await session.wait_stopped()
    except Stopped as stopped:
        if stopped.code == EXIT_DISMISSED:  # only this worker was stopped, not the run
            error = stopped.reason
            raise
    except BaseExceptionGroup as several:
        if several.split(Stopped)[1] is not None:
            raise
    except FlowError as raised:
        error = str(raised)
        raise
    finally:
        await session.close(error)
