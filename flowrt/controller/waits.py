"""Requests that cannot be answered yet. Nobody polls: whatever changes the board looks here again."""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from flowrt.ids import WorkerId
from flowrt.wire.messages import Offer, Pull

Request = TypeVar("Request")


@dataclass(slots=True)
class Parked(Generic[Request]):
    """A request, since when it waits, and what for (kept up to date for ``flowrt status``)."""

    worker: WorkerId
    request: Request
    since_s: float
    waits_for: str = ""


class WaitingRoom:
    """Parked pulls by stage and parked offers, each in order of arrival."""

    def __init__(self) -> None:
        self.pulls: dict[str, list[Parked[Pull]]] = defaultdict(list)
        self.offers: list[Parked[Offer]] = []

    def park_pull(self, worker: WorkerId, pull: Pull, now: float) -> None:
        self.pulls[pull.stage].append(Parked(worker, pull, now))

    def park_offer(self, worker: WorkerId, offer: Offer, now: float) -> None:
        self.offers.append(Parked(worker, offer, now))

    def serve_pulls(self, stage: str, serve: Callable[[Parked[Pull]], bool]) -> None:
        """Try each parked pull of the stage; those that ``serve`` answers leave."""
        waiting = self.pulls.get(stage)
        if waiting:
            self.pulls[stage] = [parked for parked in waiting if not serve(parked)]

    def serve_offers(self, serve: Callable[[Parked[Offer]], bool]) -> None:
        """Try the parked offers in order; behind one that has to go on waiting, the prompts of its flow wait too."""
        blocked: set[str] = set()
        still = []
        for parked in self.offers:
            if parked.request.flow in blocked or not serve(parked):
                blocked.add(parked.request.flow)
                still.append(parked)
        self.offers = still

    def forget(self, worker: WorkerId) -> None:
        self.offers = [parked for parked in self.offers if parked.worker != worker]
        for stage, waiting in self.pulls.items():
            self.pulls[stage] = [parked for parked in waiting if parked.worker != worker]

    def waiting(self) -> list[tuple[WorkerId, str, float]]:
        """Who waits, for what, since when."""
        pulls = [(one.worker, one.waits_for, one.since_s) for waiting in self.pulls.values() for one in waiting]
        return pulls + [(one.worker, one.waits_for, one.since_s) for one in self.offers]
