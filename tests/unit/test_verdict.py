"""What bench/faults.py says of a run, of real ledgers of runs that went wrong: a count of 0 is counted."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest

from bench.faulty.verdict import Account, account
from flowrt.controller.events import Record
from flowrt.controller.ledger import Ledger

STEPS, GROUPS = 3, 2
PROMPTS = STEPS * GROUPS
LIFE = ("in_flight", "ready", "leased", "trained")


def lives(ledger: Ledger, prompts: Iterable[int], states: Sequence[str] = LIFE) -> None:
    for prompt in prompts:
        for state in states:
            ledger.add(Record(prompt, 0, state, step=prompt // GROUPS), 1.0)


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
    ledger.settle()
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
def test_what_a_run_took_back_is_to_be_trained_once_more(tmp_path: Path, again: int) -> None:
    """It went back to the checkpoint after its first step: what it trained since counts."""
    ledger = begin(tmp_path)
    ledger.resume(1, 2.0)
    lives(ledger, range(GROUPS, PROMPTS))
    for _ in range(again - 1):
        lives(ledger, (3, 5))
    assert verdict(tmp_path, ledger) == (Account(0, 0, "") if again == 1 else Account(2, 2, ""))


def test_what_a_run_took_back_and_left_is_lost(tmp_path: Path) -> None:
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


def test_a_run_that_had_to_end_has_doubled_what_its_killed_controller_only_jotted_down(tmp_path: Path) -> None:
    ledger = begin(tmp_path, range(GROUPS))
    lives(ledger, (1,))
    ledger.commit()
    assert account(tmp_path, PROMPTS, STEPS, complete=False) == Account(0, 1, "")  # nobody has entered it
    ledger.close()


def test_a_run_without_a_ledger_may_only_be_one_that_had_to_end(tmp_path: Path) -> None:
    assert account(tmp_path, PROMPTS, STEPS, complete=True).fault == "there is no ledger"
    assert account(tmp_path, PROMPTS, STEPS, complete=False) == Account(0, 0, "")
