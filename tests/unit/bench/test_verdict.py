"""What bench/faults.py says of a run, of real ledgers of runs that went wrong: a count of 0 is counted."""

import json
import sqlite3
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest
from fault_injection.verdict import Account, account, wrong_summary

from flowrt.controller.events import AppendLedger
from flowrt.controller.storage.ledger import Ledger

STEPS, GROUPS = 3, 2
PROMPTS = STEPS * GROUPS
LIFE = ("in_flight", "ready", "leased", "trained")


def lives(ledger: Ledger, prompts: Iterable[int], states: Sequence[str] = LIFE) -> None:
    for prompt in prompts:
        for state in states:
            ledger.add(AppendLedger(prompt, 0, state, step=prompt // GROUPS), 1.0)


def steps(run_dir: Path, numbers: Iterable[int] = range(STEPS), groups: int = GROUPS) -> None:
    lines = [json.dumps({"step": number, "groups": groups}) + "\n" for number in numbers]
    (run_dir / "metrics.jsonl").write_text("".join(lines))


def begin(run_dir: Path, prompts: Iterable[int] = range(PROMPTS)) -> Ledger:
    """The ledger of a run that has trained these, and the metrics of one that has taken every step."""
    steps(run_dir)
    ledger = Ledger(run_dir / "ledger.sqlite")
    lives(ledger, prompts)
    return ledger


def verdict(run_dir: Path, ledger: Ledger, complete: bool = True) -> Account:
    ledger.flush()
    ledger.close()
    return account(run_dir, PROMPTS, STEPS, complete)


def test_a_run_as_it_should_be_has_nothing_to_count(tmp_path: Path) -> None:
    assert verdict(tmp_path, begin(tmp_path)) == Account(0, 0, "")


def test_a_prompt_that_never_came_is_lost(tmp_path: Path) -> None:
    judged = verdict(tmp_path, begin(tmp_path, range(PROMPTS - 1)))
    assert judged == Account(1, 0, f"{PROMPTS - 1} prompts in the ledger, {PROMPTS} in the data")


@pytest.mark.parametrize("left", ["in_flight", "ready", "leased", "dropped"])
def test_a_prompt_that_came_and_was_not_trained_is_lost(tmp_path: Path, left: str) -> None:
    ledger = begin(tmp_path, range(2, PROMPTS))
    lives(ledger, (0, 1), ("in_flight", left))
    assert verdict(tmp_path, ledger) == Account(2, 0, "")


def test_a_prompt_that_was_trained_twice_is_doubled_and_not_trained_once(tmp_path: Path) -> None:
    ledger = begin(tmp_path)
    lives(ledger, (3,))
    assert verdict(tmp_path, ledger) == Account(1, 1, "")


@pytest.mark.parametrize("again", [1, 2])
def test_rolled_back_prompt_must_be_trained_again(tmp_path: Path, again: int) -> None:
    """It went back to the checkpoint after its first step: what it trained since counts."""
    ledger = begin(tmp_path)
    ledger.resume(1, 2.0)
    lives(ledger, range(GROUPS, PROMPTS))
    for _ in range(again - 1):
        lives(ledger, (3, 5))
    assert verdict(tmp_path, ledger) == (Account(0, 0, "") if again == 1 else Account(2, 2, ""))


def test_rolled_back_prompt_that_was_not_retrained_is_lost(tmp_path: Path) -> None:
    ledger = begin(tmp_path)
    ledger.resume(1, 2.0)
    lives(ledger, range(GROUPS, PROMPTS - 1))
    assert verdict(tmp_path, ledger) == Account(1, 0, "")


@pytest.mark.parametrize("numbers", [(), (0, 1), (0, 2, 1), (0, 1, 1, 2), (0, 1, 2, 3)])
def test_steps_that_are_missing_or_twice_there_are_wrong(tmp_path: Path, numbers: tuple[int, ...]) -> None:
    ledger = begin(tmp_path)
    steps(tmp_path, numbers)
    judged = verdict(tmp_path, ledger)
    assert judged == Account(0, 0, f"steps {list(numbers)} in the metrics, not {STEPS}")


def test_a_step_of_too_few_groups_is_wrong(tmp_path: Path) -> None:
    ledger = begin(tmp_path)
    steps(tmp_path, groups=1)
    assert verdict(tmp_path, ledger) == Account(0, 0, "groups [1, 1, 1] in the steps")


def test_a_prompt_that_the_data_does_not_have_is_wrong(tmp_path: Path) -> None:
    ledger = begin(tmp_path, range(PROMPTS + 1))
    assert verdict(tmp_path, ledger) == Account(0, 0, f"{PROMPTS + 1} prompts in the ledger, {PROMPTS} in the data")


def test_prompt_only_in_the_replay_log_of_a_killed_controller_counts_as_doubled(tmp_path: Path) -> None:
    ledger = begin(tmp_path, range(GROUPS))
    lives(ledger, (1,))
    ledger.commit()
    assert account(tmp_path, PROMPTS, STEPS, complete=False) == Account(0, 1, "")  # nobody has entered it
    ledger.close()


def test_run_without_a_ledger_is_valid_only_after_a_failure(tmp_path: Path) -> None:
    assert account(tmp_path, PROMPTS, STEPS, complete=True).fault == "there is no ledger"
    assert account(tmp_path, PROMPTS, STEPS, complete=False) == Account(0, 0, "")


def test_a_prompt_whose_history_ends_elsewhere_than_its_row_is_wrong(tmp_path: Path) -> None:
    ledger = begin(tmp_path)
    ledger.flush()
    ledger.close()
    with sqlite3.connect(tmp_path / "ledger.sqlite") as database:
        database.execute("UPDATE prompts SET state = 'leased' WHERE prompt = 2")
    judged = account(tmp_path, PROMPTS, STEPS, complete=True)
    assert judged == Account(1, 0, "the history of prompts [(0, 2)] ends in another state than that of their rows")


def test_a_step_that_trained_the_prompts_of_another_is_wrong(tmp_path: Path) -> None:
    steps(tmp_path)
    ledger = Ledger(tmp_path / "ledger.sqlite")
    for prompt in range(PROMPTS):
        ledger.add(AppendLedger(prompt, 0, "trained", step=0 if prompt < GROUPS + 1 else 2), 1.0)
    judged = verdict(tmp_path, ledger)
    assert judged == Account(0, 0, "prompts trained by step, in the ledger: [(0, 3), (2, 3)]")


def test_a_complete_run_with_transactions_that_are_in_no_table_is_wrong(tmp_path: Path) -> None:
    ledger = begin(tmp_path)
    ledger.commit()
    ledger.close()
    judged = account(tmp_path, PROMPTS, STEPS, complete=True)
    assert judged == Account(0, 0, "1 transactions were never entered in the tables of the ledger")


@pytest.mark.parametrize("text", ["", "noise", "{"])
def test_a_ledger_and_metrics_that_cannot_be_read_are_wrong(tmp_path: Path, text: str) -> None:
    ledger = begin(tmp_path)
    (tmp_path / "metrics.jsonl").write_text(text + "\n")
    assert verdict(tmp_path, ledger).fault.startswith("metrics.jsonl cannot be read")
    (tmp_path / "ledger.sqlite").write_text("noise " * 1000)
    assert account(tmp_path, PROMPTS, STEPS, complete=True).fault.startswith("the ledger cannot be read")


def test_inspection_changes_nothing(tmp_path: Path) -> None:
    ledger = begin(tmp_path)
    ledger.commit()
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    account(tmp_path, PROMPTS, STEPS, complete=True)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    ledger.close()


def test_each_count_of_a_summary_is_compared(tmp_path: Path) -> None:
    assert wrong_summary(tmp_path, {}) != []
    (tmp_path / "summary.json").write_text(json.dumps({"steps": 3, "prompts": {"trained": 6}}))
    assert wrong_summary(tmp_path, {"steps": 3, "prompts.trained": 6}) == []
    found = wrong_summary(tmp_path, {"steps": 4, "prompts.trained": 7, "steps.none": 1, "exit_code": 0})
    assert found == [
        "steps is 3 in the summary, not 4",
        "prompts.trained is 6 in the summary, not 7",
        "steps.none is None in the summary, not 1",
        "exit_code is None in the summary, not 0",
    ]
