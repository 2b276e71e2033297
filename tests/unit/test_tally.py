"""Names and reasons are the workers' own, and of no end: what is told of them is bounded."""

import logging
from pathlib import Path

import pytest

from flowrt.controller.books import Books
from flowrt.controller.journal import Journal
from flowrt.controller.ledger import Ledger
from flowrt.controller.tally import LONGEST, MOST, OTHERS, Tally, unfit
from flowrt.errors import RemoteProtocolError
from flowrt.testing.scenario import leases_of
from flowrt.testing.talk import Talk
from flowrt.wire import messages as m
from flowrt.wire.records import BusySpan


def test_reasons_beyond_the_first_count_together_and_none_is_lost() -> None:
    tally = Tally()
    for number in range(MOST + 50):
        tally.count(f"reason {number}")
    tally.count("reason 0", 2)
    assert len(tally) == MOST + 1
    assert tally["reason 0"] == 3
    assert tally[OTHERS] == 50
    assert sum(tally.values()) == MOST + 52


def test_a_long_reason_is_cut() -> None:
    tally = Tally()
    tally.count("x" * 10 * LONGEST)
    assert list(tally) == ["x" * LONGEST]


def test_samples_that_are_lost_for_ever_new_reasons_do_not_fill_the_memory() -> None:
    talk = Talk(bound=0, groups_per_step=1, steps=3, members=1)
    talk.offer(prompt=0)
    for number in range(3):
        grant = talk.pull("rollout0", "rollout")
        assert grant is not None
        talk.say("rollout0", m.Abandon("rollout", grant.slots, leases_of(grant), True, f"{number}" + "x" * 10**6))
    dropped = talk.core.samples.retreat.dropped
    assert sum(dropped.values()) == 3
    assert all(len(reason) <= LONGEST for reason in dropped)


def test_names_of_numbers_are_bounded() -> None:
    some = tuple((f"number {number}", 1.0) for number in range(MOST))
    assert unfit(some, {}) == unfit(some, dict(some)) == ""
    assert "more than 256; name fewer" in unfit(some, {"another": 1.0})
    assert f"over the limit of {LONGEST}" in unfit([("x" * (LONGEST + 1), 1.0)], {})


def test_what_is_left_out_of_a_report_is_its_numbers_only(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    journal = Journal(tmp_path, 0.0)
    ledger = Ledger(tmp_path / "ledger.sqlite")
    books = Books(ledger, journal)
    span = BusySpan("train", 0.0, 1.0)
    with caplog.at_level(logging.WARNING):
        books.report("rollout-0", "rollout", m.Report((span,), (("x" * 1000, 1.0),), ()), 0)
    assert "left out the numbers that rollout-0 has reported: a number's name has 1000 characters" in caplog.text
    assert journal.numbers == {}
    books.report("rollout-0", "rollout", m.Report((span,), (("eval", 1.0),), ()), 0)
    assert journal.numbers == {"eval": 1.0}
    journal.close()
    ledger.close()
    assert len((tmp_path / "timeline.jsonl").read_text().splitlines()) == 2


def test_a_step_with_too_many_numbers_is_refused_and_changes_nothing() -> None:
    talk = Talk(bound=0, groups_per_step=1, steps=3)
    talk.ready_to_train()
    assert talk.pull("trainer0", "train", 0) is not None
    with pytest.raises(RemoteProtocolError, match=r"trainer0 ended step 0, and 257 numbers .* name fewer"):
        talk.say("trainer0", m.StepDone(0, tuple((f"{number}", 1.0) for number in range(MOST + 1))))
    assert talk.core.samples.window.step == 0
