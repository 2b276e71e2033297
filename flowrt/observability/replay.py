"""Replay of a recording: a core in this process handles the recorded events, and its commands are compared.

- The core decides from its events alone, so its state after the first n events is that of the controller at that time.
- A condition on a replayed state, such as ``wait > 60``, is a measurement, a comparison and a number.
"""

import operator
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from math import inf, isfinite
from pathlib import Path
from threading import Lock
from time import monotonic
from typing import Any

from flowrt.controller.core import Core
from flowrt.controller.diagnostics.status import status
from flowrt.controller.events import Command, Event, MessageReceived
from flowrt.controller.storage.recording_format import (
    CommandDigest,
    EventBlock,
    read_event,
    sources_digest,
)
from flowrt.errors import PROGRAMMING_ERRORS, ConfigError, FlowError, suggested
from flowrt.observability.recording_reader import MALFORMED, Recordings, TermRecording
from flowrt.recipes import grpo
from flowrt.recipes.config_io import from_toml

MAX_LEASES = 1000
"""Maximum number of leases in a status."""


@dataclass(frozen=True, slots=True)
class ReplayedEvent:
    """An event with its number (from 0), and the commands that the core returned."""

    number: int
    now: float
    """Seconds on the clock of the controller."""
    event: Event
    commands: list[Command]
    error: str
    """The exception of the core at this event, as text; empty if there was none."""


