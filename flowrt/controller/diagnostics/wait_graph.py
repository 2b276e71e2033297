"""The wait-for graph of a run, read from the controller's state: waits, what each is blocked on, and deadlocks."""

import heapq
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from flowrt.controller.environment import Environment
from flowrt.controller.state.membership import Member
from flowrt.controller.state.parked_requests import ParkedRequest
from flowrt.controller.state.state import State
from flowrt.controller.state.weights import VersionTable
from flowrt.controller.transitions import pulls
from flowrt.ids import CONTROLLER, OBSERVER, WorkerId
from flowrt.protocol.messages import Offer, Pull
from flowrt.protocol.records import NO_LIMIT

MAX_NAMES = 8
"""Maximum number of workers that are named for one wait; of the others only the number is given."""


@dataclass(frozen=True, slots=True)
class Edge:
    """A wait: any worker in ``blocked_on`` can end it; if that is empty, no connected worker can."""

    who: str
    what: str
    blocked_on: tuple[str, ...]
    age_s: float
    limit_s: float
    blocks: bool  # the waiting worker does nothing else, and what it waits for makes no progress by itself

    @property
    def overdue(self) -> bool:
        return self.age_s > self.limit_s

    def __str__(self) -> str:
        cause = f"blocked on {named(self.blocked_on)}" if self.blocked_on else "no worker can satisfy this"
        return f"{self.who} waits {self.age_s:.1f} s for {self.what} ({cause})"


@dataclass(frozen=True, slots=True)
class WorkerState:
    """A worker, as the controller sees it."""

    worker: str
    role: str
    state: str  # "at work", "waiting", "finished", or "idle": no lease and no request
    silent_s: float
    holds: str


@dataclass(frozen=True, slots=True)
class WaitGraph:
    """The graph, longest waits first; ``more`` waits and ``others``, a number of workers, are not listed."""

    workers: tuple[WorkerState, ...]
    waits: tuple[Edge, ...]
    deadlocks: tuple[tuple[str, ...], ...]
    more: int = 0
    others: int = 0

    def as_json(self) -> dict[str, Any]:
        return {
            "workers": [[one.worker, one.role, one.state, round(one.silent_s, 1), one.holds] for one in self.workers],
            "waits": [
                {
                    "who": edge.who,
                    "what": edge.what,
                    "blocked_on": named(edge.blocked_on),
                    "age_s": round(edge.age_s, 1),
                    # JSON has no infinity.
                    "limit_s": round(edge.limit_s, 1) if edge.limit_s < float("inf") else None,
                    "overdue": edge.overdue,
                    "unsatisfiable": not edge.blocked_on,
                }
                for edge in self.waits
            ],
            "deadlocks": [list(workers[:MAX_NAMES]) for workers in self.deadlocks],
            "more": self.more,
            "others": self.others,
        }

    def is_deadlocked(self, returned: Collection[str]) -> bool:
        """True if no worker can make progress, unless a new one connects.

        Each worker waits for something that only others can provide, has finished, or is one of ``returned``, whose
        roles have ended; and none holds a lease.
        """
        if self.more or self.others or not all(edge.blocks for edge in self.waits):
            return False
        waiting = any(one.state == "waiting" for one in self.workers)
        return waiting and all(
            not one.holds and (one.state in ("waiting", "finished") or one.worker in returned) for one in self.workers
        )

    def sentences(self, max_lines: int) -> list[str]:
        """The graph as text: deadlocks, the longest waits, then what each worker holds."""
        lines = [f"deadlock: {named(workers)}" for workers in self.deadlocks]
        lines += [str(edge) for edge in self.waits]
        lines += [f"{one.worker} holds {one.holds}" for one in self.workers if one.holds]
        left_out = len(lines) - max_lines + self.more
        return lines[:max_lines] + ([f"and {left_out} more"] if left_out > 0 else [])


def named(workers: Sequence[str]) -> str:
    """The first names, and the number of the others."""
    rest = len(workers) - MAX_NAMES
    return ", ".join(workers[:MAX_NAMES]) + (f" and {rest} more" if rest > 0 else "")


def find_deadlocks(edges: Iterable[Edge], at_work: Collection[str]) -> tuple[tuple[str, ...], ...]:
    """Find sets of workers that wait only for each other (OR model: any one in ``blocked_on`` suffices).

    A worker that is at work or has no known wait can act at any time, and so can all that wait for it.
    """
    blocked_on: dict[str, set[str]] = {}
    free = set(at_work)
    for edge in edges:
        if not edge.blocks:
            free.add(edge.who)
        elif edge.blocked_on:
            blocked_on.setdefault(edge.who, set()).update(edge.blocked_on)
    stuck = {who for who in blocked_on if who not in free}
    while unblocked := {who for who in stuck if not blocked_on[who] <= stuck}:
        stuck -= unblocked
    return _components(stuck, blocked_on)


