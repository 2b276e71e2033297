"""``flowrt samples``: stored samples with their texts and tokens, in the terminal or in a file."""

import dataclasses
import tomllib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from flowrt.errors import EXIT_OK, ConfigError
from flowrt.ids import prompt_name
from flowrt.launcher.views.ledger import number_of, set_names_of
from flowrt.launcher.views.sample_tables import By, distribution_table, group_table
from flowrt.observability.completions_table import STDOUT, write_jsonl, write_parquet
from flowrt.observability.sample_statistics import SampleSettings
from flowrt.observability.stored_samples import Order, Sample, SampleFilter, SampleReader, SampleRow
from flowrt.observability.token_texts import TokenTexts
from flowrt.recipes.eval_names import evaluated_row, first_number
from flowrt.recipes.run_dir import CONFIG

DEFAULT_LIMIT = 8


@dataclass(frozen=True, slots=True)
class SampleOptions:
    """The arguments of ``flowrt samples``; empty or None: no restriction."""

    steps: tuple[int, int] | None = None
    """First and last step; for an evaluation, first and last version."""
    order: Order = "newest"
    limit: int | None = None
    """Maximum number of samples; None: 8 in the terminal, all in a file."""
    prompt: str = ""
    """Number, or NAME:ROW; for an evaluation the row of its data set."""
    length: tuple[int, int] | None = None
    """Least and largest number of response tokens."""
    reason: str = ""
    grep: str = ""
    eval_name: str = ""
    tokens: bool = False
    jsonl: Path | None = None
    parquet: Path | None = None
    seed: int = 0
    """Seed of order "random"."""
    by: By | None = None
    """What the samples are counted by; None: they are listed."""
    right_from: float | None = None
    """Reward from which a sample is right, in ``by``; None: that of the configuration."""
    with_dropped: bool = False
    """Whether the samples of dropped groups are in a distribution."""


def show(run_dir: Path, options: SampleOptions, console: Console) -> int:
    """Print samples of a run, or write them to a file; returns the exit code. Raises ConfigError for bad input."""
    if options.tokens and (options.jsonl or options.parquet):
        raise ConfigError("flowrt samples takes --tokens without --jsonl and --parquet, whose tables have no tokens")
    if options.parquet == STDOUT:
        raise ConfigError("flowrt samples --parquet needs a file: standard output (-) takes text, as of --jsonl -")
    _check_by(options)
    reader = SampleReader(run_dir)
    names = set_names_of(run_dir)
    wanted = _wanted(reader, options, names)
    if options.by is not None:
        table = _table_by(run_dir, wanted, options, options.by)
        console.print("no samples of whole groups are stored yet" if table is None else table)
        return EXIT_OK
    if options.jsonl or options.parquet:
        return _write(reader, wanted, options, console)
    page = reader.query(wanted, options.order, options.limit or DEFAULT_LIMIT, seed=options.seed)
    if page.samples:
        title = f"{len(page.samples)} of {page.total} samples of {run_dir.absolute().name}"
        console.print(_table(page.samples, names, title))
        texts = TokenTexts(model_dirs(run_dir)) if options.tokens else None
        for row in page.samples:
            _print_sample(row, names, console)
            if texts is not None and (sample := reader.get(row.id)) is not None:
                console.print(_token_table(sample, texts))
    else:
        console.print("no samples are stored yet")
    if left_out := reader.left_out():
        counts = ", ".join(f"{count} {reason}" for reason, count in sorted(left_out.items()))
        console.print(f"samples that are not there: {counts}", soft_wrap=True)
    return EXIT_OK


def _check_by(options: SampleOptions) -> None:
    """Raise ConfigError for options that change nothing without or with ``by``."""
    if options.by is None:
        if options.right_from is not None or options.with_dropped:
            raise ConfigError("flowrt samples takes --right-from and --with-dropped together with --by")
        return
    if options.tokens or options.jsonl or options.parquet:
        raise ConfigError("flowrt samples takes --by without --tokens, --jsonl and --parquet, which list samples")
    if options.by == "group" and options.with_dropped:
        raise ConfigError("flowrt samples --by group lists dropped groups anyway; leave --with-dropped out")
    if options.by != "group" and (options.limit is not None or options.order != "newest"):
        raise ConfigError(f"flowrt samples --by {options.by} counts all samples; choose some with --steps")


