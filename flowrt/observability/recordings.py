"""The recordings of a run: their terms, how long they are, and their events.

A term is one controller of the run; a controller that was restarted, or a run that was resumed, begins another one. The
events of a term lie on the run clock: seconds since the start of the run.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from flowrt.controller.storage.recording_format import (
    BEGIN,
    DIRECTORY,
    END,
    EVENTS,
    BlockReader,
    EventBlock,
    Header,
    unpack_header,
)
from flowrt.errors import ConfigError, FlowError

_SEGMENT = re.compile(r"(\d{4,})-(\d{4,})\.fr")
FIRST_TERM = 1
MALFORMED = (ValueError, TypeError, LookupError, OverflowError, RecursionError, FlowError)
"""What the content of a block raises that is not what it should be."""


@dataclass(frozen=True, slots=True)
class Extent:
    """How much of a term is recorded."""

    events: int
    first_s: float
    last_s: float
    """Run clock at the first and the last event."""
    damage: str
    """Why nothing after the last event can be read; empty if that is all there is."""
    stopped: str
    """Why the recording was stopped during the run; empty if it was not."""
    is_complete: bool
    """Whether the controller has ended the recording; otherwise it is running, or was killed."""


class TermRecording:
    """The recording of one term."""

    def __init__(self, term: int, segments: dict[int, Path]) -> None:
        """Raises FlowError if the beginning cannot be read.

        Args:
            term: its number.
            segments: its files by number.
        """
        self.term = term
        self._segments = segments
        self.header = self._read_header()
        self.damage = ""
        self.stopped = ""
        self.is_complete = False

    @property
    def paths(self) -> list[Path]:
        """The files in order."""
        return [self._segments[number] for number in sorted(self._segments)]

    def _read_header(self) -> Header:
        path = self._segments.get(0)
        if path is None:
            raise FlowError(f"the first segment of term {self.term} is missing")
        reader = BlockReader(path)
        try:
            content = reader.read()
            if content is None or content[0] != BEGIN:
                raise FlowError(f"{path} has no header")
            return unpack_header(content[4])
        except MALFORMED as error:
            raise FlowError(f"{path} cannot be read from its beginning: {error}") from error
        finally:
            reader.close()

    def blocks(self) -> Iterator[EventBlock]:
        """The blocks of events, up to the last one that is whole; then ``damage`` and ``stopped`` say why no more."""
        self.damage = self.stopped = ""
        self.is_complete = False
        expected = 0
        for number in range(max(self._segments) + 1):
            path = self._segments.get(number)
            if path is None:
                self.damage = f"segment {number} of term {self.term} is missing"
                return
            try:
                for block in self._segment(path):
                    if block.first != expected:
                        raise FlowError(f"{path} continues at event {block.first}, after event {expected - 1}")
                    expected += len(block.kinds)
                    yield block
            except (*MALFORMED, OSError) as error:
                self.damage = str(error)
                return
            if self.is_complete or self.stopped:
                return

    def _segment(self, path: Path) -> Iterator[EventBlock]:
        reader = BlockReader(path)
        try:
            while (content := reader.read()) is not None:
                if content[0] == EVENTS:
                    yield EventBlock.unpack(content)
                elif content[0] == END:
                    self.stopped = str(content[1])
                    self.is_complete = not self.stopped
        finally:
            reader.close()

    def extent(self) -> Extent:
        """Read through the whole term, without looking into its messages."""
        events, first_s, last_s = 0, 0.0, 0.0
        for block in self.blocks():
            if not block.times:
                continue
            if not events:
                first_s = block.times[0] - self.header.start_s
            events += len(block.times)
            last_s = block.times[-1] - self.header.start_s
        return Extent(events, first_s, last_s, self.damage, self.stopped, self.is_complete)


@dataclass(frozen=True, slots=True)
class Recordings:
    """All recordings of a run."""

    terms: dict[int, TermRecording]
    """By number, ascending; only terms whose beginning can be read."""
    unreadable: dict[int, str]
    """Why, for the others."""

    @classmethod
    def of(cls, run_dir: Path) -> "Recordings":
        """Raises ConfigError for a directory without a recording that can be read."""
        if not run_dir.is_dir():
            raise ConfigError(f"there is no run directory {run_dir}; name the directory of a run")
        directory = run_dir / DIRECTORY
        found: dict[int, dict[int, Path]] = {}
        for path in sorted(directory.glob("*.fr")):
            if name := _SEGMENT.fullmatch(path.name):
                found.setdefault(int(name[1]), {})[int(name[2])] = path
        if not found:
            raise ConfigError(
                f"{run_dir} has no recording: it is no run, its controller has not started, or it ran with "
                "recorder.mb 0"
            )
        terms: dict[int, TermRecording] = {}
        unreadable: dict[int, str] = {}
        for term in sorted(found):
            try:
                terms[term] = TermRecording(term, found[term])
            except (FlowError, OSError) as error:
                unreadable[term] = str(error)
        if not terms:
            raise ConfigError(f"no recording of {run_dir} can be read: {'; '.join(unreadable.values())}")
        return cls(terms, unreadable)

    def of_term(self, number: int) -> TermRecording:
        """Raises ConfigError if there is none of this number that can be read."""
        if number in self.unreadable:
            raise ConfigError(f"term {number} cannot be replayed: {self.unreadable[number]}")
        if number not in self.terms:
            there = ", ".join(map(str, self.terms))
            raise ConfigError(f"there is no term {number} in the recording; there is: {there}")
        return self.terms[number]

    def at(self, at_s: float) -> TermRecording:
        """The term that was recorded at this time of the run clock, the latest if a resumed run went back before it.

        The first term begins with the run, before its first event.

        Raises ConfigError that names the nearest bounds if there is none.
        """
        extents = {number: recording.extent() for number, recording in self.terms.items()}
        for number in reversed(self.terms):
            first_s = 0.0 if number == FIRST_TERM else extents[number].first_s
            if extents[number].events and first_s <= at_s <= extents[number].last_s:
                return self.terms[number]
        known = [(number, one) for number, one in extents.items() if one.events]
        if not known:
            raise ConfigError("the recording has no event yet")
        before = [(one.last_s, number) for number, one in known if one.last_s < at_s]
        after = [(one.first_s, number) for number, one in known if one.first_s > at_s]
        bounds = [f"term {max(before)[1]} ends at {max(before)[0]:.3f} s"] if before else []
        bounds += [f"term {min(after)[1]} begins at {min(after)[0]:.3f} s"] if after else []
        raise ConfigError(f"nothing is recorded at {at_s:g} s of the run: {', '.join(bounds)}")
