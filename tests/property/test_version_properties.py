"""What holds of versions and of who fetches them from whom, in whatever order workers speak, fail and vanish."""

from collections import Counter
from dataclasses import dataclass, field

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from flowrt.controller.core import HANDLERS
from flowrt.controller.events import AppendReplay, LogEvent, Send
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
    """A version on its way. It can come whole once what it is passed on from has; None: the holder had it whole."""

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
    def can_come(self) -> bool:
        return not self.broken and (self.upstream is None or self.upstream.whole)


@dataclass
class World:
    """What is true at the workers, whatever the controller has heard of it."""

    whole: dict[WorkerId, set[int]] = field(default_factory=dict)  # versions that a living worker has in its memory
    newest: dict[WorkerId, int] = field(default_factory=dict)
    latest_transfer: dict[tuple[WorkerId, int], Transfer] = field(default_factory=dict)
    moving: list[Transfer] = field(default_factory=list)  # neither end of it has been reported


class Walk(RuleBasedStateMachine):
    """Workers that keep the protocol, and every misfortune that they may have."""

    @initialize()
    def begin(self) -> None:
        policies = Policies(StrictLag(0), Fifo(), TokenBudget(1), DelayedUpdate())
        self.env = Environment(Settings(model=MODEL), grpo_dataflow(False), policies)
        self.state = State.of(self.env, 1)
        for name in [*NAMES, TRAINER]:
            self.state.membership.join(name, name.rstrip("0123456789"), "host", 0.0)
        self.versions = self.state.models.policy
        self.world = World(whole={TRAINER: set()})
        self.now, self.failed = 0.0, Counter[WorkerId]()  # of each receiver, since something came whole
        self.version = 0
        for name in NAMES[:3]:
            self.join(name)

    # ---- what happens

    @rule(name=st.sampled_from(NAMES))
    def join(self, name: WorkerId) -> None:
        if name not in self.world.newest:
            self.world.whole[name], self.world.newest[name] = set(), 0
            self.hear(name, m.WeightsActivated(MODEL, 0))

    @rule()
    @precondition(lambda self: TRAINER not in self.world.whole)
    def trainer_is_started_again(self) -> None:
        self.world.whole[TRAINER] = set()

    @rule()
    @precondition(lambda self: TRAINER in self.world.whole)
    def publish(self) -> None:
        self.version += 1
        self.world.whole[TRAINER].add(self.version)
        self.hear(
            TRAINER,
            m.Publish((Weights(model=MODEL, version=self.version, base=NO_BASE, bucket_bytes=(8,), checksum=1),), ()),
        )

    @rule(data=st.data())
    @precondition(lambda self: any(transfer.can_come for transfer in self.world.moving))
    def arrive(self, data: st.DataObject) -> None:
        self.come(data.draw(st.sampled_from([one for one in self.world.moving if one.can_come])))

    @rule(data=st.data())
    @precondition(lambda self: self.world.moving)
    def fail(self, data: st.DataObject) -> None:
        """A lane breaks, or what came is not what was published; whoever waits behind it learns of it later."""
        self.lose(data.draw(st.sampled_from(self.world.moving)))

    @rule(name=st.sampled_from([*NAMES, TRAINER]), late=st.booleans())
    def die(self, name: WorkerId, late: bool = False) -> None:
        """``late``: what it was sending had all been sent, and the receivers are about to say so."""
        if name not in self.world.whole:
            return
        del self.world.whole[name]
        self.world.newest.pop(name, None)
        self.failed[name] = 0
        for transfer in [one for one in self.world.moving if name in (one.holder, one.receiver)]:
            if not (late and transfer.can_come and transfer.holder == name):
                self.break_behind(transfer)
            if transfer.receiver == name:
                self.world.moving.remove(transfer)
        self.state.models.forget(name)
        self.move()

    @rule(name=st.sampled_from(NAMES))
    def swap(self, name: WorkerId) -> None:
        if name in self.world.newest:
            self.hear(name, m.WeightsActivated(MODEL, self.world.newest[name]))

    @rule()
    def time_passes(self) -> None:
        """However often its fetches failed, whoever lives is ordered to fetch after a while."""
        self.now += MAX_BACK_OFF_S
        self.move()
        assert not self.idle()

    # ---- how

    def come(self, transfer: Transfer) -> None:
        self.world.moving.remove(transfer)
        transfer.whole = True
        version = transfer.fetch.weights.version
        self.world.whole[transfer.receiver].add(version)
        self.world.newest[transfer.receiver] = max(version, self.world.newest[transfer.receiver])
        self.failed[transfer.receiver] = 0
        self.hear(transfer.receiver, m.WeightsStaged(MODEL, version))

    def lose(self, transfer: Transfer) -> None:
        self.world.moving.remove(transfer)
        self.break_behind(transfer)
        self.failed[transfer.receiver] += 1
        self.hear(transfer.receiver, m.FetchFailed(transfer.fetch.turn, transfer.fetch.weights, "the lane broke"))

    def break_behind(self, transfer: Transfer) -> None:
        transfer.broken = True
        for other in self.world.moving:
            if other.upstream is transfer and not other.broken:
                self.break_behind(other)

    def hear(self, worker: WorkerId, message: m.Publish | m.WeightsStaged | m.FetchFailed | m.WeightsActivated) -> None:
        commands = HANDLERS[type(message)](self.state, self.env, worker, message, self.now)
        # Entries are for a controller that comes back.
        assert all(isinstance(one, AppendReplay | LogEvent) for one in commands)
        self.move()

    def move(self) -> None:
        for command in order_fetches(self.state, self.env, self.now):
            assert isinstance(command, Send)
            match command.message:
                case m.ReceiveWeights():
                    self.begin_transfer(command.message)
                case m.SendWeights(turn, _, version, _):
                    self.must_serve(command.worker, turn, version)
                case m.EvictVersion(_, version):
                    self.retire(command.worker, version)

    def begin_transfer(self, fetch: m.ReceiveWeights) -> None:
        receiver, holder = WorkerId(fetch.turn.receiver), WorkerId(fetch.turn.sender)
        version = fetch.weights.version
        assert receiver in self.world.whole, f"{receiver} is gone, but has to fetch"
        assert version == self.newest_alive(), f"{receiver} has to fetch {version}, the latest is {self.newest_alive()}"
        upstream = None
        if version not in self.world.whole.get(holder, ()):
            upstream = self.world.latest_transfer[holder, version]
        transfer = Transfer(fetch, upstream, broken=upstream is not None and upstream.broken)
        self.world.latest_transfer[receiver, version] = transfer
        self.world.moving.append(transfer)

    def must_serve(self, holder: WorkerId, turn: LaneTurn, version: int) -> None:
        has = version in self.world.whole.get(holder, ())
        receives = any(
            one.receiver == holder and one.fetch.weights.version == version and one.fetch.turn != turn
            for one in self.world.moving
        )
        assert has or receives, f"{holder} neither holds nor receives version {version}"

    def retire(self, worker: WorkerId, version: int) -> None:
        assert version in self.world.whole[worker], f"{worker} does not hold version {version}"
        serves = [
            one.receiver
            for one in self.versions.fetching.values()
            if (one.holder, one.weights.version) == (worker, version)
        ]
        assert not serves, f"{worker} serves version {version} to {serves}"
        assert max(self.world.whole[worker]) > version, f"{worker} has nothing newer than version {version}"
        self.world.whole[worker].remove(version)

    # ---- what holds

    def newest_alive(self) -> int:
        """The newest version that somebody who lives has whole."""
        return max((version for whole in self.world.whole.values() for version in whole), default=0)

    def idle(self) -> set[WorkerId]:
        """Who lives, has something older, and fetches nothing."""
        older = {name for name, newest in self.world.newest.items() if newest < self.newest_alive()}
        return older - {one.receiver for one in self.versions.fetching.values()}

    @invariant()
    def the_latest_is_what_somebody_has_whole(self) -> None:
        if not hasattr(self, "versions"):
            return
        assert self.versions.latest == self.newest_alive()
        assert self.versions.newest == self.version
        late = [name for name in self.world.newest if self.versions.entry.get(name, 0) > self.newest_alive()]
        assert not late, f"{late} may not begin before they have what nobody has"
        idle = {name for name in self.idle() if self.failed[name] < 2}
        assert not idle, f"{idle} fetch nothing"

    @invariant()
    def every_chain_ends_at_a_holder(self) -> None:
        if not hasattr(self, "versions"):
            return
        for fetch in self.versions.fetching.values():
            one, met = fetch.receiver, set[WorkerId]()
            while (link := self.versions.fetching.get(one)) is not None and link.weights == fetch.weights:
                assert one not in met, f"{sorted(met)} fetch in a circle"
                met.add(one)
                one = link.holder
                if fetch.weights.version in self.world.whole.get(one, ()):
                    break
            else:
                assert met & self.versions.orphaned, f"{fetch} leads to {one}, who does not have it"

    @invariant()
    def nobody_holds_more_than_it_needs(self) -> None:
        if not hasattr(self, "versions"):
            return
        wanted = {(one.holder, one.weights.version) for one in self.versions.fetching.values()}
        for worker, whole in self.world.whole.items():
            spare = [version for version in whole if version < max(whole) and (worker, version) not in wanted]
            assert not spare, f"{worker} still holds {spare} of {whole}"

    def teardown(self) -> None:
        """Without further misfortunes everybody who lives ends at the newest version that anybody living has."""
        if not hasattr(self, "versions"):
            return
        for _ in range(200):
            self.time_passes()
            if not self.world.moving:
                break
            coming = [one for one in self.world.moving if one.can_come]
            if coming:
                self.come(coming[0])
            else:
                self.lose(self.world.moving[0])
        assert not self.world.moving
        assert not self.versions.fetching
        assert not self.versions.orphaned
        if self.newest_alive():
            assert set(self.world.newest.values()) <= {self.newest_alive()}


Walk.TestCase.settings = settings(max_examples=examples(150), stateful_step_count=40, deadline=None)
TestWalk = Walk.TestCase


def test_publisher_sends_one_copy_whatever_fails_at_once() -> None:
    """A relay at the head of a chain dies: those behind it form a chain again, they do not all go to the publisher."""
    walk = Walk()
    walk.begin()
    for name in NAMES[3:]:
        walk.join(name)
    walk.publish()
    assert [one.holder for one in walk.world.moving] == [TRAINER, *NAMES[:4]]
    walk.die(NAMES[0])
    for transfer in [one for one in walk.world.moving if one.broken]:
        walk.lose(transfer)
    assert sorted(one.holder for one in walk.world.moving if not one.broken) == [*NAMES[1:4], TRAINER]