def _table_by(run_dir: Path, wanted: SampleFilter, options: SampleOptions, by: By) -> Table | None:
    settings = SampleSettings.of_run(run_dir)
    if options.right_from is not None:
        settings = dataclasses.replace(settings, right_from=options.right_from)
    if by == "group":
        return group_table(run_dir, wanted, settings, options.order, options.limit or DEFAULT_LIMIT)
    return distribution_table(run_dir, wanted, settings, by, with_dropped=options.with_dropped)


def _write(reader: SampleReader, wanted: SampleFilter, options: SampleOptions, console: Console) -> int:
    """Write a file; without order and limit all samples, oldest first."""
    order: Order = "oldest" if options.order == "newest" and options.limit is None else options.order
    rows, rewards = reader.each(wanted, order, options.limit, options.seed), reader.reward_names()
    if options.parquet is not None:
        console.print(f"{write_parquet(rows, rewards, options.parquet)} samples: {options.parquet}")
    elif options.jsonl is not None:
        count = write_jsonl(rows, rewards, options.jsonl)
        if options.jsonl != STDOUT:
            console.print(f"{count} samples: {options.jsonl}")
    return EXIT_OK


def _wanted(reader: SampleReader, options: SampleOptions, names: tuple[str, ...]) -> SampleFilter:
    """The filter of the options. Raises ConfigError for an evaluation or conditions without samples."""
    evaluated = reader.evaluations()
    if options.eval_name and options.eval_name not in evaluated:
        there = f"there are answers on {', '.join(evaluated)}" if evaluated else "there is none of any evaluation"
        raise ConfigError(f"no answer of an evaluation on {options.eval_name!r:.80} is stored; {there}")
    first, last = options.steps or (None, None)
    shortest, longest = options.length or (None, None)
    prompt = _prompt_number(options, names) if options.prompt else None
    # A file gets no samples of steps that were rolled back.
    flow = SampleFilter(eval_name=options.eval_name, with_rolled_back=not (options.jsonl or options.parquet))
    wanted = dataclasses.replace(
        flow,
        first_step=first,
        last_step=last,
        prompt=prompt,
        min_tokens=shortest,
        max_tokens=longest,
        reason=options.reason,
        grep=options.grep,
    )
    wanted.pattern()
    bounds = reader.steps(options.eval_name)
    if bounds is not None and wanted != flow and not _any(reader, wanted):
        raise ConfigError(_no_match(reader, flow, wanted, options, bounds))
    return wanted


def _no_match(
    reader: SampleReader, flow: SampleFilter, wanted: SampleFilter, options: SampleOptions, bounds: tuple[int, int]
) -> str:
    """The error message for conditions that no sample meets: the first one that no sample meets by itself, if any."""

    def none_of(**conditions: Any) -> bool:
        return not _any(reader, dataclasses.replace(flow, **conditions))

    if options.steps and none_of(first_step=wanted.first_step, last_step=wanted.last_step):
        return _no_step(reader, flow, options.steps, bounds)
    if options.reason and none_of(reason=options.reason):
        reasons = ", ".join(f"{word} ({count})" for word, count in reader.reasons().items()) or "none at all"
        return f"no stored sample has the reason {options.reason!r:.80}; there is {reasons}"
    if options.prompt and none_of(prompt=wanted.prompt):
        more = "" if options.eval_name else "; flowrt ledger shows what became of it"
        return f"no sample of prompt {options.prompt} is stored{more}"
    if options.length and none_of(min_tokens=wanted.min_tokens, max_tokens=wanted.max_tokens):
        return f"no stored sample has {wanted.min_tokens} to {wanted.max_tokens} response tokens; give other bounds"
    if options.grep and none_of(grep=options.grep):
        return f"no stored prompt or completion contains {options.grep!r:.80}; give another expression"
    return "no stored sample meets all of these conditions together, though each is met by some; leave one out"


def _prompt_number(options: SampleOptions, names: tuple[str, ...]) -> int:
    """The number of the prompt in the options, where a prompt of an evaluation is given as ROW or NAME:ROW."""
    name, _, row = options.prompt.rpartition(":")
    if not options.eval_name:
        return number_of(options.prompt, names)
    if name not in ("", options.eval_name):
        raise ConfigError(f"--prompt {options.prompt!r:.80} is not a row of {options.eval_name}")
    return first_number(options.eval_name) + number_of(row, ())


def _any(reader: SampleReader, wanted: SampleFilter) -> bool:
    return reader.query(wanted, limit=1).total > 0


