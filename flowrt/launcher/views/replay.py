"""``flowrt replay``: the state of the controller at any moment of a run, and the decisions about a prompt."""

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from flowrt.errors import EXIT_FAILED, EXIT_OK, ConfigError
from flowrt.ids import MAX_ROWS, prompt_name, prompt_number
from flowrt.launcher.terminal import printable
from flowrt.launcher.views.status import draw
from flowrt.observability.prompt_decisions import Decision, PromptDecisions
from flowrt.observability.recording_reader import Recordings, TermRecording
from flowrt.observability.replay import Replay, condition, replay_to
from flowrt.protocol.messages import LARGEST_PROMPT
from flowrt.recipes.config_io import from_toml
from flowrt.recipes.data_sets import set_names

MAX_SAMPLES = 6
"""Samples of a lease that are named in the table."""
RED = "bold red"


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """What to replay, and what to show.

    Attributes:
        at_s: replay to this time, in seconds since the start of the run.
        until: replay until this condition holds, see `condition`.
        to: replay to TERM:EVENT.
        as_json: print JSON.
        why: a prompt whose decisions are shown, see `parse_prompt`.
        check: assert all invariants after each event.
        force: replay also with sources that differ from those of the run.
    """

    at_s: float | None = None
    until: str = ""
    to: str = ""
    as_json: bool = False
    why: str = ""
    check: bool = False
    force: bool = False


def show(run_dir: Path, options: ReplayOptions, console: Console) -> int:
    """Replay a run and print what the options select; returns the exit code, 1 if the condition never holds.

    Args:
        run_dir: the directory of the run.
        options: of the command.
        console: receives the tables; JSON goes to its file as it is.

    Raises ConfigError for bad input, FlowError if the replay differs from the run and is not forced.
    """
    holds = condition(options.until) if options.until else None
    recordings = Recordings.of(run_dir)
    terms = _terms(recordings, options)
    if options.why:
        return _show_decisions(recordings, terms, options, console)
    replay: Replay | None = None
    mismatches: list[str] = []
    for recording in terms:
        mismatches += [replay.mismatch] if replay is not None and replay.mismatch else []
        replay = Replay(recording, force=options.force, check=options.check)
        if holds is not None:
            if any(holds(replay) for _ in replay.run()):
                break
        elif options.to:
            replay_to(replay, int(options.to.rpartition(":")[2]))
        else:
            for _ in replay.run(float("inf") if options.at_s is None else options.at_s):
                pass
    else:
        if holds is not None:
            console.print(f"{options.until} never holds in the recording")
            return EXIT_FAILED
    assert replay is not None
    if not replay.events and options.at_s is None:
        raise ConfigError(f"term {replay.recording.term} of {run_dir} has no event that can be read: {_end(replay)}")
    status = {
        **replay.status(options.at_s),
        "terms": [_described(term) for term in recordings.terms.values()],
        "unreadable_terms": recordings.unreadable,
        "mismatch": "; ".join([*mismatches, *([replay.mismatch] if replay.mismatch else [])]),
    }
    if options.as_json:
        console.file.write(json.dumps(status, allow_nan=False) + "\n")
    else:
        _print(recordings, replay, status, options, console)
    return EXIT_OK


def _terms(recordings: Recordings, options: ReplayOptions) -> list[TermRecording]:
    """The terms to replay, in order: all if all are searched, else the requested term, by default the last one."""
    if options.to:
        term, colon, event = options.to.rpartition(":")
        if not (colon and all(word.isascii() and word.isdecimal() and len(word) < 20 for word in (term, event))):
            raise ConfigError(f"--to {options.to!r:.80} is not TERM:EVENT, two whole numbers")
        return [recordings.of_term(int(term))]
    if options.at_s is not None:
        chosen = recordings.at(options.at_s)
        return [
            term for term in recordings.terms.values() if term is chosen or (options.why and term.term < chosen.term)
        ]
    everything = list(recordings.terms.values())
    return everything if options.until or options.why or options.check else everything[-1:]


def _end(replay: Replay) -> str:
    recording = replay.recording
    return recording.damage or recording.stopped or recording.unfinished or "it is empty"


def _described(recording: TermRecording) -> dict[str, Any]:
    """The description of a term in the JSON of a status."""
    extent = recording.extent()
    return {
        "term": recording.term,
        "events": extent.events,
        "from_s": round(extent.first_s, 6),
        "to_s": round(extent.last_s, 6),
        "damage": extent.damage,
        "stopped": extent.stopped,
        "unfinished": extent.unfinished,
        "complete": extent.is_complete,
    }


# ---- the state


