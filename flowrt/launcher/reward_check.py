"""``flowrt reward check``: the results of a run's reward functions, or of a task file's reward, on its rows, without
a model.
"""

import asyncio
import random
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

from rich.console import Console

from flowrt.errors import EXIT_OK, ConfigError
from flowrt.launcher.absolute_paths import with_absolute_paths
from flowrt.launcher.run_checks import check_files, check_start
from flowrt.launcher.terminal import printable
from flowrt.recipes.config import RunConfig, changed
from flowrt.recipes.config_io import read, take, to_toml
from flowrt.recipes.constraints import check
from flowrt.recipes.flag_help import HelpText
from flowrt.recipes.tasks.problems import in_turn, open_sets
from flowrt.recipes.tasks.registry import takes_reward
from flowrt.recipes.tasks.task_file import PROCESS, is_task_file, split
from flowrt.recipes.tasks.task_reward import row_of, task_reward, with_task_reward
from flowrt.rewards.call_forms import RewardSample, facts
from flowrt.rewards.check import check_here, note_rate
from flowrt.rewards.outcomes import Result, RewardOutcome
from flowrt.rewards.rows import decode_row
from flowrt.rewards.scoring import CALLS, RewardScorer
from flowrt.rewards.user_file import as_text
from flowrt.runtime.file_process import ask
from flowrt.runtime.waits import wait_all

DESCRIPTION = (
    "Call reward functions on the rows of a data set, or the reward of a task FILE.py on its prompts, with four "
    "responses each; starts no run."
)
COMMON = (
    "data.path",
    "reward.functions",
    "data.split",
    "data.prompt_key",
    "data.answer_key",
    "reward.timeout_s",
    "reward.memory_mb",
    "reward.after",
)
"""The keys that --help shows."""
LIMIT = 50
"""Number of rows without --limit."""
LONG = 100_000
"""Characters of the long response."""
GIBBERISH = 200
ALPHABET = "etaoin shrdlu ETAOIN 0123456789 +-*/=()[]{}<>$\\\"'`\n\u00e4\u6570\U0001f600"
PROBES = ("its answer", "empty", "gibberish", "100 KB")


@dataclass(slots=True)
class Found:
    """The outcomes of one function on one kind of response."""

    outcomes: list[RewardOutcome] = field(default_factory=list)
    first: dict[Result, str] = field(default_factory=dict)
    """For each way to fail, the first such failure."""


def reward_check(words: Sequence[str], console: Console) -> int:
    """Print outcomes, rewards, times in milliseconds and first failures of each function and kind of response.

    Returns the exit code. Raises ConfigError for what a run would refuse: a bad configuration before the report, failed
    rewards after it.
    """
    given, flags = take("--limit", list(words))
    limit = given or str(LIMIT)
    if not limit.isdecimal() or not 0 < int(limit[:7]) <= 100_000:
        raise ConfigError(f"--limit is {limit!r}; use a number of rows from 1 to 100000")
    about = f"{DESCRIPTION} --limit N: rows (default: {LIMIT})."
    text = HelpText(about=about, common=COMMON, is_listed=_is_listed)
    config = read(flags, "flowrt reward check", default="custom", help_text=text, more=["--limit"])
    check(config)
    with_absolute_paths(config)  # refuses guards.command without a program
    if not takes_reward(config.recipe):
        return _check_task(config, int(limit), console)
    if not (config.data.path or config.data.sets) or not config.reward.functions:
        raise ConfigError("flowrt reward check needs --data PATH and --reward FUNCTION; --help lists all flags")
    check_here(config.reward)
    sets = open_sets(replace(config.data, eval_prompts=0))
    problems = [set_.training for set_ in sets]
    answers = [problem.answer.encode() for problem in islice(in_turn(problems), int(limit))]
    _print(asyncio.run(_found(config, answers, console)), len(answers), console)
    config = _with_training_rows(config, console)
    config = check_files(config, lambda text: console.print(printable(text)))
    if config.model:
        check_start(config)
    return EXIT_OK


def _with_training_rows(config: RunConfig, console: Console) -> RunConfig:
    """The configuration, without held-out rows if too few are there for a run: rewards are checked on any number."""
    try:
        open_sets(replace(config.data, eval_prompts=0) if config.eval.data else config.data)
    except ConfigError as error:  # of the rows that are held out: without them the sets have been opened
        console.print(f"a run would refuse this: {printable(str(error), one_line=True)}", soft_wrap=True)
        return changed(config, {"data.eval_prompts": 0})
    return config


