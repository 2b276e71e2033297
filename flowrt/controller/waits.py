"""Requests that cannot be answered yet. Nobody polls: what changes the board says whom to look at again."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from flowrt.errors import RemoteProtocolError
from flowrt.ids import WorkerId
from flowrt.wire.messages import Offer, Pull

Request = TypeVar("Request", Offer, Pull)
RequestId = tuple[WorkerId, int]
MOST_OPEN = 100_000
"""Requests of one worker that may wait: a large evaluation is offered at once, and only a flood is larger."""
FULL = f"{MOST_OPEN} requests of this worker wait for their answers already; ask again when some have come"


@dataclass(slots=True)  # not frozen: one is made for every message, and that takes three times as long
class Parked(Generic[Request]):
    """A request, and since when it waits."""

    worker: WorkerId
    request: Request
    since_s: float
    refused: tuple[int, ...] = ()  # leases that a pull said were done, too late


class WaitingRoom:
    """Parked pulls by stage and parked offers, each in order of arrival."""

    def __init__(self, stages: Iterable[str] = ()) -> None:
        self._pulls: dict[str, dict[RequestId, Parked[Pull]]] = defaultdict(dict)
        self._offers: dict[RequestId, Parked[Offer]] = {}
        self.pullers: dict[str, dict[WorkerId, None]] = {stage: {} for stage in stages}  # who has ever asked for slots
        self.offerers: dict[WorkerId, None] = {}  # and who has ever offered
        self._of: dict[WorkerId, dict[int, Parked[Pull] | Parked[Offer]]] = defaultdict(dict)

    def is_full(self, worker: WorkerId) -> bool:
        """Whether so many requests of this worker wait that no more of them are parked."""
        return len(self._of[worker]) >= MOST_OPEN

    def check_new(self, worker: WorkerId, request: int, stage: str = "") -> None:
        """Raises RemoteProtocolError when this worker waits under that number already: one of the two would be lost."""
        if request in self._of[worker]:
            raise RemoteProtocolError(f"{worker} asked under number {request}, under which it is still waiting")
        if stage in self.pullers:
            self.pullers[stage][worker] = None

    @property
    def has_offers(self) -> bool:
        return bool(self._offers)

    def has_pulls(self, stage: str) -> bool:
        return bool(self._pulls[stage])

    def park_pull(self, parked: Parked[Pull]) -> None:
        self._pulls[parked.request.stage][parked.worker, parked.request.request] = parked
        self._of[parked.worker][parked.request.request] = parked

    def park_offer(self, parked: Parked[Offer]) -> None:
        self._offers[parked.worker, parked.request.request] = parked
        self._of[parked.worker][parked.request.request] = parked

    def take_out(self, worker: WorkerId, request: int) -> Parked[Pull] | Parked[Offer] | None:
        """Remove a request, if it is still parked."""
        parked = self._of[worker].pop(request, None)
        if parked is None:
            return None
        if isinstance(parked.request, Pull):
            del self._pulls[parked.request.stage][worker, request]
        else:
            del self._offers[worker, request]
        return parked

    def serve_pulls(self, stage: str, serve: Callable[[Parked[Pull]], bool], more: Callable[[], bool]) -> None:
        """Try the parked pulls of the stage in order while there is ``more``; those that ``serve`` answers leave."""
        if not (waiting := self._pulls[stage]):
            return
        answered = []
        for parked in waiting.values():
            if not more():
                break
            if serve(parked):
                answered.append(parked)
        for parked in answered:
            self.take_out(parked.worker, parked.request.request)

    def serve_offers(self, serve: Callable[[Parked[Offer]], bool]) -> None:
        """Try the parked offers in order; behind one that has to go on waiting, the prompts of its flow wait too."""
        if not self._offers:
            return
        blocked: set[str] = set()
        for parked in list(self._offers.values()):
            flow = parked.request.flow
            if flow in blocked:
                continue
            if serve(parked):
                self.take_out(parked.worker, parked.request.request)
            else:
                blocked.add(flow)

    def of(self, worker: WorkerId) -> list[Parked[Pull] | Parked[Offer]]:
        """What this worker waits for."""
        return list(self._of[worker].values())

    def forget(self, worker: WorkerId) -> None:
        """The worker is gone, and with it all that it asked for."""
        for request in list(self._of[worker]):
            self.take_out(worker, request)
        del self._of[worker]
        for asked in (self.offerers, *self.pullers.values()):
            asked.pop(worker, None)

    def all(self) -> Iterator[Parked[Pull] | Parked[Offer]]:
        """Everything that is parked."""
        for requests in self._of.values():
            yield from requests.values()

    def parked(self) -> tuple[set[RequestId], set[RequestId]]:
        """The pulls and the offers that events look at; `all` has the same ones by worker."""
        return {one for waiting in self._pulls.values() for one in waiting}, set(self._offers)
