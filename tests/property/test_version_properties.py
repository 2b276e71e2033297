"""Properties of weight versions and fetch chains under any order of messages, failures and deaths of workers."""

from collections import Counter
from dataclasses import dataclass, field

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from flowrt.controller.core import HANDLERS
from flowrt.controller.events import AppendRestartLog, LogEvent, Send
from flowrt.controller.policies.admission import StrictLag
from flowrt.controller.policies.batching import TokenBudget
from flowrt.controller.policies.dispatch.base import Fifo
from flowrt.controller.policies.weight_sync import DelayedUpdate
from flowrt.controller.settings import Policies, Settings
from flowrt.controller.state.state import Environment, State
from flowrt.controller.state.weights import MAX_BACK_OFF_S
from flowrt.controller.transitions.weight_sync import order_fetches
from flowrt.ids import WorkerId
from flowrt.protocol import messages as m
from flowrt.protocol.messages import NO_BASE, LaneTurn, Weights
from tests.effort import examples
from tests.simulation.scenario import grpo_dataflow

MODEL = "policy"
TRAINER = WorkerId("trainer")
NAMES = [WorkerId(f"rollout{number}") for number in range(5)]


@dataclass(eq=False)
class Transfer:
    """A version in flight. It can complete once ``upstream`` has; None: the holder has the whole version.

    ``broken``: its lane has failed.
    """

    fetch: m.ReceiveWeights
    upstream: "Transfer | None"
    whole: bool = False
    broken: bool = False

    @property
    def receiver(self) -> WorkerId:
        return WorkerId(self.fetch.turn.receiver)

    @property
    def holder(self) -> WorkerId:
        return WorkerId(self.fetch.turn.sender)

    @property
    def can_complete(self) -> bool:
        return not self.broken and (self.upstream is None or self.upstream.whole)


@dataclass
class World:
    """The state of the workers, which the controller may not know yet."""

    whole: dict[WorkerId, set[int]] = field(default_factory=dict)  # versions in the memory of each live worker
    newest: dict[WorkerId, int] = field(default_factory=dict)
    latest_transfer: dict[tuple[WorkerId, int], Transfer] = field(default_factory=dict)
    moving: list[Transfer] = field(default_factory=list)  # neither end of it has been reported
    kept: dict[WorkerId, Transfer] = field(default_factory=dict)  # failed, and the receiver has a part of it