def _check_task(config: RunConfig, limit: int, console: Console) -> int:
    """`reward_check` for the reward of a task file."""
    if not is_task_file(config.recipe):
        raise ConfigError(
            f"recipe {config.recipe} has a reward of its own; flowrt reward check takes FILE.py or custom"
        )
    file = f"task file {split(config.recipe)[0]}"
    answered = ask(PROCESS, ["answers", str(limit)], file, config.data.check_timeout_s, to_toml(config))
    answers = answered.get("answers")
    if not isinstance(answers, list):
        raise ConfigError(f"{file} ended its process without an answer; correct it")
    rows = [row_of(str(answer).encode()) for answer in answers]
    outcomes = asyncio.run(_found(with_task_reward(config), rows, console))
    _print(outcomes, len(rows), console)
    config = check_files(config, lambda text: console.print(printable(text)))
    if config.model:
        check_start(config)
    return EXIT_OK


async def _found(config: RunConfig, rows: Sequence[bytes], console: Console) -> dict[tuple[str, str], Found]:
    """The outcomes of all calls, by function and kind of response. ``rows``: JSON of the columns of each row."""
    scorer = RewardScorer(config.reward, task=task_reward(config), model=config.model)

    def note(text: str) -> None:
        console.print(printable(text, one_line=True), soft_wrap=True, highlight=False, markup=False)

    outcomes_of = {(function.name, probe): Found() for function in scorer.functions for probe in PROBES}
    try:
        await scorer.load(note)
        note_rate(config.reward, scorer, len(rows) * len(PROBES), note)
        calls = [(probe, response, row) for row in rows for probe, response in _responses(row)]
        samples = [RewardSample(response, row, facts(response)) for _, response, row in calls]
        groups = [samples[at : at + len(PROBES)] for at in range(0, len(samples), len(PROBES))]
        scoring = [asyncio.create_task(scorer.outcomes_of(group)) for group in groups]
        await wait_all(scoring, CALLS, "rewards", "reward functions")
        outcomes = [of_sample for task in scoring for of_sample in task.result()]
    finally:
        await scorer.close()
    for (probe, response, row), of_call in zip(calls, outcomes, strict=True):
        for function, outcome in zip(scorer.functions, of_call, strict=True):
            place = outcomes_of[function.name, probe]
            place.outcomes.append(outcome)
            if outcome.is_failure and outcome.result not in place.first:
                place.first[outcome.result] = scorer.failures([outcome], response, row, [function])[0]
    return outcomes_of


def _responses(row: bytes) -> Iterable[tuple[str, str]]:
    """Each kind of response with its text for a row; the same texts in every check."""
    rng = random.Random(row)
    answer = as_text(decode_row(row).get("answer"))
    texts = (answer, "", "".join(rng.choices(ALPHABET, k=GIBBERISH)), "".join(rng.choices(ALPHABET, k=LONG)))
    return zip(PROBES, texts, strict=True)


def _print(outcomes_of: dict[tuple[str, str], Found], rows: int, console: Console) -> None:
    def line(text: str) -> None:
        console.print(printable(text, one_line=True), soft_wrap=True, highlight=False, markup=False)

    heads = " ".join(f"{head:>9}" for head in ("mean", "min", "max", "ms", "max ms"))
    line(f"{'function':<16} {'response':<12} {heads}  outcomes ({rows} rows)")
    for (name, probe), of_function in outcomes_of.items():
        values = [outcome.value for outcome in of_function.outcomes if outcome.result is Result.OK]
        times = [1e3 * outcome.seconds for outcome in of_function.outcomes]
        spread = (statistics.fmean(values), min(values), max(values)) if values else (float("nan"),) * 3
        counts = {result: sum(outcome.result is result for outcome in of_function.outcomes) for result in Result}
        kinds = ", ".join(f"{result} {count}" for result, count in counts.items() if count)
        numbers = " ".join(f"{value:>9.4g}" for value in spread)
        numbers += "".join(f" {value:>9.3f}" for value in (statistics.fmean(times), max(times)))
        line(f"{name:<16} {probe:<12} {numbers}  {kinds}")
    for text in dict.fromkeys(text for of_function in outcomes_of.values() for text in of_function.first.values()):
        line(f"  {text}")
    for name in dict.fromkeys(name for name, _ in outcomes_of):
        given = {
            outcome.value
            for (of, _), of_function in outcomes_of.items()
            if of == name
            for outcome in of_function.outcomes
            if outcome.result is Result.OK
        }
        if len(given) == 1:
            line(f"  {name} gave every response the same reward, {given.pop():g}: nothing would be learned from it")


def _is_listed(name: str) -> bool:
    return name.startswith(("data.", "reward."))
