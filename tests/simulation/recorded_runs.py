"""Simulated runs whose controllers are recorded like those of real runs, and their replay, also in other processes.

A run is identified by a number, from which `scenario` builds it again with its policies in any process.
"""

import hashlib
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from flowrt.controller.core import Core
from flowrt.controller.events import Command, Event, Send
from flowrt.controller.state.controller_restart import RecoveredState
from flowrt.controller.state.kept_samples import KeptSample
from flowrt.controller.storage.recording_format import CoreInputs
from flowrt.controller.storage.recording_writer import EventRecording
from flowrt.observability.recording_reader import Recordings, TermRecording
from flowrt.observability.replay import Replay
from flowrt.protocol.codec import encode
from flowrt.protocol.messages import Position
from tests.property.command_digests import scenario
from tests.simulation.cluster import SimulatedCluster, make_core
from tests.simulation.state_dump import snapshot

STRIDE = 40
"""Number of events between two compared states."""
MAX_STEP_S = 1e-3
LIMIT_BYTES = 1 << 30
KEPT = tuple(
    KeptSample(epoch=0, prompt=prompt, member=0, oldest=0, journal="journals/1/gone/0.journal") for prompt in range(4)
)
"""What the journals of an earlier start have, in the runs with journals."""
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def state_digest(core: Core, now: float) -> str:
    """Digest of the whole state and of the waits that the controller reports."""
    state = snapshot(core) + repr(core.wait_graph(now).sentences(100))
    return hashlib.sha256(_ADDRESS.sub("", state).encode()).hexdigest()


class RecordedCore:
    """Records one core: `Core.handle` and `Core.transition` are replaced by methods that record."""

    def __init__(self, core: Core, recording: EventRecording, states: dict[str, str], term: int) -> None:
        self._core = core
        self._recording = recording
        self._states = states
        self._term = term
        self._events = 0
        self._transition = core.transition
        self._handle = core.handle
        self._is_handling = False
        core.transition = self.transition  # type: ignore[method-assign]
        core.handle = self.handle  # type: ignore[method-assign]

    def transition(self, event: Event, now: float) -> list[Command]:
        """A refused event is not recorded: it has changed nothing."""
        commands = self._transition(event, now)
        if not self._is_handling:
            self._record(event, commands, now)
        return commands

    def handle(self, event: Event, now: float) -> list[Command]:
        self._is_handling = True
        try:
            commands = self._handle(event, now)
        finally:
            self._is_handling = False
        self._record(event, commands, now)
        return commands

    def _record(self, event: Event, commands: list[Command], now: float) -> None:
        encoded = [encode(command.message) if type(command) is Send else b"" for command in commands]
        self._recording.add(event, now, tuple(commands), encoded)
        if self._events % STRIDE == 0:
            self._states[f"{self._term}:{self._events}"] = state_digest(self._core, now)
        self._events += 1


class RecordedCluster(SimulatedCluster):
    """A simulated run with a recording in ``run_dir``, in which every event advances the clock."""

    def __init__(self, number: int, run_dir: Path, limit_bytes: int = LIMIT_BYTES) -> None:
        self._number = number
        self.run_dir = run_dir
        self._limit_bytes = limit_bytes
        self._times = random.Random(number)
        self.recording: EventRecording | None = None
        self.states: dict[str, str] = {}
        super().__init__(scenario(number), kept=KEPT if scenario(number).journals else ())

    def _make_core(self, position: Position | None, term: int = 1, recovered: RecoveredState | None = None) -> Core:
        if self.recording is not None:
            self.recording.close()
        inputs = CoreInputs(
            str(self._number), term, position or Position(), recovered, tuple(self._outcomes), kept=tuple(self._kept)
        )
        core = super()._make_core(position, term, recovered)
        self.recording = EventRecording(self.run_dir, inputs, self._limit_bytes)
        self.recording.begin(0.0)
        RecordedCore(core, self.recording, self.states, term)
        return core

    def handle(self, event: Event) -> list[Command]:
        self.clock.advance(self._times.random() * MAX_STEP_S)
        if self._times.random() < 1 / STRIDE and self.recording is not None:
            self.recording.flush()  # a tick
        return super().handle(event)

    def play(self) -> "RecordedCluster":
        """Run to the end, and write all of the recording."""
        self.run()
        assert self.recording is not None
        self.recording.close()
        return self


def replay_of(recording: TermRecording, **options: Any) -> Replay:
    """The replay of a simulated run."""
    inputs = recording.header.inputs
    core = make_core(
        scenario(int(inputs.config)),
        inputs.position,
        inputs.term,
        inputs.recovered,
        list(inputs.outcomes),
        inputs.kept,
    )
    return Replay(recording, core=core, **options)


def replayed_states(run_dir: Path) -> Iterator[tuple[str, str]]:
    """(term:event, digest of the state) at the same events. Raises FlowError if the commands differ."""
    for recording in Recordings.of(run_dir).terms.values():
        replay = replay_of(recording)
        for done in replay.run():
            if done.number % STRIDE == 0:
                yield f"{recording.term}:{done.number}", state_digest(replay.core, done.now)
