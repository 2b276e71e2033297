"""A ledger recovers exactly the live groups, whatever operations precede a crash of its process."""

import contextlib
import tempfile
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from flowrt.controller.events import AppendLedger
from flowrt.controller.state.controller_restart import (
    GroupsClosed,
    GroupsOpened,
    RestoredSamples,
    StageCommitted,
    WorkerJoined,
)
from flowrt.controller.state.dataflow import Flows
from flowrt.controller.storage.ledger import Ledger
from flowrt.protocol.messages import Stage
from tests.effort import examples

FLOWS = Flows((), (Stage("rollout", (), ()),))
OPERATIONS = st.sampled_from(["open", "complete", "close", "commit", "flush", "compact", "persist", "query", "crash"])


class LedgerMachine:
    """A ledger and its expected content: groups of one slot, each with the same id as its slot."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._crashed: list[Ledger] = []
        self.ledger = Ledger(path)
        self.ledger.append_restart_log(WorkerJoined("source", "source"))
        self._live: list[int] = []
        self._states: dict[int, str] = {}
        self._groups = 0

    def apply(self, name: str, which: int) -> None:
        group = self._live[which % len(self._live)] if self._live else -1
        match name:
            case "open":
                self._live.append(self._groups)
                self._record(self._groups, "in_flight")
                opened = GroupsOpened(
                    owner="source",
                    request=1,
                    flow="",
                    prompts=(self._groups,),
                    epoch=0,
                    members=1,
                    at_least=1,
                    lengths=(),
                    tags=(),
                    group=self._groups,
                    slot=self._groups,
                )
                self.ledger.append_restart_log(opened)
                self._groups += 1
            case "complete" if self._live:
                self._record(group, "ready")
                self.ledger.append_restart_log(
                    StageCommitted(
                        worker="rollout0", stage="rollout", slots=(group,), leases=(7,), parts=(), inline=(), spans=()
                    )
                )
            case "close" if self._live:
                self._live.remove(group)
                self._record(group, "trained")
                self.ledger.append_restart_log(GroupsClosed((group,), (group,)))
            case "commit":
                self.ledger.commit()
            case "flush":
                self.ledger.flush()
            case "compact":
                self.ledger.compact()
            case "persist":
                self.ledger.persist()
            case "query":
                self.ledger.passed()
            case "crash":
                self.crash()

    def _record(self, group: int, state: str) -> None:
        self._states[group] = state
        self.ledger.add(AppendLedger(group, 0, state, 0), 1.0)

    def crash(self) -> None:
        """Commit, lose the process without closing the ledger, and compare what a new one recovers."""
        self.ledger.commit()
        self._crashed.append(self.ledger)
        self.ledger = Ledger(self._path)
        recovered = self.ledger.recover()
        assert recovered is not None
        assert sorted(RestoredSamples(FLOWS, recovered.entries).groups) == sorted(self._live)
        counts = self.ledger.account([(0, group) for group in self._live]).states
        assert counts == {state: list(self._states.values()).count(state) for state in self._states.values()}

    def close(self) -> None:
        for ledger in (*self._crashed, self.ledger):
            ledger.close()


@settings(max_examples=examples(150))
@given(st.lists(st.tuples(OPERATIONS, st.integers(0, 9)), max_size=40))
def test_recovery_restores_exactly_the_live_groups(operations: list[tuple[str, int]]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        machine = LedgerMachine(Path(directory) / "ledger.sqlite")
        with contextlib.closing(machine):
            for name, which in operations:
                machine.apply(name, which)
            machine.crash()