class Replay:
    """The replay of one term, event by event."""

    def __init__(
        self, recording: TermRecording, *, core: Core | None = None, force: bool = False, check: bool = False
    ) -> None:
        """Build the core in its state at the beginning of the term.

        Args:
            recording: the term to replay.
            core: a core with the recorded inputs; None: built by the recipe from the recorded configuration.
            force: replay also with other sources than those of the controller, and continue after commands that differ.
            check: check all invariants of the state after each event.

        Raises: ConfigError if the recording was made by other sources, unless forced, or its configuration cannot be
        read.
        """
        header = recording.header
        if header.sources != sources_digest() and not force:
            raise ConfigError(
                f"term {recording.term} was recorded by flowrt {header.version} with sources {header.sources}, and "
                f"these are {sources_digest()}: other sources may decide otherwise; replay with those, or show it "
                "anyway with --force"
            )
        self.recording = recording
        self._request_timeout_s = float("inf")
        if core is None:
            config = from_toml(header.inputs.config)
            self._request_timeout_s = grpo.request_timeout_s(config)
            core = grpo.core(config, header.inputs)
        self.core = core
        self.now = header.start_s
        self.events = 0
        """Number of events replayed so far."""
        self.mismatch = ""
        """The first difference from the recorded commands, as a sentence; empty if there is none."""
        self._force = force
        self._check = check
        self._digest = CommandDigest()
        self._names: list[str] = []
        self._is_over = False
        self._source = self._recorded()
        self._next: tuple[EventBlock, int] | None = None

    @property
    def is_over(self) -> bool:
        """Whether all events that can be read have been replayed."""
        return self._is_over

    @property
    def at_s(self) -> float:
        """Time of the latest event on the run clock, in seconds."""
        return self.now - self.recording.header.start_s

    def run(self, until_s: float = float("inf")) -> Iterator[ReplayedEvent]:
        """Replay the remaining events up to a time of the run clock (seconds), and yield each.

        Raises: FlowError if an event cannot be read, commands differ (unless forced), or an invariant is violated.
        """
        while True:
            if self._next is None and (following := next(self._source, None)) is not None:
                self._next = following
            if self._next is None:
                self._is_over = True
                return
            block, index = self._next
            if block.times[index] - self.recording.header.start_s > until_s:
                return
            self._next = None
            done = self._apply(block, index)
            if index == len(block.kinds) - 1 and block.digest != self._digest.value():
                self._differ(
                    f"the commands up to event {done.number}, from event {block.first} on, are not those of the run"
                )
            yield done

    def _recorded(self) -> Iterator[tuple[EventBlock, int]]:
        """All recorded events, each as its block and its index in the block."""
        for block in self.recording.blocks():
            self._names += block.names
            for index in range(len(block.kinds)):
                yield block, index

    def _apply(self, block: EventBlock, index: int) -> ReplayedEvent:
        number, now = self.events, block.times[index]
        kind, worker = block.kinds[index], block.workers[index]
        try:
            event = read_event(kind, self._names[worker] if worker < len(self._names) else "", block.data[index])
        except MALFORMED as error:
            raise FlowError(f"event {number} of term {self.recording.term} cannot be read: {error}") from error
        commands: list[Command] = []
        failed = ""
        try:
            returned = self.core.handle(event, now)
            self._digest.add_unencoded(returned)
            commands = returned
        except (*PROGRAMMING_ERRORS, FlowError) as error:  # as in the controller, which then ended the run
            failed = repr(error)
        self.events += 1
        self.now = now
        if len(commands) != block.counts[index]:
            self._differ(
                f"event {number} ({describe(event)}) leads to {len(commands)} commands, in the run to "
                f"{block.counts[index]}" + (f"; the core fails with {failed}" if failed else "")
            )
        if self._check:
            try:
                self.core.check()
            except AssertionError as error:
                raise FlowError(
                    f"after event {number} ({describe(event)}) an invariant is violated: {error}"
                ) from error
        return ReplayedEvent(number, now, event, commands, failed)

    def _differ(self, what: str) -> None:
        if self.mismatch:
            return
        self.mismatch = f"term {self.recording.term}: {what}"
        if not self._force:
            raise FlowError(f"the replay differs from the run: {self.mismatch}")

    def status(self, at_s: float | None = None) -> dict[str, Any]:
        """Status, wait-for graph, causes of waits and leases at a time, as JSON.

        Args:
            at_s: the time on the run clock, in seconds; None, or earlier than the latest event: that of the latest
                event.
        """
        now = self.now if at_s is None else max(self.now, self.recording.header.start_s + at_s)
        shown = status(
            core=self.core, now=now, request_timeout_s=self._request_timeout_s, latest={}, numbers={}, cut_off={}
        )
        leases = self.core.state.table.leases.values()
        waits = self.core.waits.open_waits(now)
        return {
            "term": self.recording.term,
            "events": self.events,
            "at_s": round(now - self.recording.header.start_s, 6),
            **shown,
            "slots": slots_by_stage(self.core),
            "causes": [[wait.worker, wait.cause.value, wait.root, round(now - wait.start_s, 3)] for wait in waits],
            "leases": [
                {
                    "worker": lease.worker,
                    "stage": lease.stage,
                    "lease": lease.id,
                    "step": lease.step,
                    "left_s": round(lease.deadline_s - now, 3) if isfinite(lease.deadline_s) else None,
                    "samples": [[slot.group.epoch, slot.group.prompt, slot.member] for slot in lease.slots.values()],
                }
                for lease in islice(leases, MAX_LEASES)
            ],
            "more_leases": max(len(leases) - MAX_LEASES, 0),
        }


def slots_by_stage(core: Core) -> dict[str, dict[str, int]]:
    """For each stage, the numbers of live slots for which it is done, at work (leased) and not begun."""
    table = core.state.table
    counts = {stage: {"done": 0, "at_work": 0, "not_begun": 0} for stage in table.stages}
    for slot in table.slots.values():
        for stage in table.flows.of(slot.group.flow):
            is_done = table.is_done(slot, stage.name)
            name = "done" if is_done else "at_work" if stage.name in slot.leases else "not_begun"
            counts[stage.name][name] += 1
    return counts


def describe(event: Event) -> str:
    """The event in one line, for messages."""
    if isinstance(event, MessageReceived):
        stage = getattr(event.message, "stage", "")
        return f"{type(event.message).__name__}{f' of {stage}' if stage else ''} from {event.worker}"
    who = f" of {event.worker}" if hasattr(event, "worker") else ""
    why = f": {event.reason}" if hasattr(event, "reason") else ""
    return f"{type(event).__name__}{who}{why}"


