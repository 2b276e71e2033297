"""The wait-for graph of a run, read from the controller's state: waits, what each is blocked on, and deadlocks."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from operator import attrgetter
from typing import Any

from flowrt.controller.state.membership import Member
from flowrt.controller.state.parked_requests import ParkedRequest
from flowrt.controller.state.state import Environment, State
from flowrt.controller.state.weights import VersionTable
from flowrt.controller.transitions import pulls
from flowrt.ids import CONTROLLER, OBSERVER, WorkerId
from flowrt.protocol.messages import Offer, Pull

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
    blocks: bool  # the worker does nothing else, and what it waits for makes no progress without another worker

    @property
    def overdue(self) -> bool:
        """Whether the wait has lasted longer than its limit."""
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
    silent_s: float  # since its last sign of life
    holds: str  # its leases as text; empty if it has none


@dataclass(frozen=True, slots=True)
class WaitGraph:
    """The graph, longest waits first; ``more`` and ``others`` are the numbers of waits and workers not listed."""

    workers: tuple[WorkerState, ...]
    waits: tuple[Edge, ...]
    deadlocks: tuple[tuple[str, ...], ...]
    more: int = 0
    others: int = 0
    counts: Mapping[tuple[str, str], int] = field(default_factory=dict)
    """Number of workers by role and state."""
    requests: tuple[Edge, ...] = ()
    """The oldest parked requests; they are part of `waits` too, as far as its limit permits."""

    def as_json(self) -> dict[str, Any]:
        """The graph as values that JSON can represent; an infinite limit is None."""
        return {
            "workers": [
                [worker.worker, worker.role, worker.state, round(worker.silent_s, 1), worker.holds]
                for worker in self.workers
            ],
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
        """Whether no worker can make progress unless a new one connects; False if waits or workers are not listed.

        Each worker waits for something that only other workers can provide, has finished, or is one of ``returned``,
        which send no further request; and no worker holds a lease.
        """
        if self.more or self.others or not all(edge.blocks for edge in self.waits):
            return False
        waiting = any(worker.state == "waiting" for worker in self.workers)
        return waiting and all(
            not worker.holds and (worker.state in ("waiting", "finished") or worker.worker in returned)
            for worker in self.workers
        )

    def sentences(self, max_lines: int) -> list[str]:
        """The first ``max_lines`` lines of the graph as text: deadlocks, the longest waits, what each worker holds."""
        lines = [f"deadlock: {named(workers)}" for workers in self.deadlocks]
        lines += [str(edge) for edge in self.waits]
        lines += [f"{worker.worker} holds {worker.holds}" for worker in self.workers if worker.holds]
        left_out = len(lines) - max_lines + self.more
        return lines[:max_lines] + ([f"and {left_out} more"] if left_out > 0 else [])


def named(workers: Sequence[str]) -> str:
    """The first names as text, and the number of the others."""
    rest = len(workers) - MAX_NAMES
    return ", ".join(workers[:MAX_NAMES]) + (f" and {rest} more" if rest > 0 else "")


def find_deadlocks(edges: Iterable[Edge], at_work: Collection[str]) -> tuple[tuple[str, ...], ...]:
    """Find sets of workers that wait only for each other (OR model: any one in ``blocked_on`` suffices).

    A worker that is at work or has no known wait can act at any time, and so can all that wait for it.
    """
    waits: dict[str, list[tuple[str, ...]]] = {}
    free = set(at_work)
    for edge in edges:
        if not edge.blocks:
            free.add(edge.who)
        elif edge.blocked_on:
            waits.setdefault(edge.who, []).append(edge.blocked_on)
    # Fast path: in nearly every wait the first name is a worker that can act. Sets are built for the other waits only.
    blocked_on = {
        who: set(chain.from_iterable(names))
        for who, names in waits.items()
        if who not in free and all(other in waits and other not in free for other in chain.from_iterable(names))
    }
    stuck = set(blocked_on)
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
MAX_WORKERS = 160
AT_WORK, WAITING, FINISHED, IDLE = "at work", "waiting", "finished", "idle"
"""States of a worker. An idle one has no lease and no request, and has not completed its role."""


class WaitGraphBuilder:
    """Derives the waits of parked requests from a snapshot of the leases of each worker.

    With thousands of workers most requests wait for the same workers, so results are cached by stage.
    """

    def __init__(self, state: State, env: Environment, now: float) -> None:
        self._state = state
        self._env = env
        self._now = now
        self._holders = {stage: workers for stage, workers in state.table.working.items() if workers}
        self.at_work = set[WorkerId]().union(*self._holders.values())
        self._found: dict[str, tuple[dict[WorkerId, None], list[str]]] = {}
        self._upstream_of: dict[str, tuple[WorkerId, ...]] = {}
        self._named: dict[str, tuple[WorkerId, ...]] = {}

    # ---- what a request is blocked on

    def blocked_on(self, parked: ParkedRequest[Pull] | ParkedRequest[Offer]) -> tuple[tuple[WorkerId, ...], bool]:
        """The workers that can satisfy a parked request, and whether they are about to do so already."""
        request = parked.request
        if isinstance(request, Offer):
            return self._offer_blocked_on(request), False
        if parked.worker in self._state.recovery.unconfirmed:
            return (parked.worker,), True
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
        exact = self._state.exact_version(offer)
        if exact is not None and exact > self._state.models.policy.newest:
            publisher = self._state.models.policy.publisher
            trainers = self._workers_of(self._env.flow.train_stage)
            return (publisher,) if publisher is not None and publisher in self._state.membership else trainers
        undone, flows = self._state.table.undone, self._state.table.flows
        stages = [stage.name for stage in flows.of(offer.flow) if undone[stage.name]]
        return tuple(dict.fromkeys(worker for stage in stages for worker in self._workers_of(stage)))

    def _version_blocked_on(self, worker: WorkerId) -> tuple[tuple[WorkerId, ...], bool]:
        """As `blocked_on`, for a worker that may start none of the ready slots with the weights that it uses."""
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
        """Workers that make or could make the columns this stage needs; the sources if nothing is in flight.

        Empty if all that is in flight is ready for stages that no connected worker has ever pulled.
        """
        if stage not in self._upstream_of:
            upstream, unpulled = self._search_upstream(stage)
            workers = upstream if upstream or unpulled else self._state.requests.offerers
            self._upstream_of[stage] = tuple(workers)
        return self._upstream_of[stage]

    def _search_upstream(self, stage: str) -> tuple[dict[WorkerId, None], list[str]]:
        """Workers that make or could make the columns of a stage, and stages whose ready slots no worker has pulled."""
        if stage not in self._found:
            self._found[stage] = self._searched(stage)
        return self._found[stage]

    def _searched(self, stage: str) -> tuple[dict[WorkerId, None], list[str]]:
        table = self._state.table
        upstream: dict[WorkerId, None] = {}
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
                    upstream |= dict.fromkeys(self._holders[maker])
                elif table.count_ready(maker):
                    upstream |= dict.fromkeys(self._state.requests.pullers[maker])
                    if not self._state.requests.pullers[maker]:
                        unpulled.append(maker)
                else:
                    pending.append(maker)
        return upstream, unpulled

    def _workers_of(self, stage: str) -> tuple[WorkerId, ...]:
        """The workers that hold leases of a stage; if there are none, those that have pulled it."""
        if stage and stage not in self._named:
            self._named[stage] = tuple(self._holders.get(stage) or self._state.requests.pullers[stage])
        return self._named[stage] if stage else ()

    # ---- what is listed

    def requests(self, request_timeout_s: float) -> list[Edge]:
        """The oldest parked requests, at most `MAX_WAITS`."""
        return [self._edge(request, request_timeout_s) for request in self._state.requests.oldest(MAX_WAITS)]

    def fetches(self) -> list[Edge]:
        """The weight transfers in flight, at most `MAX_WAITS` of each model."""
        return [edge for versions in self._state.models.of.values() for edge in self._fetches(versions)]

    def fetching(self) -> set[WorkerId]:
        """The workers that receive weights."""
        return set[WorkerId]().union(*(versions.fetching for versions in self._state.models.of.values()))

    def reported_edges(self) -> list[Edge]:
        """Waits that the workers report: tensors on a lane, other ranks."""
        return [
            Edge(
                who=member.id,
                what=wait.what,
                blocked_on=(wait.blocked_on,),
                age_s=wait.age_s + self._now - member.reported_s,
                limit_s=wait.limit_s,
                blocks=False,
            )
            for member in self._state.membership.members()
            for wait in member.waits
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
        edges = []
        for worker, fetch in islice(versions.fetching.items(), MAX_WAITS):
            what = f"version {fetch.weights.version} of {versions.model}"
            since_s = self._state.models.ordered_s(versions.model, worker)
            edges.append(
                Edge(
                    who=worker,
                    what=what,
                    blocked_on=(fetch.holder,),
                    age_s=0.0 if since_s is None else self._now - since_s,
                    limit_s=float("inf"),
                    blocks=False,
                )
            )
        return edges

    def worker_states(self, members: Sequence[Member], waiting: Collection[str]) -> list[WorkerState]:
        """The state and the leases of each of these workers."""
        return [self._worker_state(member, waiting) for member in members]

    def _worker_state(self, member: Member, waiting: Collection[str]) -> WorkerState:
        held, ends_s = [], float("inf")
        for stage, workers in self._holders.items():
            if leases := workers.get(member.id):
                slots = 0
                for lease in leases.values():
                    slots += len(lease.slots)
                    ends_s = min(ends_s, lease.deadline_s)
                held.append(f"{slots} slots of {stage}")
        return WorkerState(
            worker=member.id,
            role=member.role,
            state=self.state_of(member, waiting),
            silent_s=self._now - member.seen_s,
            holds=", ".join(held) + (f" (a lease ends in {ends_s - self._now:.0f} s)" if ends_s < float("inf") else ""),
        )

    def counts(self, waiting: Collection[str]) -> dict[tuple[str, str], int]:
        """Number of workers by role and state."""
        membership = self._state.membership
        finished = membership.finished()
        counts: dict[tuple[str, str], int] = {}
        for role, left in membership.of_role().items():
            if role == OBSERVER:
                continue
            for is_in, state in ((self.at_work, AT_WORK), (waiting, WAITING), (finished, FINISHED), (left, IDLE)):
                if chosen := left.intersection(is_in):
                    counts[role, state] = len(chosen)
                    left -= chosen
        return counts

    def listed(self, first: Collection[str], alarming: Collection[str]) -> list[Member]:
        """At most `MAX_WORKERS` members: those of ``first``, those of ``alarming``, then others; without observers."""
        membership = self._state.membership
        members: dict[WorkerId, Member] = {}
        named = (membership.find(WorkerId(name)) for name in (*sorted(first), *sorted(alarming)))
        for member in chain((member for member in named if member is not None), membership.members()):
            if len(members) == MAX_WORKERS:
                break
            if member.role != OBSERVER:
                members[member.id] = member
        return list(members.values())

    def state_of(self, member: Member, waiting: Collection[str]) -> str:
        """The state of a worker: `AT_WORK`, `WAITING`, `FINISHED` or `IDLE`."""
        if member.id in self.at_work:
            return AT_WORK
        return WAITING if member.id in waiting else FINISHED if member.finished else IDLE


def unserved(state: State) -> list[str]:
    """Stages with ready slots or groups that no connected worker has ever pulled."""
    table, pullers = state.table, state.requests.pullers
    ready = {
        **{name: len(queue) for name, queue in table.ready.items()},
        **{name: len(groups) for name, groups in table.ready_groups.items()},
    }
    return [stage for stage, count in ready.items() if count and not pullers[stage]]


def wait_graph(
    state: State,
    env: Environment,
    now: float,
    request_timeout_s: float = float("inf"),
    first: Collection[str] = (),
) -> WaitGraph:
    """Build the graph.

    Args:
        state: the state of the core.
        env: its settings, dataflow and policies.
        now: seconds on the run's clock.
        request_timeout_s: how long a worker waits for an answer, in seconds.
        first: workers that are listed first, if not all can be: before those with an alarm (a wait that is overdue,
            unsatisfiable or part of a deadlock) and all others.
    """
    builder = WaitGraphBuilder(state, env, now)
    requests = builder.requests(request_timeout_s)
    known, fetching = requests + builder.fetches(), builder.fetching()
    edges = sorted(known + builder.reported_edges(), key=attrgetter("age_s"), reverse=True)
    deadlocks = find_deadlocks(known, builder.at_work | fetching)
    waiting = {edge.who for edge in edges} | fetching | state.requests.waiting()
    alarming = {edge.who for edge in edges if edge.overdue or not edge.blocked_on}.union(*deadlocks)
    counts = builder.counts(waiting)
    number = sum(counts.values())
    listed = builder.listed(first, alarming) if number > MAX_WORKERS else builder.listed((), ())
    unlisted = max(len(state.requests) - MAX_WAITS, 0) + max(len(fetching) - MAX_WAITS, 0)
    return WaitGraph(
        workers=tuple(builder.worker_states(listed, waiting)),
        waits=tuple(edges[:MAX_WAITS]),
        deadlocks=deadlocks,
        more=max(len(edges) - MAX_WAITS, 0) + unlisted,
        others=max(number - MAX_WORKERS, 0),
        requests=tuple(requests),
        counts=counts,
    )
