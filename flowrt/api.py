"""The public surface for loops and engines of your own: bring what is yours, keep the rest.

`examples/custom_loop.py` is a loop with a dataflow of its own; `examples/custom_trainer.py` and `custom_rollout.py`
are engines of their own in a GRPO run. Everything named in ``__all__`` is stable; what it is built from is not.
"""

import asyncio
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

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
from flowrt.controller.refresh import Divergence, EveryN, Rolling
from flowrt.controller.server import Server
from flowrt.controller.settings import Dataflow, LostMember, Policies, Settings
from flowrt.controller.sharing import Balanced, OnDemand, Sharing
from flowrt.controller.sticky import Sticky
from flowrt.controller.tail import TailLanes
from flowrt.controller.versions import DelayedUpdate, Refresh
from flowrt.engines.checkpoint import load_model, load_tokenizer
from flowrt.engines.protocols import Interrupt, Prompt, Response, RolloutEngine, TrainEngine, TrainingBatch
from flowrt.engines.scoring import response_logprobs
from flowrt.errors import FlowError, Stopped
from flowrt.recipes import grpo
from flowrt.recipes.config import RunConfig
from flowrt.recipes.load import parse, to_toml
from flowrt.recipes.paths import model_dir
from flowrt.transport.rows import Packed
from flowrt.transport.weights import Snapshot
from flowrt.wire.keys import controller_keys, worker_keys
from flowrt.wire.loops import run_loop, serve_loop
from flowrt.wire.records import Column, Stage
from flowrt.workers import entry, prepare, reference, reward, rollout, source, trainer
from flowrt.workers.engines import rollout_engine, train_engine

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
    "Interrupt",
    "LostMember",
    "OnDemand",
    "Packed",
    "Policies",
    "Priority",
    "Prompt",
    "Refresh",
    "Response",
    "Rolling",
    "RolloutEngine",
    "Rows",
    "RunConfig",
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
    "TrainEngine",
    "TrainingBatch",
    "connect",
    "controller",
    "load_model",
    "load_tokenizer",
    "model_dir",
    "parse",
    "pull_between",
    "response_logprobs",
    "rollout_engine",
    "rollout_worker",
    "run_loop",
    "run_recipe",
    "run_roles",
    "serve_loop",
    "stream",
    "train_engine",
    "trainer_worker",
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
            await _play_all(server, address, roles)


async def _play_all(server: Server, address: str, roles: Mapping[str, Role]) -> None:
    async with asyncio.TaskGroup() as group:
        for name, role in roles.items():
            group.create_task(_play(await connect(address, name, name, JOIN_S), role))
    ended = server.ended
    if ended is not None and ended.code != 0:
        raise Stopped(ended.reason, ended.code)


async def run_recipe(
    config: RunConfig,
    *,
    rollout_engine: Callable[[RunConfig], RolloutEngine] = rollout_engine,
    train_engine: Callable[[RunConfig], TrainEngine] = train_engine,
) -> dict[str, Any]:
    """GRPO on a recipe's problems in this process, with the engines that these functions make; returns the summary.

    ``config`` is what `parse` makes of command-line flags and must name a ``run_dir``; one rollout worker and one
    trainer are started. The embedded model is built first where no other is named.
    """

    async def generate(session: Session) -> None:
        await rollout.generate(session, config, await asyncio.to_thread(rollout_engine, config))

    async def train(session: Session) -> None:
        await trainer.train(session, config, await asyncio.to_thread(train_engine, config))

    roles: dict[str, Role] = {
        "source": lambda session: source.run(session, config),
        "rollout": generate,
        "reward": lambda session: reward.run(session, config),
        "trainer": train,
    }
    if config.loss.kl_coef > 0:
        roles["reference"] = lambda session: reference.run(session, config)
    await asyncio.to_thread(_begin, config)
    made = grpo.dataflow(config), grpo.settings(config), grpo.policies(config)
    async with controller(*made, Path(config.run_dir), config=to_toml(config)) as (server, address):
        await _play_all(server, address, roles)
        return server.summary(config.staleness)


def _begin(config: RunConfig) -> None:
    Path(config.run_dir).mkdir(mode=0o700, parents=True, exist_ok=True)
    if not config.model:
        prepare.prepare(config)


def trainer_worker(make: Callable[[RunConfig], TrainEngine]) -> None:
    """The trainer's command (``--controller tcp://HOST:PORT``) with your engine, also for torchrun; never returns."""

    async def role(session: Session, config: RunConfig) -> None:
        await trainer.train(session, config, await asyncio.to_thread(make, config))

    entry.main("trainer", role)


def rollout_worker(make: Callable[[RunConfig], RolloutEngine]) -> None:
    """A rollout worker's command (``--controller tcp://HOST:PORT``) with your engine; never returns."""

    async def role(session: Session, config: RunConfig) -> None:
        await rollout.generate(session, config, await asyncio.to_thread(make, config))

    entry.main("rollout", role)


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