def replay_until(replay: Replay, holds: Callable[[Replay], bool]) -> bool:
    """Replay until ``holds`` is true after an event; returns False if no event remains."""
    return any(holds(replay) for _ in replay.run())


def replay_to(replay: Replay, event: int) -> None:
    """Replay up to and including this event. Raises ConfigError if the term has fewer events."""
    for done in replay.run():
        if done.number == event:
            return
    raise ConfigError(f"term {replay.recording.term} has no event {event}: it has {replay.events}, numbered from 0")


class Instants:
    """States of one run at several times, in any thread; a later time continues the replay of an earlier one."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._replay: Replay | None = None
        self._aim: tuple[float, TermRecording] | None = None  # time and term of a replay in progress
        self._lock = Lock()

    def status_at(self, at_s: float, limit_s: float = inf) -> dict[str, Any]:
        """As the function `status_at`; ``{"reached_s": SECONDS}`` if the replay needs more than ``limit_s`` seconds.

        A further call with the same time continues the replay.
        """
        end_s = monotonic() + limit_s
        with self._lock:
            aim, self._aim = self._aim, None
            recording = aim[1] if aim is not None and aim[0] == at_s else Recordings.of(self._run_dir).at(at_s)
            replay, self._replay = self._replay, None  # dropped if this call fails
            # A replay that is over may lack events that a live run has recorded since.
            if replay is None or replay.recording.term != recording.term or replay.is_over or replay.at_s > at_s:
                replay = Replay(recording)
            for _ in replay.run(at_s):
                if monotonic() > end_s:
                    self._replay, self._aim = replay, (at_s, recording)
                    return {"reached_s": round(replay.at_s, 3)}
            self._replay = replay
            return replay.status(at_s)


@lru_cache(maxsize=1)
def _instants(run_dir: Path) -> Instants:
    return Instants(run_dir)


def status_at(run_dir: Path, at_s: float) -> dict[str, Any]:
    """Status, wait-for graph, causes of waits and leases at a time of the run clock (seconds), as JSON.

    Raises: ConfigError if nothing was recorded at that time or other sources recorded it, FlowError if the replay
    differs from the run.
    """
    return _instants(run_dir).status_at(at_s)


def _oldest_wait_s(replay: Replay) -> float:
    return max((replay.now - since_s for _, _, since_s in replay.core.waiting()), default=0.0)


MEASUREMENTS: Mapping[str, Callable[[Replay], float]] = {
    "wait": _oldest_wait_s,
    "step": lambda replay: replay.core.state.window.step,
    "live_groups": lambda replay: replay.core.state.window.live,
    "leases": lambda replay: len(replay.core.state.table.leases),
    "workers": lambda replay: len(replay.core.state.membership.members()),
    "dropped": lambda replay: sum(dict(replay.core.state.dropped).values()),
    "ended": lambda replay: replay.core.ended is not None,
}
"""``wait``: age of the oldest open wait, in seconds; ``ended``: 1 once the run has ended, else 0."""
_COMPARISONS: Mapping[str, Callable[[float, float], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    "==": operator.eq,
    ">": operator.gt,
    "<": operator.lt,
}
_CONDITION = re.compile(r"\s*(\w+)\s*(>=|<=|==|>|<)\s*([0-9]+(?:\.[0-9]*)?)\s*")


def condition(text: str) -> Callable[[Replay], bool]:
    """The condition that a text states, as a function of a replay. Raises ConfigError if it is malformed."""
    match = _CONDITION.fullmatch(text)
    if match is None:
        raise ConfigError(
            f"--until {text!r:.80} is no condition; write NAME > NUMBER (or >=, <, <=, ==), with NAME one of "
            f"{', '.join(MEASUREMENTS)}"
        )
    if match[1] not in MEASUREMENTS:
        raise ConfigError(f"--until {text!r:.80}: {match[1]!r:.80} is not measured{suggested(match[1], MEASUREMENTS)}")
    measure, compare, bound = MEASUREMENTS[match[1]], _COMPARISONS[match[2]], float(match[3])
    return lambda replay: compare(measure(replay), bound)
