"""What became of a run, counted from its ledger and its metrics alone."""

import json
from collections import Counter
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from flowrt.controller.ledger_file import entered, open_to_read


@dataclass(frozen=True, slots=True)
class Account:
    """Prompts of the data, by what the ledger says of them; `fault` names what is not as it should be."""

    lost: int
    doubled: int
    fault: str


def account(run_dir: Path, prompts: int, steps: int, complete: bool) -> Account:
    """Every prompt is trained exactly once if the run is ``complete``, and at most once if it is not."""
    path = run_dir / "ledger.sqlite"
    if not path.exists():
        return Account(0, 0, "there is no ledger" if complete else "")
    # A controller that was killed has entered only a part of what it wrote.
    with closing(entered(open_to_read(path))) as ledger:
        states = {(e, p): state for e, p, state in ledger.execute("SELECT epoch, prompt, state FROM prompts")}
        life = ledger.execute("SELECT epoch, prompt, state FROM events ORDER BY id").fetchall()
    trained: Counter[tuple[int, int]] = Counter()
    for epoch, prompt, state in life:
        if state == "trained":
            trained[epoch, prompt] += 1
        elif state == "unread":
            trained[epoch, prompt] = 0  # the run went back to before it
    doubled = sum(count > 1 for count in trained.values())
    if not complete:
        return Account(0, doubled, "")
    once = {pair for pair, count in trained.items() if count == 1 and states.get(pair) == "trained"}
    lost = len({(0, prompt) for prompt in range(prompts)} - once)
    wrong = [] if len(states) == prompts else [f"{len(states)} prompts in the ledger, {prompts} in the data"]
    wrong += _wrong_steps(run_dir / "metrics.jsonl", prompts, steps)
    return Account(lost, doubled, "; ".join(wrong))


def _wrong_steps(path: Path, prompts: int, steps: int) -> list[str]:
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    if [line["step"] for line in lines] != list(range(steps)):
        return [f"steps {[line['step'] for line in lines]} in the metrics, not {steps}"]
    if any(line["groups"] != prompts // steps for line in lines):
        return [f"groups {[line['groups'] for line in lines]} in the steps"]
    return []