def _print(
    recordings: Recordings, replay: Replay, status: dict[str, Any], options: ReplayOptions, console: Console
) -> None:
    console.print(_terms_table(recordings, status["terms"]))
    for term in status["terms"]:
        if term["damage"]:
            console.print(
                Text(
                    f"term {term['term']} can be replayed up to event {term['events'] - 1}: "
                    f"{printable(term['damage'])}",
                    style=RED,
                )
            )
        if term["unfinished"]:
            console.print(
                f"term {term['term']} can be replayed up to event {term['events'] - 1}: {printable(term['unfinished'])}"
            )
        if term["stopped"]:
            console.print(f"the recording of term {term['term']} was stopped: {term['stopped']}")
    if status["mismatch"]:
        console.print(Text(f"the replay differs from the run: {printable(status['mismatch'])}", style=RED))
    reached = f"after event {replay.events - 1}" if replay.events else "before its first event"
    console.print(
        f"term {replay.recording.term} {reached}, at {status['at_s']:.3f} s of the run"
        + ("" if status["mismatch"] else "; the commands are those of the run")
        + ("; every invariant holds after every event" if options.check else "")
    )
    console.print(draw(status))
    causes = Table("worker", "cause", "root", "since", title="what each worker that waits is held up by")
    for worker, cause, root, since_s in status["causes"]:
        causes.add_row(Text(printable(worker)), cause, Text(printable(root)), f"{since_s:.3f} s")
    console.print(causes)
    console.print(_leases_table(replay, status))
    if status["ended"] is not None:
        console.print(f"the run has ended (exit code {status['ended'][1]}): {printable(status['ended'][0])}")


def _terms_table(recordings: Recordings, terms: list[dict[str, Any]]) -> Table:
    table = Table("term", "events", "from", "to", "end", title="recorded controllers of the run")
    for recorded in terms:
        cut = "damaged" if recorded["damage"] else "stopped" if recorded["stopped"] else "running, or killed"
        end = "ended" if recorded["complete"] else cut
        table.add_row(
            str(recorded["term"]),
            str(recorded["events"]),
            f"{recorded['from_s']:.3f} s",
            f"{recorded['to_s']:.3f} s",
            end,
        )
    for term, why in recordings.unreadable.items():
        table.add_row(str(term), "-", "-", "-", Text(printable(why), style=RED))
    return table


def _leases_table(replay: Replay, status: dict[str, Any]) -> Table:
    names = set_names(from_toml(replay.recording.header.inputs.config).data)
    table = Table("worker", "stage", "step", "samples (epoch:prompt/sample)", "ends in", title="leases")
    for lease in status["leases"]:
        samples = [f"{epoch}:{prompt_name(prompt, names)}/{member}" for epoch, prompt, member in lease["samples"]]
        rest = len(samples) - MAX_SAMPLES
        table.add_row(
            Text(printable(lease["worker"])),
            lease["stage"],
            str(lease["step"]) if lease["step"] >= 0 else "",
            ", ".join(samples[:MAX_SAMPLES]) + (f" and {rest} more" if rest > 0 else ""),
            "-" if lease["left_s"] is None else f"{lease['left_s']:.1f} s",
        )
    if status["more_leases"]:
        table.add_row("", "", "", f"and {status['more_leases']} more leases", "")
    return table


# ---- the decisions about a prompt


def _show_decisions(
    recordings: Recordings, terms: list[TermRecording], options: ReplayOptions, console: Console
) -> int:
    names = set_names(from_toml(terms[0].header.inputs.config).data)
    epoch, prompt = parse_prompt(options.why, names)
    decisions = list(_decisions(terms, options, prompt, epoch))
    if not decisions:
        raise ConfigError(
            f"prompt {options.why} does not occur in what is recorded up to there; flowrt ledger RUN --prompt N has "
            "its history"
        )
    if options.as_json:
        console.file.write(json.dumps([decision._asdict() for decision in decisions]) + "\n")
        return EXIT_OK
    table = Table("at", "term:event", "epoch", "decision", "because", title=f"prompt {prompt_name(prompt, names)}")
    for decision in decisions:
        table.add_row(
            f"{decision.at_s:.3f} s",
            f"{decision.term}:{decision.event}",
            str(decision.epoch),
            Text(printable(decision.what, one_line=True)),
            Text(printable(decision.because, one_line=True), style="dim"),
        )
    console.print(table)
    for term, why in recordings.unreadable.items():
        console.print(Text(f"term {term} is left out: {printable(why)}", style=RED))
    return EXIT_OK


def _decisions(
    terms: list[TermRecording], options: ReplayOptions, prompt: int, epoch: int | None
) -> Iterator[Decision]:
    holds = condition(options.until) if options.until else None
    for recording in terms:
        replay = Replay(recording, force=options.force, check=options.check)
        until_s = float("inf") if options.at_s is None else options.at_s
        last = int(options.to.rpartition(":")[2]) if options.to else sys.maxsize
        for decision in PromptDecisions(replay, prompt, epoch).run(until_s):
            if decision.event > last or (holds is not None and holds(replay)):
                return
            yield decision


def parse_prompt(text: str, names: tuple[str, ...]) -> tuple[int | None, int]:
    """Epoch (None: all) and number of ``PROMPT`` or ``EPOCH:PROMPT``; with several data sets PROMPT may be NAME:ROW.

    Raises ConfigError for anything else.
    """
    *before, row = text.split(":")
    name = before.pop() if before and before[-1] in names else ""
    epoch = before.pop() if before else ""
    numbers = [word for word in (row, epoch) if word or word is row]
    is_valid = not before and all(word.isascii() and word.isdecimal() and len(word) < 20 for word in numbers)
    if not is_valid or int(row) > (MAX_ROWS - 1 if name else LARGEST_PROMPT):
        there = f", where PROMPT may be NAME:ROW of the data sets {', '.join(names)}" if names else ""
        raise ConfigError(f"--why {text!r:.80} is not PROMPT or EPOCH:PROMPT, whole numbers{there}")
    number = prompt_number(names.index(name), int(row)) if name else int(row)
    return (int(epoch) if epoch else None), number
