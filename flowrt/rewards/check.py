"""Check of the reward functions before a run starts: functions that would fail in every call are refused."""

import asyncio
import subprocess
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import islice
from time import monotonic

from flowrt.errors import ConfigError
from flowrt.rewards.built_in import check_packages
from flowrt.rewards.call_forms import RewardSample, facts
from flowrt.rewards.children import FIX, PROGRESS_AFTER_S
from flowrt.rewards.code import check_sandbox
from flowrt.rewards.options import RewardOptions
from flowrt.rewards.outcomes import Result
from flowrt.rewards.remote import check_key
from flowrt.rewards.reward_names import check_file, parse_functions
from flowrt.rewards.rows import decode_row
from flowrt.rewards.scoring import RewardScorer
from flowrt.rewards.user_file import as_text

CALLS = 4
"""Number of rows, of those to which it applies, for which each function is called."""
MAX_ROWS = 2000
"""Number of rows after which a function that has not applied to any is reported."""
MAX_S = 60.0
"""Time in seconds after which no further rows are tried."""


def check_rewards(
    options: RewardOptions, rows: Iterable[bytes], progress: Callable[[str], None], model: str = ""
) -> tuple[str, ...]:
    """Load the functions, and call each with the answers of rows as responses, until each has returned rewards.

    The output of the functions is discarded.

    Args:
        options: the functions.
        rows: rows of all data sets in turn, each as JSON of its columns; read as far as they are needed.
        progress: receives notes on long waits, and on functions that apply to no row.
        model: directory of the run's model, for functions that take its tokenizer.

    Returns:
        Names of the parts of the functions and of the functions of groups, see `RewardOptions.parts`.

    Raises ConfigError if a function cannot be loaded or fails, and if none of a weight above 0 returns a reward.
    """
    check_here(options)
    return asyncio.run(_check(replace(options, on_failure="stop", workers=1), rows, progress, model))


def note_rate(options: RewardOptions, scorer: RewardScorer, calls: int, progress: Callable[[str], None]) -> None:
    """Tell how long ``reward.rate_per_s`` makes calls take, if that is long.

    Args:
        options: the functions.
        scorer: the scorer of the functions, which are loaded.
        calls: number of calls of each function.
        progress: receives the note.
    """
    limited = [function.name for function in scorer.functions if scorer.form(function).is_async]
    least_s = calls * len(limited) / options.rate_per_s if options.rate_per_s else 0.0
    if least_s >= PROGRESS_AFTER_S:
        progress(
            f"up to {calls * len(limited)} calls of {', '.join(limited)} begin within {least_s:.0f} s: "
            f"{options.rate_per_s:g} in a second (reward.rate_per_s)"
        )


def check_here(options: RewardOptions) -> None:
    """Raise ConfigError if a file, a package, a program or a key is missing on this host."""
    for function in parse_functions(options.functions):
        check_file(function)
        check_packages(function)
        if function.kind == "code":
            check_sandbox(options.code_sandbox)
        if function.is_remote:
            check_key(options)


async def _check(
    options: RewardOptions, rows: Iterable[bytes], progress: Callable[[str], None], model: str
) -> tuple[str, ...]:
    scorer = RewardScorer(options, output=subprocess.DEVNULL, model=model)
    parts: dict[str, None] = {}
    applied = Counter[str]()
    scoring = [function.name for function in scorer.functions if function.weight]
    tried, begin_s = 0, monotonic()
    try:
        await scorer.load(progress)
        note_rate(options, scorer, CALLS, progress)
        parts |= dict.fromkeys(f"{name}/" for name in scorer.of_groups)
        is_several = any(scorer.form(function).form != "sample" for function in scorer.functions)
        for row in islice(rows, MAX_ROWS):
            tried += 1
            response = as_text(decode_row(row).get("answer"))
            samples = [RewardSample(text, row, facts(text)) for text in (response, "")[: 1 + is_several]]
            for function, outcome in zip(scorer.functions, (await scorer.outcomes_of(samples))[0], strict=True):
                if outcome.is_failure:
                    raise ConfigError(f"{scorer.failures([outcome], response, row, [function])[0]}; {FIX}")
                applied[function.name] += outcome.result is Result.OK
                parts |= dict.fromkeys(f"{function.name}/{part}" for part in outcome.parts)
            is_late = monotonic() - begin_s > MAX_S
            if min(applied.values()) >= CALLS or (is_late and any(applied[name] for name in scoring)):
                break
    finally:
        await scorer.close()
    unused = [function.described for function in scorer.functions if not applied[function.name]]
    if not any(applied[name] for name in scoring):
        first = next(function for function in scorer.functions if function.weight)
        raise ConfigError(f"{first.described}: it returned None for the first {tried} rows; {FIX}")
    for name in unused:
        progress(f"{name} returned None for the first {tried} rows: it applies to none of them")
    return tuple(parts)