def _components(stuck: set[str], blocked_on: dict[str, set[str]]) -> tuple[tuple[str, ...], ...]:
    """The connected components of the stuck workers, each sorted by name."""
    neighbours: dict[str, set[str]] = {who: set(blocked_on[who]) for who in stuck}
    for who in stuck:
        for other in blocked_on[who]:
            neighbours[other].add(who)
    components, left = [], set(stuck)
    while left:
        component, reached = set[str](), {min(left)}
        while reached:
            component |= reached
            reached = {other for who in reached for other in neighbours[who]} - component
        left -= component
        components.append(tuple(sorted(component)))
    return tuple(components)


MAX_WAITS = 64
MAX_WORKERS = 256


class WaitGraphBuilder:
    """A snapshot of who holds which leases, from which the waits of parked requests are derived."""

    def __init__(self, state: State, env: Environment, now: float) -> None:
        self._state = state
        self._env = env
        self._now = now
        self.held: dict[WorkerId, Counter[str]] = {}
        self._holders: dict[str, dict[WorkerId, None]] = {}
        self._ends_s: dict[WorkerId, float] = {}
        for lease in state.table.leases.values():
            self.held.setdefault(lease.worker, Counter())[lease.stage] += len(lease.slots)
            self._holders.setdefault(lease.stage, {})[lease.worker] = None
            self._ends_s[lease.worker] = min(self._ends_s.get(lease.worker, float("inf")), lease.deadline_s)

    # ---- what a request is blocked on

    def blocked_on(self, parked: ParkedRequest[Pull] | ParkedRequest[Offer]) -> tuple[tuple[WorkerId, ...], bool]:
        """The workers that can satisfy a parked request, and whether progress is being made without their action."""
        request = parked.request
        if isinstance(request, Offer):
            return self._offer_blocked_on(request), False
        stage = request.stage
        if stage == self._env.flow.train_stage:
            if request.step > self._state.window.step:
                return self._workers_of(stage), False
            return self._upstream(stage), False
        if stage in self._state.table.ready and len(self._state.table.ready[stage]):
            return self._version_blocked_on(parked.worker)
        return self._upstream(stage), False

    def _offer_blocked_on(self, offer: Offer) -> tuple[WorkerId, ...]:
        if offer.flow == self._env.flow.train_flow:
            return self._workers_of(self._env.flow.train_stage)
        if NO_LIMIT != offer.at_most > self._state.models.policy.newest:
            publisher = self._state.models.policy.publisher
            trainers = self._workers_of(self._env.flow.train_stage)
            return (publisher,) if publisher is not None and publisher in self._state.membership else trainers
        undone, flows = self._state.table.undone, self._state.table.flows
        stages = [stage.name for stage in flows.of(offer.flow) if undone[stage.name]]
        return tuple(dict.fromkeys(worker for stage in stages for worker in self._workers_of(stage)))

    def _version_blocked_on(self, worker: WorkerId) -> tuple[tuple[WorkerId, ...], bool]:
        """Slots are ready, but this worker may start none: its weights are too old, or a policy withholds them."""
        weights = self._state.models.policy
        fetch, receiver = weights.fetching.get(worker), weights.receivers.get(worker)
        if fetch is not None:
            return (fetch.holder,), True
        if receiver is not None and receiver.staged > receiver.applied:
            return (worker,), True
        if receiver is not None and receiver.staged < weights.latest:
            return (WorkerId(CONTROLLER),), True
        publisher = weights.publisher
        if publisher is not None and publisher in self._state.membership:
            return (publisher,), False
        return self._workers_of(self._env.flow.train_stage), False

    def _upstream(self, stage: str) -> tuple[WorkerId, ...]:
        """Workers that make or could make what this stage needs; the sources if nothing is in flight.

        Empty if an earlier stage has ready slots that no worker has ever pulled.
        """
        found, unpulled = self._search_upstream(stage)
        return tuple(found) if found or unpulled else tuple(self._state.requests.offerers)

    def _search_upstream(self, stage: str) -> tuple[dict[WorkerId, None], list[str]]:
        """Workers that make or could make what is missing, and stages with ready slots that no worker ever pulled."""
        table = self._state.table
        found: dict[WorkerId, None] = {}
        pending = [stage]
        seen = {stage}
        unpulled: list[str] = []
        while pending:
            for need in table.stages[pending.pop()].needs:
                maker = table.flows.makers.get(need)
                if maker is None or maker in seen:
                    continue
                seen.add(maker)
                if maker in self._holders:
                    found |= self._holders[maker]
                elif table.count_ready(maker):
                    found |= dict.fromkeys(self._state.requests.pullers[maker])
                    if not self._state.requests.pullers[maker]:
                        unpulled.append(maker)
                else:
                    pending.append(maker)
        return found, unpulled

    def _workers_of(self, stage: str) -> tuple[WorkerId, ...]:
        """The workers that hold leases of a stage; if there are none, those that have pulled it."""
        return tuple(self._holders.get(stage) or self._state.requests.pullers[stage]) if stage else ()

    # ---- what is listed

    def edges(self, request_timeout_s: float) -> list[Edge]:
        """Waits that the controller knows of: the oldest parked requests, and weight transfers in flight."""
        parked = heapq.nsmallest(MAX_WAITS, self._state.requests.all(), key=attrgetter("since_s"))
        edges = [self._edge(one, request_timeout_s) for one in parked]
        for versions in self._state.models.of.values():
            edges += self._fetches(versions)
        return edges

    def reported_edges(self) -> list[Edge]:
        """Waits that the workers report: tensors on a lane, other ranks."""
        return [
            Edge(
                who=member.id,
                what=one.what,
                blocked_on=(one.blocked_on,),
                age_s=one.age_s + self._now - member.reported_s,
                limit_s=one.limit_s,
                blocks=False,
            )
            for member in self._state.membership.members()
            for one in member.waits
        ]

    def _edge(self, parked: ParkedRequest[Pull] | ParkedRequest[Offer], request_timeout_s: float) -> Edge:
        workers, progresses = self.blocked_on(parked)
        what = pulls.wait_reason(self._state, self._env, parked)
        if not workers and isinstance(parked.request, Pull):
            unpulled = self._search_upstream(parked.request.stage)[1]
            what += "".join(f", and no worker pulls what is ready for {stage}" for stage in unpulled)
        return Edge(
            who=parked.worker,
            what=what,
            blocked_on=workers,
            age_s=self._now - parked.since_s,
            limit_s=request_timeout_s,
            blocks=not progresses,
        )

    def _fetches(self, versions: VersionTable) -> list[Edge]:
        found = []
        for worker, fetch in versions.fetching.items():
            what = f"version {fetch.weights.version} of {versions.model}"
            since_s = self._state.models.ordered_s(versions.model, worker)
            found.append(
                Edge(
                    who=worker,
                    what=what,
                    blocked_on=(fetch.holder,),
                    age_s=0.0 if since_s is None else self._now - since_s,
                    limit_s=float("inf"),
                    blocks=False,
                )
            )
        return found

    def worker_state(self, member: Member, waiting: set[str]) -> WorkerState:
        held = self.held.get(member.id)
        state = "idle"
        if held:
            state = "at work"
        elif member.id in waiting:
            state = "waiting"
        elif member.finished:
            state = "finished"
        holds = ", ".join(f"{count} slots of {stage}" for stage, count in (held or {}).items())
        left_s = self._ends_s.get(member.id, float("inf")) - self._now
        if left_s < float("inf"):
            holds += f" (a lease ends in {left_s:.0f} s)"
        return WorkerState(
            worker=member.id, role=member.role, state=state, silent_s=self._now - member.seen_s, holds=holds
        )


