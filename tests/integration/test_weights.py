"""Weight transfers between real processes: relay chains, killed and hung relays, corrupted bytes, eviction."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest

from flowrt.api import Dataflow, DelayedUpdate, Fifo, GroupCount, Policies, Settings, StrictLag, controller
from tests.integration.helpers import weight_peer
from tests.integration.helpers.forked import CONTEXT

POLICY, ADAPTERS = "policy", "adapters"
SIZE = 8 * 1024 * 1024
PIECES_SENT = 10  # of 32: within a transfer
ANSWER_S = 20.0
POLL_INTERVAL_S = 0.02


class Process:
    """A process of `weight_peer` and the pipe to it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._pipe, end = CONTEXT.Pipe()
        self._process = CONTEXT.Process(target=weight_peer.run_peer, args=(end,), name=name, daemon=True)
        self._process.start()
        end.close()

    async def ask(self, command: str, **values: Any) -> Any:
        self._pipe.send((command, values))
        return await asyncio.to_thread(self._answer, command)

    def _answer(self, command: str) -> Any:
        assert self._pipe.poll(ANSWER_S), f"{self.name} did not answer {command}"
        return self._pipe.recv()

    async def versions(self, model: str = POLICY) -> list[int]:
        """The versions used so far; each must have had the right contents."""
        used = []
        for name, version, contents in (await self.ask("state"))["used"]:
            assert contents == expected(name, version)
            used += [version] if name == model else []
        return used

    def signal(self, number: signal.Signals) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def end(self) -> None:
        self._process.kill()
        self._process.join(10.0)


SIZES = {POLICY: SIZE, ADAPTERS: 100_001}


@cache
def expected(model: str, version: int) -> str:
    """The digest of a version."""
    return weight_peer.digest(weight_peer.content(model, version, SIZES[model]).values())


class Team:
    """A trainer and receivers in the order in which they joined, which is the order of the chain."""

    def __init__(self, address: str, deadline_s: float, models: tuple[str, ...]) -> None:
        self._address = address
        self._deadline_s = deadline_s
        self._models = models
        self.trainer = Process("trainer")
        self.receivers: list[Process] = []

    async def start(self, receivers: int) -> None:
        started = [Process(f"receiver{number}") for number in range(receivers)]
        self.receivers += started
        for process in (self.trainer, *started):
            await self.join(process)

    async def join(self, process: Process) -> None:
        sizes = {model: SIZES[model] for model in self._models}
        await process.ask(
            "join",
            address=self._address,
            name=process.name,
            deadline_s=self._deadline_s,
            sizes=sizes,
            receives=process is not self.trainer,
        )

    async def restart_trainer(self) -> None:
        """Start another process under the name of the killed one."""
        self.trainer.end()
        self.trainer = Process("trainer")
        await self.join(self.trainer)

    async def add_receiver(self) -> Process:
        """Start another receiver."""
        receiver = Process(f"receiver{len(self.receivers)}")
        self.receivers.append(receiver)
        await self.join(receiver)
        return receiver

    async def publish(self, version: int, model: str = POLICY) -> None:
        await self.trainer.ask("publish", model=model, version=version)

    async def sent(self, process: Process) -> float:
        """Number of copies of the policy that a process has sent."""
        return float((await process.ask("state"))["sent"] / SIZE)

    async def all_use(self, version: int, *others: Process, model: str = POLICY, within_s: float = 15.0) -> None:
        """Wait until every receiver uses this version (or each of ``others``, if given)."""
        for other in others or self.receivers:
            await wait_until(partial(self._uses, other, version, model), f"{other.name} at {model} {version}", within_s)

    async def _uses(self, process: Process, version: int, model: str) -> bool:
        return version in (await process.versions(model))

    async def publish_halfway(self, version: int) -> None:
        """Publish; return when every receiver has the first chunks and the transfers are held."""
        await self.trainer.ask("limit", pieces=PIECES_SENT)
        await self.publish(version)
        for receiver in self.receivers:
            await wait_until(partial(self._has_pieces, receiver), f"{receiver.name} halfway")

    async def _has_pieces(self, process: Process) -> bool:
        return bool((await process.ask("state"))["arrived"] == PIECES_SENT)

    async def release_transfers(self) -> None:
        await self.trainer.ask("limit", pieces=None)


async def wait_until(condition: Callable[[], Any], what: str, within_s: float = 15.0) -> None:
    try:
        async with asyncio.timeout(within_s):
            while not await condition():  # noqa: ASYNC110 (the state is in other processes)
                await asyncio.sleep(POLL_INTERVAL_S)
    except TimeoutError:
        pytest.fail(f"not {what} within {within_s:.0f} s")


@asynccontextmanager
async def team(
    run_dir: Path, receivers: int, deadline_s: float = 20.0, models: tuple[str, ...] = (POLICY,)
) -> AsyncIterator[Team]:
    settings = Settings(model=models[0], more_models=models[1:])
    policies = Policies(StrictLag(1), Fifo(), GroupCount(1), DelayedUpdate())
    async with controller(Dataflow((), ()), settings, policies, run_dir) as (_, address):
        group = Team(address, deadline_s, models)
        try:
            await group.start(receivers)
            yield group
        finally:
            for process in (group.trainer, *group.receivers):
                process.end()


