"""``flowrt ledger``: the number of prompts in each state, and the history of one prompt."""

from pathlib import Path

from rich.console import Console
from rich.table import Table

from flowrt.controller.storage.integrity import LEDGER, missing_steps
from flowrt.controller.storage.reader import LedgerReader
from flowrt.errors import ConfigError
from flowrt.recipes.run_dir import checkpoint_steps

STATES = {
    "unread": "to be offered again after a rollback (prompts never offered are not listed)",
    "in_flight": "being generated or scored",
    "ready": "complete, waiting for a step",
    "leased": "in the step that is being trained",
    "trained": "trained, once",
    "dropped": "given up, with a reason",
}


def show(run_dir: Path, prompt: int | None, epoch: int | None, console: Console) -> None:
    """Print the states of all prompts, or the history of one. Raises ConfigError if there is none."""
    with LedgerReader(run_dir / LEDGER) as ledger:
        if missing := missing_steps(ledger.last_step(), max(checkpoint_steps(run_dir), default=0)):
            raise ConfigError(f"ledger {run_dir / LEDGER} {missing}")
        if prompt is not None:
            console.print(history(ledger, prompt, epoch))
        elif epoch is not None:
            raise ConfigError("flowrt ledger takes --epoch together with --prompt")
        else:
            console.print(states_table(ledger, run_dir))


def states_table(ledger: LedgerReader, run_dir: Path) -> Table:
    """The number of prompts in each state."""
    states, last = ledger.states(), ledger.last_step()
    trained = "no step is trained" if last is None else f"trained up to step {last}"
    table = Table(title=f"ledger of {run_dir.absolute().name}: {trained}")
    table.add_column("state", style="bold")
    table.add_column("prompts", justify="right")
    table.add_column("meaning", style="dim")
    for state in [*STATES, *sorted(states.keys() - STATES.keys())]:
        table.add_row(state, str(states.get(state, 0)), STATES.get(state, ""))
    for reason, count in ledger.reasons().items():
        table.add_row("", str(count), f"dropped: {reason}")
    table.add_section()
    table.add_row("all", str(sum(states.values())), "each in one state for each epoch in which it was offered")
    return table


def history(ledger: LedgerReader, prompt: int, epoch: int | None) -> Table:
    """All state changes of a prompt. Raises ConfigError if it was never offered."""
    events = ledger.history(prompt, epoch)
    if not events:
        when = "" if epoch is None else f" in epoch {epoch}"
        raise ConfigError(f"prompt {prompt} has not been offered{when}: it is unread")
    present = ledger.states_of(prompt)
    states = ", ".join(f"{present[one]} in epoch {one}" for one in sorted({event.epoch for event in events}))
    table = Table(title=f"prompt {prompt}: {states}")
    for name in ("epoch", "life", "seconds", "step"):
        table.add_column(name, justify="right")
    table.add_column("state", style="bold")
    table.add_column("reward", justify="right")
    table.add_column("reason", style="dim")
    for one in events:
        seconds, reward = f"{one.since_s:.3f}", "" if one.reward is None else f"{one.reward:.4g}"
        table.add_row(str(one.epoch), str(one.attempt + 1), seconds, str(one.step), one.state, reward, one.reason)
    return table
