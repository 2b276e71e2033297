"""Properties of dispatch under random events: identity settings, bounded overtaking, no lost slots."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowrt.controller.policies.dispatch.base import Dispatch, Fifo, Puller, Queue, Start
from flowrt.controller.policies.dispatch.length_aware import DecodeCost, LengthAware
from flowrt.controller.policies.dispatch.priority import Priority
from flowrt.controller.state.slots import NO_STEP, Lease, Slot
from flowrt.ids import LeaseId, WorkerId
from flowrt.simulation.dispatch import ROLLOUT, Cluster, DispatchSimulator, SampleFactory
from tests.effort import examples

COST = DecodeCost(0.01, 0.0005)
STEEP = DecodeCost(0.01, 0.01)
EIGHT = st.integers(0, 7)
# Random events: a name, and three numbers that choose the worker, the amount and the slot.
EVENTS = st.lists(
    st.tuples(st.sampled_from(["issue", "enqueue", "dequeue", "take", "take", "end"]), EIGHT, EIGHT, EIGHT), max_size=60
)
STARTS = (Start.NOW, Start.NOW, Start.NOW, Start.ELSEWHERE, Start.NOT_YET)


@dataclass
class Stage:
    """A queue and its environment: the slots that exist, those that are ready, and those that each worker runs."""

    queue: Queue
    may_start: Callable[[Slot, int], Start] | None
    learns: bool = False
    factory: SampleFactory = field(default_factory=SampleFactory)
    idle: list[Slot] = field(default_factory=list)  # neither ready nor worked on
    ready: dict[int, Slot] = field(default_factory=dict)
    running: dict[str, list[Slot]] = field(default_factory=dict)
    taken_slots: list[tuple[str, list[int]]] = field(default_factory=list)

    def apply(self, events: list[tuple[str, int, int, int]]) -> None:
        for event, a, b, c in events:
            getattr(self, event)(a, b, c)
            assert len(self.queue) == len(self.ready)
            known = [*self.idle, *self.ready.values(), *(slot for slots in self.running.values() for slot in slots)]
            assert all((slot in self.queue) == (slot.id in self.ready) for slot in known)

    def issue(self, members: int, prompt: int, now: int) -> None:
        slots = self.factory.group(members % 3 + 1, prompt).slots
        for slot in slots:
            slot.inline = {"urgency": (prompt * 5 + members) % 8 / 4}
        self.idle += slots
        if now % 2:
            self.enqueue(7, 0, 0)

    def enqueue(self, most: int, skip: int, again: int) -> None:
        slots = self.idle[skip % 3 :][: most + 1]
        self.idle = [slot for slot in self.idle if slot not in slots]
        self.ready.update((slot.id, slot) for slot in slots)
        self.queue.add(slots + slots[: again % 2])

    def dequeue(self, which: int, _: int, absent: int) -> None:
        if absent % 2 and self.idle:
            self.queue.discard(self.idle[which % len(self.idle)])
        elif self.ready:
            slot = self.ready.pop(sorted(self.ready)[which % len(self.ready)])
            self.queue.discard(slot)
            self.idle.append(slot)

    def take(self, worker: int, requests: int, salt: int) -> None:
        name, check = f"w{worker % 4}", self.may_start
        may_start = None if check is None else (lambda slot: check(slot, salt))
        puller = Puller(WorkerId(name), requests + 1, may_start)
        slots = self.queue.take(puller)
        assert len(slots) <= requests + 1
        assert may_start is None or all(may_start(slot) is Start.NOW for slot in slots)
        for slot in slots:
            del self.ready[slot.id]
            slot.leases[ROLLOUT.name] = Lease(
                id=LeaseId(0),
                stage=ROLLOUT.name,
                worker=WorkerId(name),
                deadline_s=math.inf,
                version=0,
                step=NO_STEP,
                slots={slot.id: slot},
            )
        self.running.setdefault(name, []).extend(slots)
        self.taken_slots.append((name, [slot.id for slot in slots]))

    def end(self, worker: int, _: int, lost: int) -> None:
        """A worker has generated a slot, or loses it, so that it will be ready again."""
        if running := self.running.get(f"w{worker % 4}"):
            slot = running.pop(0)
            del slot.leases[ROLLOUT.name]
            if lost % 3 == 0:
                self.idle.append(slot)
            elif self.learns:
                self.queue.on_generated(slot, 4 ** (slot.group.prompt % 4))


def mixed(slot: Slot, salt: int) -> Start:
    return STARTS[hash((slot.id, salt)) % len(STARTS)]


@settings(max_examples=examples(150))
@given(EVENTS, st.booleans())
@pytest.mark.parametrize(
    "dispatch",
    [
        Priority(lambda slot: 3.25, ageing=0.1, max_skips=1),
        Priority(lambda slot: -1e6, ageing=1e-9),
        LengthAware(COST, 8, fraction=0.0),
        LengthAware(COST, 8),
    ],
    ids=["equal urgency", "equal urgency, slow ageing", "no tail lane", "no known lengths"],
)
def test_identity_settings_equal_fifo_dispatch(
    dispatch: Dispatch, events: list[tuple[str, int, int, int]], limited: bool
) -> None:
    taken_slots = []
    for policy in (dispatch, Fifo()):
        learns = isinstance(dispatch, LengthAware) and dispatch.fraction == 0
        stage = Stage(policy.queue(ROLLOUT), mixed if limited else None, learns)
        stage.apply(events)
        taken_slots.append(stage.taken_slots)
    assert taken_slots[0] == taken_slots[1]


def in_issue_order(slot: Slot, salt: int) -> Start:
    """Like admission: from some slot on it is too early to start."""
    if slot.id % 8 == salt:
        return Start.ELSEWHERE
    return Start.NOT_YET if slot.id > 6 * salt + 3 else Start.NOW


@settings(max_examples=examples(150))
@given(EVENTS, st.booleans(), st.integers(1, 5))
@pytest.mark.parametrize("policy", ["priority", "tail"])
def test_no_slot_is_lost_or_given_to_two_workers(
    policy: str, events: list[tuple[str, int, int, int]], limited: bool, size: int
) -> None:
    policies: dict[str, Dispatch] = {
        "priority": Priority(lambda slot: slot.inline["urgency"], 0.25, max_skips=size),
        "tail": LengthAware(COST, 4 * size, fraction=0.5),
    }
    queue = policies[policy].queue(ROLLOUT)
    stage = Stage(
        queue,
        in_issue_order if limited else None,
        learns=True,
    )
    stage.apply(events)
    stage.may_start = None
    for _ in range(40 + len(events)):  # every worker completes its slots and pulls, until no slot is ready
        for worker in range(4):
            while stage.running.get(f"w{worker}"):
                stage.end(worker, 0, 1)
            stage.take(worker, 7, 0)
    assert not len(queue)


def pull(worker: str, requests: int = 1, may_start: Callable[[Slot], Start] | None = None) -> Puller:
    return Puller(WorkerId(worker), requests, may_start)


def starts_up_to(limit: int, slot: Slot) -> Start:
    return Start.NOT_YET if slot.id > limit else Start.NOW


@settings(max_examples=examples(200))
@given(
    st.lists(st.tuples(EIGHT, st.integers(1, 2), st.integers(0, 2), st.integers(0, 12)), min_size=10, max_size=60),
    st.integers(1, 4),
    st.sampled_from([0.125, 0.25, 0.5, 1.0]),
    st.booleans(),
)
def test_ageing_limits_the_later_groups_that_overtake_a_slot(
    steps: list[tuple[int, int, int, int]], max_skips: int, ageing: float, limited: bool
) -> None:
    policy = Priority(lambda slot: slot.inline["urgency"], ageing, max_skips)
    queue, factory = policy.queue(ROLLOUT), SampleFactory()
    overtaken: dict[int, set[int]] = {}
    waiting: dict[int, Slot] = {}
    for urgency, members, pulls, ahead in steps:
        for slot in (slots := factory.group(members).slots):
            slot.inline = {"urgency": urgency / 4}
            waiting[slot.id] = slot
        queue.add(slots)
        for _ in range(pulls):
            limit = min(waiting, default=0) + ahead if limited else factory.slots
            taken = queue.take(pull("w0", 1, partial(starts_up_to, limit)))
            assert taken or not waiting
            for slot in taken:
                del waiting[slot.id]
                for other in waiting.values():
                    if other.id <= limit and other.group.id < slot.group.id:
                        overtaken.setdefault(other.id, set()).add(slot.group.id)
        for slot_id, slot in waiting.items():
            allowed = policy.most_overtaking(1.75 - slot.inline["urgency"])
            assert len(overtaken.get(slot_id, ())) <= allowed


@settings(max_examples=examples(15))
@given(st.lists(st.tuples(st.integers(2, 7), st.integers(1, 31)), min_size=60, max_size=80))
def test_length_aware_dispatch_limits_the_overtaking_of_a_slot(steps: list[tuple[int, int]]) -> None:
    """Two of eight workers are reserved and never pull again, while the others always have more slots to take."""
    policy, factory = LengthAware(STEEP, 128), SampleFactory()
    queue = policy.queue(ROLLOUT)
    for epoch in range(3):
        queue.add(slot for prompt in range(32) for slot in factory.group(4, prompt, epoch).slots)
        first = queue.take(pull("w0", 16))
        taken = first + [slot for _ in range(130) for w in range(1, 8) for slot in queue.take(pull(f"w{w}", 16))]
        for slot in taken:
            queue.on_generated(slot, 1_000 if slot.group.prompt else 5_000)
    assert [slot.group.prompt for slot in first] == [0], "the first worker is reserved for the long prompt"
    queue.add(backlog := [slot for prompt in range(31, -1, -1) for slot in factory.group(4, prompt).slots])
    waiting, overtaken = {slot.id for slot in backlog}, dict[int, int]()
    for step, (worker, prompt) in enumerate(steps):
        queue.add(slots := factory.group(4, prompt if step % 20 else 0).slots)
        waiting |= {slot.id for slot in slots}
        for slot in (slot for _ in range(4) for slot in queue.take(pull(f"w{worker}", 16))):
            waiting.remove(slot.id)
            overtaken |= {other: overtaken.get(other, 0) + 1 for other in waiting if other < slot.id}
        assert all(overtaken.get(other, 0) <= policy.most_overtaking for other in waiting)


@settings(max_examples=examples(40))
@given(
    st.lists(st.sampled_from([[100] * 4, [110] * 4, [90] * 4, [500] * 2]), min_size=8, max_size=24),
    st.integers(1, 8),
    st.integers(2, 12),
    st.floats(0, 1),
)
def test_length_aware_dispatch_completes_every_run(
    lengths: list[list[int]], workers: int, rows: int, fraction: float
) -> None:
    samples = sum(map(len, lengths))
    run = DispatchSimulator(LengthAware(STEEP, samples, fraction), Cluster(workers, rows, STEEP))
    for epoch in range(3):
        seconds = run.run(dict(enumerate(lengths)), epoch)  # raises if a sample remains
        assert seconds >= max(map(max, lengths)) * STEEP(1) * (1 - 1e-9)