def unserved(state: State) -> list[str]:
    """Stages with ready samples that no worker has ever pulled."""
    table, pullers = state.table, state.requests.pullers
    ready = {
        **{name: len(queue) for name, queue in table.ready.items()},
        **{name: len(groups) for name, groups in table.ready_groups.items()},
    }
    return [stage for stage, count in ready.items() if count and not pullers[stage]]


def wait_graph(state: State, env: Environment, now: float, request_timeout_s: float = float("inf")) -> WaitGraph:
    """Build the graph at time ``now``; a worker waits at most ``request_timeout_s`` for an answer."""
    builder = WaitGraphBuilder(state, env, now)
    known = builder.edges(request_timeout_s)
    edges = sorted(known + builder.reported_edges(), key=attrgetter("age_s"), reverse=True)
    waiting = {edge.who for edge in edges}
    members = [member for member in state.membership.members() if member.role != OBSERVER]
    workers = [builder.worker_state(member, waiting) for member in members[:MAX_WORKERS]]
    parked = sum(1 for _ in state.requests.all())
    more = max(len(edges) - MAX_WAITS, 0) + max(parked - MAX_WAITS, 0)
    return WaitGraph(
        workers=tuple(workers),
        waits=tuple(edges[:MAX_WAITS]),
        deadlocks=find_deadlocks(known, builder.held),
        more=more,
        others=max(len(members) - MAX_WORKERS, 0),
    )
