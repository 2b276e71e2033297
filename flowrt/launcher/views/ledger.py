"""``flowrt ledger``: the number of prompts in each state, and the history of one prompt."""

from pathlib import Path

from rich.console import Console
from rich.table import Table

from flowrt.controller.storage.integrity import LEDGER, missing_steps
from flowrt.controller.storage.ledger_reader import LedgerReader
from flowrt.errors import ConfigError
from flowrt.ids import MAX_ROWS, data_set_of, prompt_name, prompt_number
from flowrt.protocol.messages import LARGEST_PROMPT
from flowrt.recipes.config_io import from_file
from flowrt.recipes.data_sets import set_names
from flowrt.recipes.run_dir import CONFIG, checkpoint_steps
from flowrt.recipes.tasks.registry import task_of
from flowrt.recipes.tasks.task_file import is_task_file

STATES = {
    "unread": "to be offered again after a rollback (prompts never offered are not listed)",
    "in_flight": "being generated or scored",
    "ready": "complete, waiting for a step",
    "leased": "in the step that is being trained",
    "trained": "trained, once",
    "dropped": "given up, with a reason",
}


def show(run_dir: Path, prompt: str, epoch: int | None, console: Console) -> None:
    """Print the states of all prompts, or the history of one.

    Args:
        run_dir: the run directory.
        prompt: the number of a prompt, or NAME:ROW with several data sets; empty: all.
        epoch: epoch of the history; None: all.
        console: receives the table.

    Raises ConfigError if the ledger cannot be read or lacks steps of a checkpoint, and for a prompt without history or
    beyond the rows of the data.
    """
    with LedgerReader(run_dir / LEDGER) as ledger:
        if missing := missing_steps(ledger.last_step(), max(checkpoint_steps(run_dir), default=0)):
            raise ConfigError(f"ledger {run_dir / LEDGER} {missing}")
        names = set_names_of(run_dir)
        if prompt:
            number = number_of(prompt, names)
            if not ledger.states_of(number):
                _check_row(run_dir, number, names)
            console.print(history(ledger, number, epoch, names))
        elif epoch is not None:
            raise ConfigError("flowrt ledger takes --epoch together with --prompt")
        else:
            console.print(states_table(ledger, run_dir, names))


def set_names_of(run_dir: Path) -> tuple[str, ...]:
    """The names of the run's data sets; empty if its configuration cannot be read."""
    try:
        return set_names(from_file(run_dir / CONFIG).data)
    except ConfigError:
        return ()


def number_of(prompt: str, names: tuple[str, ...]) -> int:
    """The number of a prompt given as a number or as NAME:ROW, with NAME in ``names``. Raises ConfigError."""
    name, colon, row = prompt.rpartition(":")
    if not (row.isascii() and row.isdecimal() and int(row) <= LARGEST_PROMPT):
        raise ConfigError(f"--prompt {prompt!r:.80} is not a whole number" + (", or NAME:ROW" if names else ""))
    if not colon:
        return int(row)
    if name not in names or int(row) >= MAX_ROWS:
        there = ", ".join(names) or "one, without a name"
        raise ConfigError(f"--prompt {prompt!r:.80}: the run has no data set {name!r:.80}; it has {there}")
    return prompt_number(names.index(name), int(row))


def _check_row(run_dir: Path, number: int, names: tuple[str, ...]) -> None:
    """Raise ConfigError for a prompt beyond the rows of its data; data that this process cannot read is not checked."""
    try:
        config = from_file(run_dir / CONFIG)
        if is_task_file(config.recipe):  # it would be executed
            return
        sets = task_of(config).training_sets()
    except ConfigError:
        return
    at = min(data_set_of(number), len(sets) - 1)
    rows = len(sets[at].problems)
    if number >= prompt_number(at, rows):
        data = f"data set {names[at]}" if len(names) > 1 else "the data"
        name = prompt_name(number, names)
        raise ConfigError(f"prompt {name} does not exist: {data} has {rows} prompts to train on, numbered from 0")


def states_table(ledger: LedgerReader, run_dir: Path, names: tuple[str, ...]) -> Table:
    """The number of prompts in each state; of several data sets (``names``) also of each."""
    states, last = ledger.states(), ledger.last_step()
    of_sets = ledger.states_of_sets() if len(names) > 1 else {}
    sets = range(len(names)) if len(names) > 1 else range(0)
    trained = "no step is trained" if last is None else f"trained up to step {last}"
    table = Table(title=f"ledger of {run_dir.absolute().name}: {trained}")
    table.add_column("state", style="bold")
    table.add_column("prompts", justify="right")
    for at in sets:
        table.add_column(names[at], justify="right")
    table.add_column("meaning", style="dim")
    for state in [*STATES, *sorted(states.keys() - STATES.keys())]:
        counts = [str(of_sets.get((at, state), 0)) for at in sets]
        table.add_row(state, str(states.get(state, 0)), *counts, STATES.get(state, ""))
    for reason, count in ledger.reasons().items():
        table.add_row("", str(count), *[""] * len(sets), f"dropped: {reason}")
    table.add_section()
    totals = [str(sum(count for (at, _), count in of_sets.items() if at == set_)) for set_ in sets]
    table.add_row("all", str(sum(states.values())), *totals, "each in one state for each epoch in which it was offered")
    return table


def history(ledger: LedgerReader, prompt: int, epoch: int | None, names: tuple[str, ...]) -> Table:
    """All state changes of a prompt. Raises ConfigError if it was never offered."""
    events, name = ledger.history(prompt, epoch), prompt_name(prompt, names)
    if not events:
        when = "" if epoch is None else f" in epoch {epoch}"
        raise ConfigError(f"prompt {name} has not been offered{when}: it is unread")
    present = ledger.states_of(prompt)
    states = ", ".join(f"{present[number]} in epoch {number}" for number in sorted({event.epoch for event in events}))
    table = Table(title=f"prompt {name}: {states}")
    for name in ("epoch", "run attempt", "seconds", "step"):
        table.add_column(name, justify="right")
    table.add_column("state", style="bold")
    table.add_column("reward", justify="right")
    table.add_column("reason", style="dim")
    for event in events:
        seconds, reward = f"{event.since_s:.3f}", "" if event.reward is None else f"{event.reward:.4g}"
        table.add_row(
            str(event.epoch), str(event.attempt + 1), seconds, str(event.step), event.state, reward, event.reason
        )
    return table
