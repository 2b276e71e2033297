"""What a worker has said only once, or holds the right to, and has to tell a controller that has come back."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from flowrt.wire import messages as m


@dataclass(slots=True)
class _Work:
    """A lease, and of its slots those that are neither committed nor given back, with their attempts."""

    stage: str
    step: int
    slots: dict[int, int]


class Memory:
    """Leases of ``renewable`` stages, the last step, and what is said once in a run."""

    def __init__(self, renewable: Collection[str]) -> None:
        self._renewable = frozenset(renewable)
        self._work: dict[int, _Work] = {}
        self._steps: dict[int, m.StepDone] = {}
        self._exhausted: dict[str, None] = {}
        self._finished = False
        self._numbers: dict[str, float] = {}

    def granted(self, pull: m.Pull, grant: m.Grant) -> None:
        """A pull was answered. That its step has begun says that those before are closed for good."""
        if pull.stage not in self._renewable:
            return
        if pull.step >= 0:
            self._work = {lease: work for lease, work in self._work.items() if not 0 <= work.step < pull.step}
            self._steps = {step: done for step, done in self._steps.items() if step >= pull.step}
        if grant.slots:
            slots = dict(zip(grant.slots, grant.attempts, strict=True))
            self._work[grant.lease] = _Work(pull.stage, pull.step, slots)

    def ended(self, slots: Sequence[int], leases: Sequence[int]) -> None:
        """These are committed or given back."""
        if not self._work:
            return
        for slot, lease in zip(slots, leases, strict=True):
            work = self._work.get(lease)
            if work is not None and work.slots.pop(slot, None) is not None and not work.slots:
                del self._work[lease]

    def step_done(self, done: m.StepDone) -> None:
        self._steps[done.step] = done

    def exhausted(self, flow: str) -> None:
        self._exhausted[flow] = None

    def finished(self) -> None:
        self._finished = True

    def reported(self, numbers: Mapping[str, float]) -> None:
        self._numbers.update(numbers)

    def leases(self) -> Iterator[m.Renew]:
        """The work in hand."""
        for lease, work in self._work.items():
            yield m.Renew(lease, work.stage, work.step, tuple(work.slots), tuple(work.slots.values()))

    def again(self) -> Iterator[m.Message]:
        """Everything else; the controller knows some of it, and does not mind."""
        yield from self._steps.values()
        yield from (m.Exhausted(flow) for flow in self._exhausted)
        if self._numbers:
            yield m.Report((), tuple(self._numbers.items()), ())
        if self._finished:
            yield m.Finished()
