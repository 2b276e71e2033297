"""Resynchronisation with a restarted controller: leases to renew, and messages that were sent only once."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from flowrt.client.requests import RequestTable
from flowrt.client.weights import WeightTransfers
from flowrt.protocol import messages as m
from flowrt.transport.samples.store import TensorStore


@dataclass(slots=True)
class _Lease:
    """A lease with its open slots (neither committed nor released) and the attempt of each."""

    stage: str
    step: int
    slots: dict[int, int]


class ResyncState:
    """Leases of ``renewable`` stages, steps that may not be closed yet, and reports that are made once in a run."""

    def __init__(self, renewable: Collection[str]) -> None:
        self._renewable = frozenset(renewable)
        self._leases: dict[int, _Lease] = {}
        self._steps: dict[int, m.StepCompleted] = {}
        self._exhausted: dict[str, None] = {}
        self._finished = False
        self._numbers: dict[str, float] = {}
        self._evaluated: dict[tuple[str, int], m.Evaluated] = {}

    def granted(self, pull: m.Pull, grant: m.Grant) -> None:
        """A pull was granted. A grant for a step shows that all earlier steps are closed for good."""
        if pull.stage not in self._renewable:
            return
        if pull.step >= 0:
            self._leases = {number: lease for number, lease in self._leases.items() if not 0 <= lease.step < pull.step}
            self._steps = {step: done for step, done in self._steps.items() if step >= pull.step}
        if grant.slots:
            slots = dict(zip(grant.slots, grant.attempts, strict=True))
            self._leases[grant.lease] = _Lease(pull.stage, pull.step, slots)

    def lease_ended(self, slots: Sequence[int], leases: Sequence[int]) -> None:
        """These slots, each with its lease, are committed or released."""
        if not self._leases:
            return
        for slot, number in zip(slots, leases, strict=True):
            lease = self._leases.get(number)
            if lease is not None and lease.slots.pop(slot, None) is not None and not lease.slots:
                del self._leases[number]

    def step_done(self, done: m.StepCompleted) -> None:
        self._steps[done.step] = done

    def exhausted(self, flow: str) -> None:
        self._exhausted[flow] = None

    def finished(self) -> None:
        self._finished = True

    def reported(self, numbers: Mapping[str, float]) -> None:
        self._numbers.update(numbers)

    def evaluated(self, done: m.Evaluated) -> None:
        self._evaluated[done.name, done.version] = done

    def renewals(self) -> Iterator[m.RenewLease]:
        """Renewals of the open leases."""
        for number, lease in self._leases.items():
            yield m.RenewLease(
                lease=number,
                stage=lease.stage,
                step=lease.step,
                slots=tuple(lease.slots),
                attempts=tuple(lease.slots.values()),
            )

    def repeated_messages(self) -> Iterator[m.Message]:
        """Everything else. The controller may know some of it; receiving it twice is harmless."""
        yield from self._steps.values()
        yield from (m.EndOfData(flow) for flow in self._exhausted)
        yield from self._evaluated.values()
        if self._numbers:
            yield m.Report((), tuple(self._numbers.items()), ())
        if self._finished:
            yield m.RoleCompleted()


def resync_messages(
    resync: ResyncState, requests: RequestTable, weights: WeightTransfers, store: TensorStore
) -> Iterator[m.Message]:
    """All messages for a restarted controller, in the order in which it needs them.

    Weights in use, leases, reports, open requests (their answers may have been lost), and last the inventory of tensors
    and versions held here.
    """
    yield from weights.in_use()
    yield from resync.renewals()
    yield from resync.repeated_messages()
    yield from requests.resend_messages()
    yield m.Inventory(store.inventory(), weights.servable())