class WeightVersions(RuleBasedStateMachine):
    """State machine of workers that follow the protocol, with every fault that they may have."""

    @initialize()
    def begin(self) -> None:
        policies = Policies(StrictLag(0), Fifo(), TokenBudget(1), DelayedUpdate())
        self.env = Environment(Settings(model=MODEL), grpo_dataflow(False), policies)
        self.state = State.of(self.env, 1)
        for name in [*NAMES, TRAINER]:
            self.state.membership.join(name, name.rstrip("0123456789"), "host", 0.0)
        self.versions = self.state.models.policy
        self.world = World(whole={TRAINER: set()})
        self.now, self.failed = 0.0, Counter[WorkerId]()  # of each receiver, since its last complete fetch
        self.version = 0
        for name in NAMES[:3]:
            self.join(name)

    # ---- rules

    @rule(name=st.sampled_from(NAMES))
    def join(self, name: WorkerId) -> None:
        if name not in self.world.newest:
            self.world.whole[name], self.world.newest[name] = set(), 0
            self.report(name, m.WeightsActivated(MODEL, 0))

    @rule()
    @precondition(lambda self: TRAINER not in self.world.whole)
    def restart_trainer(self) -> None:
        self.world.whole[TRAINER] = set()

    @rule()
    @precondition(lambda self: TRAINER in self.world.whole)
    def publish(self) -> None:
        self.version += 1
        self.world.whole[TRAINER].add(self.version)
        self.report(
            TRAINER,
            m.Publish((Weights(model=MODEL, version=self.version, base=NO_BASE, bucket_bytes=(8,), checksum=1),), ()),
        )

    @rule(data=st.data())
    @precondition(lambda self: any(transfer.can_complete for transfer in self.world.moving))
    def arrive(self, data: st.DataObject) -> None:
        self.complete(data.draw(st.sampled_from([transfer for transfer in self.world.moving if transfer.can_complete])))

    @rule(data=st.data())
    @precondition(lambda self: self.world.moving)
    def fail(self, data: st.DataObject) -> None:
        """A lane breaks, or the checksum differs; without a part that is kept, the receivers behind it fail later."""
        self.fail_fetch(data.draw(st.sampled_from(self.world.moving)), kept=data.draw(st.booleans()))

    @rule(name=st.sampled_from([*NAMES, TRAINER]), late=st.booleans())
    def die(self, name: WorkerId, late: bool = False) -> None:
        """``late``: it had completed its transfers, which the receivers have not reported yet."""
        if name not in self.world.whole:
            return
        del self.world.whole[name]
        self.world.newest.pop(name, None)
        self.failed[name] = 0
        for transfer in [
            candidate for candidate in self.world.moving if name in (candidate.holder, candidate.receiver)
        ]:
            if not (late and transfer.can_complete and transfer.holder == name):
                transfer.broken = True
            if transfer.receiver == name:
                self.world.moving.remove(transfer)
                self.break_below(transfer)
        if (kept := self.world.kept.pop(name, None)) is not None:
            self.break_below(kept)
        self.state.models.forget(name)
        self.execute_orders()

    @rule(name=st.sampled_from(NAMES))
    def swap(self, name: WorkerId) -> None:
        if name in self.world.newest:
            self.report(name, m.WeightsActivated(MODEL, self.world.newest[name]))

    @rule()
    def time_passes(self) -> None:
        """After the longest back-off every live worker is ordered to fetch, whatever has failed before."""
        self.now += MAX_BACK_OFF_S
        self.execute_orders()
        assert not self.idle()

    # ---- steps of the rules

    def complete(self, transfer: Transfer) -> None:
        self.world.moving.remove(transfer)
        transfer.whole = True
        version = transfer.fetch.weights.version
        self.world.whole[transfer.receiver].add(version)
        self.world.newest[transfer.receiver] = max(version, self.world.newest[transfer.receiver])
        self.failed[transfer.receiver] = 0
        self.report(transfer.receiver, m.WeightsStaged(MODEL, version))

    def fail_fetch(self, transfer: Transfer, *, kept: bool = False) -> None:
        self.world.moving.remove(transfer)
        if kept:
            self.world.kept[transfer.receiver] = transfer
        else:
            self.break_below(transfer)
        self.failed[transfer.receiver] += 1
        fetch = transfer.fetch
        self.report(transfer.receiver, m.FetchFailed(fetch.turn, fetch.weights, "the lane broke", int(kept)))

    def break_below(self, transfer: Transfer) -> None:
        for other in self.world.moving:
            other.broken = other.broken or other.upstream is transfer

    def report(
        self, worker: WorkerId, message: m.Publish | m.WeightsStaged | m.FetchFailed | m.WeightsActivated
    ) -> None:
        commands = HANDLERS[type(message)](self.state, self.env, worker, message, self.now)
        # Restart entries are for a restarted controller.
        assert all(isinstance(command, AppendRestartLog | LogEvent) for command in commands)
        self.execute_orders()

    def execute_orders(self) -> None:
        for command in order_fetches(self.state, self.env, self.now):
            assert isinstance(command, Send)
            match command.message:
                case m.ReceiveWeights():
                    self.begin_transfer(command.message)
                case m.SendWeights(turn, _, version, _, _):
                    self.assert_can_serve(command.worker, turn, version)
                case m.EvictVersion(_, version):
                    self.evict(command.worker, version)

    def begin_transfer(self, fetch: m.ReceiveWeights) -> None:
        receiver, holder = WorkerId(fetch.turn.receiver), WorkerId(fetch.turn.sender)
        version = fetch.weights.version
        assert receiver in self.world.whole, f"{receiver} is gone, but has to fetch"
        assert version == self.newest_alive(), f"{receiver} has to fetch {version}, the latest is {self.newest_alive()}"
        upstream = None
        if version not in self.world.whole.get(holder, ()):
            upstream = self.world.latest_transfer[holder, version]
        transfer = Transfer(fetch, upstream)
        kept = self.world.kept.pop(receiver, None)
        if fetch.first:
            assert kept is not None, f"{receiver} has nothing of version {version} to go on from"
            assert kept.fetch.weights == fetch.weights
            for other in self.world.moving:
                other.upstream = transfer if other.upstream is kept else other.upstream
        elif kept is not None:
            self.break_below(kept)
        self.world.latest_transfer[receiver, version] = transfer
        self.world.moving.append(transfer)

    def assert_can_serve(self, holder: WorkerId, turn: LaneTurn, version: int) -> None:
        has = version in self.world.whole.get(holder, ())
        receives = any(
            transfer.receiver == holder and transfer.fetch.weights.version == version and transfer.fetch.turn != turn
            for transfer in self.world.moving
        )
        assert has or receives, f"{holder} neither holds nor receives version {version}"

    def evict(self, worker: WorkerId, version: int) -> None:
        if (kept := self.world.kept.get(worker)) is not None and kept.fetch.weights.version == version:
            assert not any(version in whole for whole in self.world.whole.values()), f"version {version} is not lost"
            del self.world.kept[worker]
            self.break_below(kept)
            return
        assert version in self.world.whole[worker], f"{worker} does not hold version {version}"
        serves = [
            fetch.receiver
            for fetch in self.versions.fetching.values()
            if (fetch.holder, fetch.weights.version) == (worker, version)
        ]
        assert not serves, f"{worker} serves version {version} to {serves}"
        assert max(self.world.whole[worker]) > version, f"{worker} has nothing newer than version {version}"
        self.world.whole[worker].remove(version)

    # ---- invariants

    def newest_alive(self) -> int:
        """The newest version that a live worker has whole."""
        return max((version for whole in self.world.whole.values() for version in whole), default=0)

    def idle(self) -> set[WorkerId]:
        """Live workers that have an older version and fetch nothing."""
        older = {name for name, newest in self.world.newest.items() if newest < self.newest_alive()}
        return older - {fetch.receiver for fetch in self.versions.fetching.values()}

    @invariant()
    def the_latest_version_is_whole_at_a_live_worker(self) -> None:
        if not hasattr(self, "versions"):
            return
        assert self.versions.latest == self.newest_alive()
        assert self.versions.newest == self.version
        late = [name for name in self.world.newest if self.versions.entry.get(name, 0) > self.newest_alive()]
        assert not late, f"{late} may not begin before a version that no worker has"
        idle = {name for name in self.idle() if self.failed[name] < 2}
        assert not idle, f"{idle} fetch nothing"

    @invariant()
    def every_chain_ends_at_a_holder(self) -> None:
        if not hasattr(self, "versions"):
            return
        for fetch in self.versions.fetching.values():
            worker, met = fetch.receiver, set[WorkerId]()
            while (link := self.versions.fetching.get(worker)) is not None and link.weights == fetch.weights:
                assert worker not in met, f"{sorted(met)} fetch in a circle"
                met.add(worker)
                worker = link.holder
                if fetch.weights.version in self.world.whole.get(worker, ()):
                    break
            else:
                assert met & self.versions.orphaned, f"{fetch} leads to {worker}, who does not have it"

    @invariant()
    def no_worker_holds_an_unneeded_version(self) -> None:
        if not hasattr(self, "versions"):
            return
        wanted = {(fetch.holder, fetch.weights.version) for fetch in self.versions.fetching.values()}
        for worker, whole in self.world.whole.items():
            spare = [version for version in whole if version < max(whole) and (worker, version) not in wanted]
            assert not spare, f"{worker} still holds {spare} of {whole}"

    def teardown(self) -> None:
        """Without further faults every live worker ends at the newest version that a live worker has."""
        if not hasattr(self, "versions"):
            return
        for _ in range(200):
            self.time_passes()
            if not self.world.moving:
                break
            coming = [transfer for transfer in self.world.moving if transfer.can_complete]
            if coming:
                self.complete(coming[0])
            else:
                self.fail_fetch(self.world.moving[0])
        assert not self.world.moving
        assert not self.versions.fetching
        assert not self.versions.orphaned
        if self.newest_alive():
            assert set(self.world.newest.values()) <= {self.newest_alive()}


WeightVersions.TestCase.settings = settings(max_examples=examples(150), stateful_step_count=40, deadline=None)
TestWeightVersions = WeightVersions.TestCase


def test_the_publisher_sends_one_copy_when_the_head_of_a_chain_fails() -> None:
    """The receivers behind a dead relay form a chain again; they do not all fetch from the publisher."""
    machine = WeightVersions()
    machine.begin()
    for name in NAMES[3:]:
        machine.join(name)
    machine.publish()
    assert [transfer.holder for transfer in machine.world.moving] == [TRAINER, *NAMES[:4]]
    machine.die(NAMES[0])
    while broken := [transfer for transfer in machine.world.moving if transfer.broken]:
        machine.fail_fetch(broken[0])
    assert sorted(transfer.holder for transfer in machine.world.moving if not transfer.broken) == [*NAMES[1:4], TRAINER]
