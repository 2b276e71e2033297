"""Whatever a ledger is asked in between, and whenever its process dies: what was live comes back, and no more."""

import contextlib
import tempfile
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from flowrt.controller.events import AppendLedger
from flowrt.controller.state.dataflow import Flows
from flowrt.controller.state.replay import GroupsClosed, GroupsOpened, ReplayedSamples, StageCommitted, WorkerJoined
from flowrt.controller.storage.ledger import Ledger
from flowrt.protocol.messages import Stage
from tests.effort import examples

FLOWS = Flows((), (Stage("rollout", (), ()),))
ACTS = st.sampled_from(["begin", "make", "leave", "commit", "settle", "trim", "persist", "ask", "die"])


class Walk:
    """A ledger, and what it should remember: groups of one slot, under one number."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._dead: list[Ledger] = []
        self.ledger = Ledger(path)
        self.ledger.append_replay(WorkerJoined("source", "source"))
        self._live: list[int] = []
        self._states: dict[int, str] = {}
        self._groups = 0

    def act(self, name: str, which: int) -> None:
        group = self._live[which % len(self._live)] if self._live else -1
        match name:
            case "begin":
                self._live.append(self._groups)
                self._enter(self._groups, "in_flight")
                begun = GroupsOpened(
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
                self.ledger.append_replay(begun)
                self._groups += 1
            case "make" if self._live:
                self._enter(group, "ready")
                self.ledger.append_replay(
                    StageCommitted(
                        worker="rollout0", stage="rollout", slots=(group,), leases=(7,), parts=(), inline=(), spans=()
                    )
                )
            case "leave" if self._live:
                self._live.remove(group)
                self._enter(group, "trained")
                self.ledger.append_replay(GroupsClosed((group,), (group,)))
            case "commit":
                self.ledger.commit()
            case "settle":
                self.ledger.flush()
            case "trim":
                self.ledger.compact()
            case "persist":
                self.ledger.persist()
            case "ask":
                self.ledger.passed()
            case "die":
                self.die()

    def _enter(self, group: int, state: str) -> None:
        self._states[group] = state
        self.ledger.add(AppendLedger(group, 0, state, 0), 1.0)

    def die(self) -> None:
        """All that was said is on disk: that is what this is about. A process that dies closes nothing."""
        self.ledger.commit()
        self._dead.append(self.ledger)
        self.ledger = Ledger(self._path)
        recovered = self.ledger.recover()
        assert recovered is not None
        assert sorted(ReplayedSamples(FLOWS, recovered.entries).groups) == sorted(self._live)
        counts = self.ledger.account([(0, group) for group in self._live]).states
        assert counts == {state: list(self._states.values()).count(state) for state in self._states.values()}

    def close(self) -> None:
        for ledger in (*self._dead, self.ledger):
            ledger.close()


@settings(max_examples=examples(150))
@given(st.lists(st.tuples(ACTS, st.integers(0, 9)), max_size=40))
def test_what_comes_back_is_what_was_live(acts: list[tuple[str, int]]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        walk = Walk(Path(directory) / "ledger.sqlite")
        with contextlib.closing(walk):
            for name, which in acts:
                walk.act(name, which)
            walk.die()
