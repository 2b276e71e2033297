"""The verdict of bench/faults.py on the ledgers of correct and faulty runs."""

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
HISTORY = ("in_flight", "ready", "leased", "trained")


def add_histories(ledger: Ledger, prompts: Iterable[int], states: Sequence[str] = HISTORY) -> None:
    for prompt in prompts:
        for state in states:
            ledger.add(AppendLedger(prompt, 0, state, step=prompt // GROUPS), 1.0)


def write_steps(run_dir: Path, numbers: Iterable[int] = range(STEPS), groups: int = GROUPS) -> None:
    lines = [json.dumps({"step": number, "groups": groups}) + "\n" for number in numbers]
    (run_dir / "metrics.jsonl").write_text("".join(lines))


def write_run(run_dir: Path, prompts: Iterable[int] = range(PROMPTS)) -> Ledger:
    """Write the ledger of a run that has trained these prompts, and metrics with every step."""
    write_steps(run_dir)
    ledger = Ledger(run_dir / "ledger.sqlite")
    add_histories(ledger, prompts)
    return ledger


def verdict(run_dir: Path, ledger: Ledger, complete: bool = True) -> Account:
    ledger.flush()
    ledger.close()
    return account(run_dir, PROMPTS, STEPS, complete)


def test_a_correct_run_has_no_faults(tmp_path: Path) -> None:
    assert verdict(tmp_path, write_run(tmp_path)) == Account(0, 0, "")


def test_a_prompt_missing_from_the_ledger_is_lost(tmp_path: Path) -> None:
    result = verdict(tmp_path, write_run(tmp_path, range(PROMPTS - 1)))
    assert result == Account(1, 0, f"{PROMPTS - 1} prompts in the ledger, {PROMPTS} in the data")


@pytest.mark.parametrize("left", ["in_flight", "ready", "leased", "dropped"])
def test_a_prompt_that_was_not_trained_is_lost(tmp_path: Path, left: str) -> None:
    ledger = write_run(tmp_path, range(2, PROMPTS))
    add_histories(ledger, (0, 1), ("in_flight", left))
    assert verdict(tmp_path, ledger) == Account(2, 0, "")


def test_a_prompt_that_was_trained_twice_is_doubled_and_lost(tmp_path: Path) -> None:
    ledger = write_run(tmp_path)
    add_histories(ledger, (3,))
    assert verdict(tmp_path, ledger) == Account(1, 1, "")


@pytest.mark.parametrize("again", [1, 2])
def test_rolled_back_prompt_must_be_trained_again(tmp_path: Path, again: int) -> None:
    """After a rollback to the checkpoint of the first step only later training counts."""
    ledger = write_run(tmp_path)
    ledger.resume(1, 2.0)
    add_histories(ledger, range(GROUPS, PROMPTS))
    for _ in range(again - 1):
        add_histories(ledger, (3, 5))
    assert verdict(tmp_path, ledger) == (Account(0, 0, "") if again == 1 else Account(2, 2, ""))


def test_rolled_back_prompt_that_was_not_retrained_is_lost(tmp_path: Path) -> None:
    ledger = write_run(tmp_path)
    ledger.resume(1, 2.0)
    add_histories(ledger, range(GROUPS, PROMPTS - 1))
    assert verdict(tmp_path, ledger) == Account(1, 0, "")


@pytest.mark.parametrize("numbers", [(), (0, 1), (0, 2, 1), (0, 1, 1, 2), (0, 1, 2, 3)])
def test_missing_or_repeated_steps_are_a_fault(tmp_path: Path, numbers: tuple[int, ...]) -> None:
    ledger = write_run(tmp_path)
    write_steps(tmp_path, numbers)
    result = verdict(tmp_path, ledger)
    assert result == Account(0, 0, f"steps {list(numbers)} in the metrics, not {STEPS}")


def test_a_step_of_too_few_groups_is_a_fault(tmp_path: Path) -> None:
    ledger = write_run(tmp_path)
    write_steps(tmp_path, groups=1)
    assert verdict(tmp_path, ledger) == Account(0, 0, "groups [1, 1, 1] in the steps")


def test_a_prompt_that_is_not_in_the_data_is_a_fault(tmp_path: Path) -> None:
    ledger = write_run(tmp_path, range(PROMPTS + 1))
    assert verdict(tmp_path, ledger) == Account(0, 0, f"{PROMPTS + 1} prompts in the ledger, {PROMPTS} in the data")


def test_pending_writes_of_a_killed_controller_are_counted(tmp_path: Path) -> None:
    ledger = write_run(tmp_path, range(GROUPS))
    add_histories(ledger, (1,))
    ledger.commit()
    assert account(tmp_path, PROMPTS, STEPS, complete=False) == Account(0, 1, "")  # it is in no table
    ledger.close()


def test_run_without_a_ledger_is_valid_only_after_a_failure(tmp_path: Path) -> None:
    assert account(tmp_path, PROMPTS, STEPS, complete=True).fault == "there is no ledger"
    assert account(tmp_path, PROMPTS, STEPS, complete=False) == Account(0, 0, "")


def test_a_history_that_ends_in_another_state_than_its_row_is_a_fault(tmp_path: Path) -> None:
    ledger = write_run(tmp_path)
    ledger.flush()
    ledger.close()
    with sqlite3.connect(tmp_path / "ledger.sqlite") as database:
        database.execute("UPDATE prompts SET state = 'leased' WHERE prompt = 2")
    result = account(tmp_path, PROMPTS, STEPS, complete=True)
    assert result == Account(1, 0, "the history of prompts [(0, 2)] ends in another state than that of their rows")


def test_a_step_that_trained_prompts_of_another_step_is_a_fault(tmp_path: Path) -> None:
    write_steps(tmp_path)
    ledger = Ledger(tmp_path / "ledger.sqlite")
    for prompt in range(PROMPTS):
        ledger.add(AppendLedger(prompt, 0, "trained", step=0 if prompt < GROUPS + 1 else 2), 1.0)
    result = verdict(tmp_path, ledger)
    assert result == Account(0, 0, "prompts trained by step, in the ledger: [(0, 3), (2, 3)]")


def test_pending_writes_in_a_complete_run_are_a_fault(tmp_path: Path) -> None:
    ledger = write_run(tmp_path)
    ledger.commit()
    ledger.close()
    result = account(tmp_path, PROMPTS, STEPS, complete=True)
    assert result == Account(0, 0, "1 transactions were never entered in the tables of the ledger")


@pytest.mark.parametrize("text", ["", "noise", "{"])
def test_unreadable_metrics_and_ledgers_are_faults(tmp_path: Path, text: str) -> None:
    ledger = write_run(tmp_path)
    (tmp_path / "metrics.jsonl").write_text(text + "\n")
    assert verdict(tmp_path, ledger).fault.startswith("metrics.jsonl cannot be read")
    (tmp_path / "ledger.sqlite").write_text("noise " * 1000)
    assert account(tmp_path, PROMPTS, STEPS, complete=True).fault.startswith("the ledger cannot be read")


def test_inspection_changes_nothing(tmp_path: Path) -> None:
    ledger = write_run(tmp_path)
    ledger.commit()
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    account(tmp_path, PROMPTS, STEPS, complete=True)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    ledger.close()


def test_each_count_of_a_summary_is_compared(tmp_path: Path) -> None:
    assert wrong_summary(tmp_path, {}) != []
    (tmp_path / "summary.json").write_text(json.dumps({"steps": 3, "prompts": {"trained": 6}}))
    assert wrong_summary(tmp_path, {"steps": 3, "prompts.trained": 6}) == []
    problems = wrong_summary(tmp_path, {"steps": 4, "prompts.trained": 7, "steps.none": 1, "exit_code": 0})
    assert problems == [
        "steps is 3 in the summary, not 4",
        "prompts.trained is 6 in the summary, not 7",
        "steps.none is None in the summary, not 1",
        "exit_code is None in the summary, not 0",
    ]
