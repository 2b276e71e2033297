"""Requests that cannot be answered yet. They are not polled: the worklist names those to be tried again."""

import heapq
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from operator import attrgetter
from typing import Generic, TypeVar

from flowrt.controller.events import Command
from flowrt.errors import RemoteProtocolError
from flowrt.ids import WorkerId
from flowrt.protocol.messages import Offer, Pull

Request = TypeVar("Request", Offer, Pull)
RequestId = tuple[WorkerId, int]
MOST_OPEN = 100_000
"""Maximum number of parked requests of one worker; high, because a large evaluation is offered at once."""
FULL = f"{MOST_OPEN} requests of this worker wait for their answers already; ask again when some have come"


@dataclass(slots=True)  # one for every message: not frozen, because creating a frozen one takes three times as long
class ParkedRequest(Generic[Request]):
    """A request and the time since which it waits."""

    worker: WorkerId
    request: Request
    since_s: float
    refused: tuple[int, ...] = ()  # leases that the pull reported as done after they had ended


class ParkedRequests:
    """Parked pulls by stage and parked offers by flow, each in order of arrival."""

    def __init__(self, stages: Iterable[str] = ()) -> None:
        self._pulls: dict[str, dict[RequestId, ParkedRequest[Pull]]] = defaultdict(dict)
        # By flow. The first of a dict of which the first are deleted is not found in constant time.
        self.offers = 0
        """Number of parked offers. An attribute: most events read it."""
        self._offers: defaultdict[str, OrderedDict[RequestId, ParkedRequest[Offer]]] = defaultdict(OrderedDict)
        self.pullers: dict[str, dict[WorkerId, None]] = {stage: {} for stage in stages}  # connected, ever pulled
        self.offerers: dict[WorkerId, None] = {}  # connected workers that have ever offered
        self._of: dict[WorkerId, dict[int, ParkedRequest[Pull] | ParkedRequest[Offer]]] = defaultdict(dict)
        self.changed: dict[WorkerId, None] = {}
        """Workers whose parked requests have changed since `take_changed`. An attribute: every event reads it."""

    def is_full(self, worker: WorkerId) -> bool:
        """Whether no further request of this worker may be parked."""
        return len(self._of[worker]) >= MOST_OPEN

    def check_new(self, worker: WorkerId, request: int, stage: str = "") -> None:
        """Record the worker as a puller of the stage, if there is one. Raises RemoteProtocolError if a request of this
        worker with the same number is parked already.
        """
        if request in self._of[worker]:
            raise RemoteProtocolError(f"{worker} asked under number {request}, under which it is still waiting")
        if stage in self.pullers:
            self.pullers[stage][worker] = None

    def has_pulls(self, stage: str) -> bool:
        return bool(self._pulls[stage])

    def park_pull(self, parked: ParkedRequest[Pull]) -> None:
        self._pulls[parked.request.stage][parked.worker, parked.request.request] = parked
        self._of[parked.worker][parked.request.request] = parked
        self.changed[parked.worker] = None

    def park_offer(self, parked: ParkedRequest[Offer]) -> None:
        self._offers[parked.request.flow][parked.worker, parked.request.request] = parked
        self.offers += 1
        self._of[parked.worker][parked.request.request] = parked
        self.changed[parked.worker] = None

    def take_out(self, worker: WorkerId, request: int) -> ParkedRequest[Pull] | ParkedRequest[Offer] | None:
        """Remove and return a request; None if it is not parked any more."""
        parked = self._of[worker].pop(request, None)
        if parked is None:
            return None
        self.changed[worker] = None
        if isinstance(parked.request, Pull):
            del self._pulls[parked.request.stage][worker, request]
        else:
            del self._offers[parked.request.flow][worker, request]
            self.offers -= 1
        return parked

    def serve_pulls(
        self, stage: str, serve: Callable[[ParkedRequest[Pull]], list[Command]], more: Callable[[], bool]
    ) -> list[Command]:
        """Try the parked pulls of a stage in order while ``more()``; those that ``serve`` answers are removed.

        Returns the commands of all answers; a pull for which ``serve`` returns no command stays parked.
        """
        commands: list[Command] = []
        answered = []
        for parked in self._pulls[stage].values():
            if not more():
                break
            if answer := serve(parked):
                commands += answer
                answered.append(parked)
        for parked in answered:
            self.take_out(parked.worker, parked.request.request)
        return commands

    def serve_offers(self, serve: Callable[[ParkedRequest[Offer]], list[Command]]) -> list[Command]:
        """As `serve_pulls`, for all parked offers; an offer that stays parked blocks the later ones of its flow."""
        commands: list[Command] = []
        for offers in self._offers.values():
            while offers:
                parked = next(iter(offers.values()))
                answer = serve(parked)
                if not answer:
                    break
                commands += answer
                self.take_out(parked.worker, parked.request.request)
        return commands

    def oldest(self, count: int) -> list[ParkedRequest[Pull] | ParkedRequest[Offer]]:
        """The ``count`` requests that have waited longest, the longest first."""
        first: list[ParkedRequest[Pull] | ParkedRequest[Offer]] = []
        for offers in self._offers.values():
            first += islice(offers.values(), count)
        for pulls in self._pulls.values():
            first += islice(pulls.values(), count)
        return heapq.nsmallest(count, first, key=attrgetter("since_s"))

    def waiting(self) -> set[WorkerId]:
        """The workers with a parked request."""
        return {worker for worker, parked in self._of.items() if parked}

    def __len__(self) -> int:
        return sum(map(len, self._pulls.values())) + self.offers

    def of(self, worker: WorkerId) -> list[ParkedRequest[Pull] | ParkedRequest[Offer]]:
        """The parked requests of a worker."""
        return list(self._of[worker].values())

    def forget(self, worker: WorkerId) -> None:
        """Remove a worker and its requests."""
        for request in list(self._of[worker]):
            self.take_out(worker, request)
        del self._of[worker]
        for asked in (self.offerers, *self.pullers.values()):
            asked.pop(worker, None)

    def first(self, worker: WorkerId) -> ParkedRequest[Pull] | ParkedRequest[Offer] | None:
        """The request of a worker that has been parked for the longest time; None if it has none."""
        requests = self._of.get(worker)
        return next(iter(requests.values())) if requests else None

    def waiting_pullers(self) -> Iterator[tuple[str, list[WorkerId]]]:
        """The stages with parked pulls, and the senders of the pulls; a worker may be named more than once."""
        for stage, pulls in self._pulls.items():
            if pulls:
                yield stage, [worker for worker, _ in pulls]

    def waiting_offerers(self) -> list[WorkerId]:
        """The workers that offer prompts and have parked requests."""
        return [worker for worker in self.offerers if self._of.get(worker)]

    def is_offer_parked(self, flow: str) -> bool:
        """Whether an offer to this flow is parked."""
        return bool(self._offers.get(flow))

    def take_changed(self) -> list[WorkerId]:
        """Workers whose parked requests have changed since the last call."""
        changed = list(self.changed)
        self.changed.clear()
        return changed

    def all(self) -> Iterator[ParkedRequest[Pull] | ParkedRequest[Offer]]:
        """All parked requests."""
        for requests in self._of.values():
            yield from requests.values()

    def parked(self) -> tuple[set[RequestId], set[RequestId]]:
        """(worker, request number) of all parked pulls, and of all parked offers; `all` has the same requests."""
        pulls = {request for waiting in self._pulls.values() for request in waiting}
        return pulls, {request for waiting in self._offers.values() for request in waiting}