async def test_relay_chain_is_exact_and_the_trainer_sends_once(tmp_path: Path) -> None:
    async with team(tmp_path, 4) as group:
        await group.publish(1)
        await group.all_use(1)
        assert [await group.sent(process) for process in (group.trainer, *group.receivers)] == [1, 1, 1, 1, 0]
        late = await group.add_receiver()
        await group.all_use(1, late)
        assert await group.sent(group.trainer) == 1, "a late joiner is served by a neighbour"
        await group.publish(2)
        await group.all_use(2)
        assert await group.sent(group.trainer) == 2
        for receiver in group.receivers:
            assert await receiver.versions() == [1, 2]


async def test_old_versions_are_evicted_everywhere(tmp_path: Path) -> None:
    async with team(tmp_path, 3) as group:
        for version in range(1, 6):
            await group.publish(version)
            await group.all_use(version)
        await wait_until(lambda: holds_only(group.trainer, 5), "trainer free of old versions")
        assert await group.trainer.ask("memory") <= 1.01 * SIZE
        for receiver in group.receivers:
            await wait_until(partial(holds_only, receiver, 5), f"{receiver.name} free of old versions")
            # The version that it holds for other workers, and its own parameters.
            assert await receiver.ask("memory") <= 2.01 * SIZE


async def holds_only(process: Process, version: int) -> bool:
    return bool((await process.ask("state"))["held"] == [(POLICY, version, -1)])


async def test_killed_relay_stops_no_other_worker(tmp_path: Path) -> None:
    async with team(tmp_path, 4) as group:
        await group.publish_halfway(1)
        first, second, *behind = group.receivers
        second.signal(signal.SIGKILL)
        await group.release_transfers()
        await group.all_use(1, first, *behind)
        # At most two chains: receivers behind the killed relay serve each other.
        assert await group.sent(group.trainer) <= 2


async def test_trainer_killed_during_publication_leaves_the_previous_version(tmp_path: Path) -> None:
    async with team(tmp_path, 2) as group:
        await group.publish(1)
        await group.all_use(1)
        await group.publish_halfway(2)
        group.trainer.signal(signal.SIGKILL)
        for receiver in group.receivers:
            await wait_until(partial(holds_only, receiver, 1), f"{receiver.name} free of the partial version")
            assert await receiver.versions() == [1]
        late = await group.add_receiver()
        await group.all_use(1, late)  # from a neighbour: no worker has a later version
        await group.restart_trainer()
        await group.publish(3)
        await group.all_use(3)
        for receiver in group.receivers:
            await wait_until(partial(holds_only, receiver, 3), f"{receiver.name} free of old versions")
            assert await receiver.versions() == [1, 3]


async def test_hung_relay_is_replaced_within_the_lane_deadline(tmp_path: Path) -> None:
    async with team(tmp_path, 4, deadline_s=2.0) as group:
        await group.publish_halfway(1)
        first, second, *behind = group.receivers
        second.signal(signal.SIGSTOP)
        await group.release_transfers()
        await group.all_use(1, first, *behind, within_s=8.0)
        assert await group.sent(group.trainer) <= 3
        await group.publish(2)
        await group.all_use(2, first, *behind)


async def test_versions_published_too_fast_are_skipped(tmp_path: Path) -> None:
    async with team(tmp_path, 3) as group:
        await group.publish_halfway(1)
        await group.publish(2)
        await group.publish(3)
        await group.release_transfers()
        await group.all_use(3)
        for receiver in group.receivers:
            assert await receiver.versions() == [1, 3]
            await wait_until(partial(holds_only, receiver, 3), f"{receiver.name} free of old versions")


async def test_corrupted_transfer_keeps_the_old_version_and_is_retried(tmp_path: Path) -> None:
    async with team(tmp_path, 3) as group:
        await group.publish(1)
        await group.all_use(1)
        await group.receivers[0].ask("spoil", pieces=1)
        await group.publish(2)
        await group.all_use(2)
        # `versions` has compared every byte; the receivers behind the corrupted link had to fetch twice.
        assert [await receiver.versions() for receiver in group.receivers] == [[1, 2]] * 3
        assert [(await receiver.ask("state"))["fetches"] for receiver in group.receivers] == [2, 3, 3]


async def test_named_models_have_separate_versions(tmp_path: Path) -> None:
    async with team(tmp_path, 2, models=(POLICY, ADAPTERS)) as group:
        await group.publish(5, ADAPTERS)
        await group.all_use(5, model=ADAPTERS)
        await group.publish(1)
        await group.publish(6, ADAPTERS)
        await group.all_use(1)
        await group.all_use(6, model=ADAPTERS)
        for receiver in group.receivers:
            assert (await receiver.versions(), await receiver.versions(ADAPTERS)) == ([1], [5, 6])
