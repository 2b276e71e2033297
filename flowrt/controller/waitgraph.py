"""Who waits for whom in a run: the wait-for graph, read off the state of the mind. It changes nothing."""

import heapq
from collections import Counter
from operator import attrgetter

from flowrt.controller.knots import Edge, Standing, WaitGraph, find_knots
from flowrt.controller.models import Models
from flowrt.controller.roster import Member, Roster
from flowrt.controller.samples import Samples
from flowrt.controller.settings import Dataflow
from flowrt.controller.versions import ModelVersions
from flowrt.controller.waits import Parked
from flowrt.ids import WorkerId
from flowrt.wire.messages import Offer, Pull

OBSERVER = "observer"
MOST_WAITS = 64
MOST_WORKERS = 256
CONTROLLER = "the controller"


class Reading:
    """One look at the state: what is leased to whom, and who could make what is missing."""

    def __init__(self, flow: Dataflow, samples: Samples, models: Models, roster: Roster, now: float) -> None:
        self._flow = flow
        self._samples = samples
        self._models = models
        self._roster = roster
        self._now = now
        self._makers = {made: stage for stage in samples.board.stages.values() for made in stage.makes}
        self.held: dict[WorkerId, Counter[str]] = {}
        self._holders: dict[str, dict[WorkerId, None]] = {}
        self._ends_s: dict[WorkerId, float] = {}
        for lease in samples.board.leases.values():
            self.held.setdefault(lease.worker, Counter())[lease.stage] += len(lease.slots)
            self._holders.setdefault(lease.stage, {})[lease.worker] = None
            self._ends_s[lease.worker] = min(self._ends_s.get(lease.worker, float("inf")), lease.deadline_s)

    # ---- whose turn it is

    def turn(self, parked: Parked[Pull] | Parked[Offer]) -> tuple[tuple[WorkerId, ...], bool]:
        """Who can bring about what a parked request waits for, and whether it moves by itself meanwhile."""
        request = parked.request
        if isinstance(request, Offer):
            return self._turn_of_offer(request), False
        stage = request.stage
        if stage == self._flow.train_stage:
            if request.step > self._samples.window.step:
                return self._at(stage), False
            return self._upstream(stage), False
        if len(self._samples.board.ready[stage]):
            return self._turn_of_version(parked.worker)
        return self._upstream(stage), False

    def _turn_of_offer(self, offer: Offer) -> tuple[WorkerId, ...]:
        if offer.flow == self._flow.train_flow:
            return self._at(self._flow.train_stage)
        undone, flows = self._samples.board.undone, self._samples.board.flows
        stages = [stage.name for stage in flows.of(offer.flow) if undone[stage.name]]
        return tuple(dict.fromkeys(worker for stage in stages for worker in self._at(stage)))

    def _turn_of_version(self, worker: WorkerId) -> tuple[tuple[WorkerId, ...], bool]:
        """Slots are ready and none of them may start here: the weights are too old (or a policy keeps them)."""
        weights = self._models.policy
        fetch, receiver = weights.fetching.get(worker), weights.receivers.get(worker)
        if fetch is not None:
            return (fetch.holder,), True
        if receiver is not None and receiver.staged > receiver.applied:
            return (worker,), True
        if receiver is not None and receiver.staged < weights.latest:
            return (WorkerId(CONTROLLER),), True
        publisher = weights.publisher
        if publisher is not None and publisher in self._roster:
            return (publisher,), False
        return self._at(self._flow.train_stage), False

    def _upstream(self, stage: str) -> tuple[WorkerId, ...]:
        """Who makes, or could make, what this stage needs; whoever offers, where nothing is on its way.

        Nobody, where something is ready to be made and there is nobody who ever asked for it.
        """
        found, deserted = self._walk_up(stage)
        return tuple(found) if found or deserted else tuple(self._samples.room.offerers)

    def _walk_up(self, stage: str) -> tuple[dict[WorkerId, None], list[str]]:
        """Who makes or could make what is missing, and the stages that have work which nobody ever asked for."""
        board, found = self._samples.board, dict[WorkerId, None]()
        pending, seen, deserted = [stage], {stage}, list[str]()
        while pending:
            for need in board.stages[pending.pop()].needs:
                maker = self._makers.get(need)
                if maker is None or maker.name in seen:
                    continue
                seen.add(maker.name)
                if maker.name in self._holders:
                    found |= self._holders[maker.name]
                elif maker.name in board.ready and len(board.ready[maker.name]):
                    found |= dict.fromkeys(self._samples.room.pullers[maker.name])
                    if not self._samples.room.pullers[maker.name]:
                        deserted.append(maker.name)
                else:
                    pending.append(maker.name)
        return found, deserted

    def _at(self, stage: str) -> tuple[WorkerId, ...]:
        """Who works on a stage; where nobody does, who has asked for it."""
        return tuple(self._holders.get(stage) or self._samples.room.pullers[stage]) if stage else ()

    # ---- what is listed

    def edges(self, wait_s: float) -> list[Edge]:
        """What the controller knows of: the requests that were parked first, and weights that are on their way."""
        parked = heapq.nsmallest(MOST_WAITS, self._samples.room.all(), key=attrgetter("since_s"))
        edges = [self._edge(one, wait_s) for one in parked]
        for versions in self._models.of.values():
            edges += self._fetches(versions)
        return edges

    def told(self) -> list[Edge]:
        """What the workers themselves say that they wait for: tensors on a lane, other ranks."""
        return [
            Edge(member.id, one.what, (one.turn,), one.age_s + self._now - member.told_s, one.limit_s, blocks=False)
            for member in self._roster.members()
            for one in member.waits
        ]

    def _edge(self, parked: Parked[Pull] | Parked[Offer], wait_s: float) -> Edge:
        turn, moves = self.turn(parked)
        what, age_s = self._samples.why(parked), self._now - parked.since_s
        if not turn and isinstance(parked.request, Pull):
            deserted = self._walk_up(parked.request.stage)[1]
            what += "".join(f", and nobody asks for what is ready for {stage}" for stage in deserted)
        return Edge(parked.worker, what, turn, age_s, wait_s, blocks=not moves)

    def _fetches(self, versions: ModelVersions) -> list[Edge]:
        found = []
        for worker, fetch in versions.fetching.items():
            what = f"version {fetch.weights.version} of {versions.model}"
            since_s = self._models.began_s.get((versions.model, worker), self._now)
            found.append(Edge(worker, what, (fetch.holder,), self._now - since_s, float("inf"), blocks=False))
        return found

    def standing(self, member: Member, waiting: set[str]) -> Standing:
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
        return Standing(member.id, member.role, state, self._now - member.heard_s, holds)


def wait_graph(
    flow: Dataflow, samples: Samples, models: Models, roster: Roster, now: float, wait_s: float = float("inf")
) -> WaitGraph:
    """The graph at this moment; ``wait_s`` is how long a worker waits for an answer."""
    reading = Reading(flow, samples, models, roster, now)
    known = reading.edges(wait_s)
    edges = sorted(known + reading.told(), key=attrgetter("age_s"), reverse=True)
    waiting = {edge.who for edge in edges}
    members = [member for member in roster.members() if member.role != OBSERVER]
    standings = [reading.standing(member, waiting) for member in members[:MOST_WORKERS]]
    parked = sum(1 for _ in samples.room.all())
    more = max(len(edges) - MOST_WAITS, 0) + max(parked - MOST_WAITS, 0)
    knots = find_knots(known, reading.held)
    return WaitGraph(tuple(standings), tuple(edges[:MOST_WAITS]), knots, more, max(len(members) - MOST_WORKERS, 0))