def _no_step(reader: SampleReader, flow: SampleFilter, steps: tuple[int, int], bounds: tuple[int, int]) -> str:
    """The error message for steps without samples: the range of stored steps, and those nearest to the request."""
    what = "version" if flow.eval_name else "step"
    asked = f"{what} {steps[0]}" if steps[0] == steps[1] else f"{what}s {steps[0]} to {steps[1]}"
    text = f"no sample of {asked} is stored; stored are some of {what}s {bounds[0]} to {bounds[1]}"
    before = reader.query(dataclasses.replace(flow, last_step=steps[0] - 1), "newest", 1).samples
    after = reader.query(dataclasses.replace(flow, first_step=steps[1] + 1), "oldest", 1).samples
    return f"{text}, the nearest of {before[0].step} and {after[0].step}" if before and after else text


def model_dirs(run_dir: Path) -> list[Path]:
    """Directories that may have the tokenizer of the run's model, in order of preference."""
    named: list[Path] = []
    with suppress(OSError, ValueError):
        model = tomllib.loads((run_dir / CONFIG).read_text()).get("model")
        named = [Path(model)] if isinstance(model, str) and model else []
    return [run_dir / "model", run_dir / "start", *named, run_dir / "final"]


def _table(rows: Sequence[SampleRow], names: tuple[str, ...], title: str) -> Table:
    table = Table(title=title, box=SIMPLE, title_style="", header_style="")
    for name in ("sample", "step", "prompt", "reward", "adv.", "tokens", "stale"):
        table.add_column(name, justify="right", overflow="fold")
    for name in ("finish", "reason"):
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(
            *(str(row.id), _step(row), _prompt(row, names), _number(row.reward), _number(row.advantage)),
            *(str(row.tokens), "" if row.staleness is None else str(row.staleness), row.finish),
            row.reason.partition(":")[0],
        )
    return table


def _print_sample(row: SampleRow, names: tuple[str, ...], console: Console) -> None:
    where = f"evaluation of version {_step(row)}" if row.flow == "eval" else f"step {_step(row)}"
    facts = [f"reward {_number(row.reward)}", *(f"{name} {_number(value)}" for name, value in row.parts.items())]
    facts += [f"advantage {_number(row.advantage)}"] if row.advantage is not None else []
    versions = f"version {row.version_min}" + (f" to {row.version_max}" if row.version_max != row.version_min else "")
    facts += [f"{row.tokens} tokens", f"finish {row.finish}", versions, f"epoch {row.epoch}", f"attempt {row.attempt}"]
    times = (("generated", row.generate_s), ("scored", row.reward_s))
    facts += [f"{what} in {seconds:.3g} s" for what, seconds in times if seconds is not None]
    lines = [f"sample {row.id}: {where}, prompt {_prompt(row, names)}, member {row.member}", ", ".join(facts)]
    lines += [f"reason: {row.reason}"] if row.reason else []
    lines += ["prompt:", row.prompt_text, "completion:", row.completion]
    console.print()
    for line in lines:
        console.print(line, soft_wrap=True)


def _token_table(sample: Sample, texts: TokenTexts) -> Table:
    """Each token with both log-probabilities and its version."""
    table = Table(box=SIMPLE, header_style="")
    table.add_column("token", justify="right")
    table.add_column("text")
    for name in ("id", "log-prob, rollout", "log-prob, trainer", "version"):
        table.add_column(name, justify="right")
    shown = texts.of(sample.ids)
    versions = sample.versions()
    for at, token in enumerate(sample.ids):
        version = versions[at] if at < len(versions) else None
        table.add_row(
            str(at),
            "" if shown is None else _one_line(shown[at]),
            str(token),
            *(_number(column[at]) if at < len(column) else "" for column in (sample.logprobs, sample.trainer_logprobs)),
            "" if version is None else str(version),
        )
    return table


def _one_line(text: str) -> str:
    r"""A token with its line ends and tabs as ``\n`` and ``\t``."""
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace("\t", "\\t")


def _step(row: SampleRow) -> str:
    return f"{row.step} (run attempt {row.run_attempt}, rolled back)" if row.rolled_back else str(row.step)


def _prompt(row: SampleRow, names: tuple[str, ...]) -> str:
    return f"{row.eval_name}:{evaluated_row(row.prompt)}" if row.flow == "eval" else prompt_name(row.prompt, names)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.5g}"
