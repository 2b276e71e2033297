"""``flowrt ledger``: where the prompts of a run are, and the life of one of them."""

from pathlib import Path

from rich.console import Console
from rich.table import Table

from flowrt.controller.ledger_file import LEDGER, knows_less
from flowrt.controller.ledger_reader import LedgerReader
from flowrt.errors import ConfigError
from flowrt.recipes.paths import checkpoint_steps

STATES = {
    "unread": "to be offered again after the run went back (besides those that were never offered)",
    "in_flight": "being generated or scored",
    "ready": "complete, waiting for a step",
    "leased": "in the step that is being trained",
    "trained": "trained, once",
    "dropped": "given up, with a reason",
}


def show(run_dir: Path, prompt: int | None, epoch: int | None, console: Console) -> None:
    """Print the account of a run, or the life of a prompt. Raises ConfigError when there is none."""
    with LedgerReader(run_dir / LEDGER) as ledger:
        if fault := knows_less(ledger.last_step(), max(checkpoint_steps(run_dir), default=0)):
            raise ConfigError(f"ledger {run_dir / LEDGER} {fault}")
        if prompt is not None:
            console.print(life(ledger, prompt, epoch))
        elif epoch is not None:
            raise ConfigError("flowrt ledger takes --epoch together with --prompt")
        else:
            console.print(account(ledger, run_dir))


def account(ledger: LedgerReader, run_dir: Path) -> Table:
    """How many prompts are in which state."""
    states, last = ledger.states(), ledger.last_step()
    trained = "nothing is trained yet" if last is None else f"step {last} was the last one trained"
    table = Table(title=f"ledger of {run_dir.absolute().name}: {trained}")
    table.add_column("state", style="bold")
    table.add_column("prompts", justify="right")
    table.add_column("which are", style="dim")
    for state in [*STATES, *sorted(states.keys() - STATES.keys())]:
        table.add_row(state, str(states.get(state, 0)), STATES.get(state, ""))
    for reason, count in ledger.reasons().items():
        table.add_row("", str(count), f"dropped: {reason}")
    table.add_section()
    table.add_row("all", str(sum(states.values())), "each in exactly one state, in each epoch in which it was offered")
    return table


def life(ledger: LedgerReader, prompt: int, epoch: int | None) -> Table:
    """All that happened to a prompt. Raises ConfigError when it has not been offered."""
    moments = ledger.life(prompt, epoch)
    if not moments:
        when = "" if epoch is None else f" in epoch {epoch}"
        raise ConfigError(f"prompt {prompt} has not been offered{when}: it is unread")
    present = ledger.present(prompt)
    states = ", ".join(f"{present[one]} in epoch {one}" for one in sorted({moment.epoch for moment in moments}))
    table = Table(title=f"prompt {prompt}: {states}")
    for name in ("epoch", "life", "seconds", "step"):
        table.add_column(name, justify="right")
    table.add_column("state", style="bold")
    table.add_column("reason", style="dim")
    for one in moments:
        seconds = f"{one.since_s:.3f}"
        table.add_row(str(one.epoch), str(one.life + 1), seconds, str(one.step), one.state, one.reason)
    return table
