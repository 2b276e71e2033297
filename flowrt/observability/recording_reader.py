"""Reader of the recordings of a run: their terms, their extent, and their events.

A term is one controller process of the run; a restarted controller or a resumed run begins a new term. The times of
events are on the run clock: seconds since the start of the run.
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
    UnfinishedBlock,
    unpack_header,
)
from flowrt.errors import ConfigError, FlowError

_SEGMENT = re.compile(r"(\d{4,})-(\d{4,})\.fr")
FIRST_TERM = 1
MALFORMED = (ValueError, TypeError, LookupError, OverflowError, RecursionError, FlowError)
"""Exceptions that decoding a malformed block can raise."""


@dataclass(frozen=True, slots=True)
class Extent:
    """The recorded part of a term."""

    events: int
    first_s: float
    last_s: float
    """Seconds on the run clock at the first and the last event."""
    damage: str
    """Why no events after the last one can be read; empty if there is no damage."""
    stopped: str
    """Why the recording was stopped during the run; empty if it was not stopped."""
    unfinished: str
    """Where the last segment ends within a block; empty if it does not."""
    is_complete: bool
    """Whether the controller ended the recording; if not, it is running, was killed, or stopped recording."""


class TermRecording:
    """The recording of one term."""

    def __init__(self, term: int, segments: dict[int, Path]) -> None:
        """Read the header. Raises FlowError or OSError if it cannot be read.

        Args:
            term: number of the term.
            segments: files of the term by segment number.
        """
        self.term = term
        self._segments = segments
        self.header = self._read_header()
        self.damage = ""
        self.stopped = ""
        self.unfinished = ""
        self.is_complete = False

    @property
    def paths(self) -> list[Path]:
        """The segment files, in order."""
        return [self._segments[number] for number in sorted(self._segments)]

    def _read_header(self) -> Header:
        path = self._segments.get(0)
        if path is None:
            raise FlowError(f"the first segment of term {self.term} is missing")
        reader = BlockReader(path)
        try:
            content = reader.read()  # its errors name the file
        finally:
            reader.close()
        if not content or content[0] != BEGIN:
            raise FlowError(f"{path} has no header")
        try:
            return unpack_header(content[4])
        except MALFORMED as error:
            raise FlowError(f"{path} cannot be read from its beginning: {error}") from error

    def blocks(self) -> Iterator[EventBlock]:
        """Yield the blocks of events up to the last complete one.

        Afterwards ``damage``, ``stopped``, ``unfinished`` and ``is_complete`` say why there are no more.
        """
        self.damage = self.stopped = self.unfinished = ""
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
            except UnfinishedBlock as error:
                if number == max(self._segments):
                    self.unfinished = f"{error}: its controller was killed, or is writing it"
                else:
                    self.damage = str(error)
                return
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
        """The extent of the term; reads all of its blocks, without decoding messages."""
        events, first_s, last_s = 0, 0.0, 0.0
        for block in self.blocks():
            if not block.times:
                continue
            if not events:
                first_s = block.times[0] - self.header.start_s
            events += len(block.times)
            last_s = block.times[-1] - self.header.start_s
        return Extent(events, first_s, last_s, self.damage, self.stopped, self.unfinished, self.is_complete)


@dataclass(frozen=True, slots=True)
class Recordings:
    """All recordings of a run."""

    terms: dict[int, TermRecording]
    """By number, ascending; only terms whose header can be read."""
    unreadable: dict[int, str]
    """For each other term, why its header cannot be read."""

    @classmethod
    def of(cls, run_dir: Path) -> "Recordings":
        """The recordings in a run directory. Raises ConfigError if none can be read."""
        if not run_dir.is_dir():
            raise ConfigError(f"there is no run directory {run_dir}; name the directory of a run")
        directory = run_dir / DIRECTORY
        segments: dict[int, dict[int, Path]] = {}
        for path in sorted(directory.glob("*.fr")):
            if name := _SEGMENT.fullmatch(path.name):
                segments.setdefault(int(name[1]), {})[int(name[2])] = path
        if not segments:
            raise ConfigError(
                f"{run_dir} has no recording: it is no run, its controller has not started, or it ran with "
                "recorder.mb 0"
            )
        terms: dict[int, TermRecording] = {}
        unreadable: dict[int, str] = {}
        for term in sorted(segments):
            try:
                terms[term] = TermRecording(term, segments[term])
            except (FlowError, OSError) as error:
                unreadable[term] = str(error)
        if not terms:
            raise ConfigError(f"no recording of {run_dir} can be read: {'; '.join(unreadable.values())}")
        return cls(terms, unreadable)

    def of_term(self, number: int) -> TermRecording:
        """The recording of a term. Raises ConfigError if there is none with this number that can be read."""
        if number in self.unreadable:
            raise ConfigError(f"term {number} cannot be replayed: {self.unreadable[number]}")
        if number not in self.terms:
            there = ", ".join(map(str, self.terms))
            raise ConfigError(f"there is no term {number} in the recording; there is: {there}")
        return self.terms[number]

    def at(self, at_s: float) -> TermRecording:
        """The term that was recorded at a time of the run clock (seconds).

        It is the latest one if a resumed run went back to before this time. The first term counts from 0 s, before its
        first event.

        Raises ConfigError, with the nearest bounds, if nothing was recorded at this time.
        """
        extents = {number: recording.extent() for number, recording in self.terms.items()}
        for number in reversed(self.terms):
            first_s = 0.0 if number == FIRST_TERM else extents[number].first_s
            if extents[number].events and first_s <= at_s <= extents[number].last_s:
                return self.terms[number]
        known = [(number, extent) for number, extent in extents.items() if extent.events]
        if not known:
            raise ConfigError("the recording has no event yet")
        before = [(extent.last_s, number) for number, extent in known if extent.last_s < at_s]
        after = [(extent.first_s, number) for number, extent in known if extent.first_s > at_s]
        bounds = [f"term {max(before)[1]} ends at {max(before)[0]:.3f} s"] if before else []
        bounds += [f"term {min(after)[1]} begins at {min(after)[0]:.3f} s"] if after else []
        raise ConfigError(f"nothing is recorded at {at_s:g} s of the run: {', '.join(bounds)}")
