"""Check of the reward functions before a run starts: functions that would fail in every call are refused."""

import asyncio
import json
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import replace

from flowrt.errors import ConfigError
from flowrt.rewards.built_in import check_packages
from flowrt.rewards.code import check_sandbox
from flowrt.rewards.functions import check_file, parse_functions
from flowrt.rewards.options import RewardOptions
from flowrt.rewards.outcomes import Result
from flowrt.rewards.pool import FIX
from flowrt.rewards.remote import check_key
from flowrt.rewards.scoring import RewardScorer
from flowrt.rewards.user_file import as_text

FIRST_ROWS = 20
"""Number of rows among which each function must apply to at least one."""


def check_rewards(options: RewardOptions, rows: Sequence[bytes], progress: Callable[[str], None]) -> tuple[str, ...]:
    """Load the functions, and call each with the answers of rows as responses, until each has returned a reward.

    The output of the functions is discarded.

    Args:
        options: the functions.
        rows: the first rows, each as JSON of its columns.
        progress: receives notes on long waits.

    Returns:
        Names of the parts of the functions, as FUNCTION/PART.

    Raises ConfigError if a function cannot be loaded, fails, or returns None for all rows.
    """
    check_here(options)
    return asyncio.run(_check(replace(options, on_failure="stop", workers=1), rows, progress))


def check_here(options: RewardOptions) -> None:
    """Raise ConfigError if a file, a package, a program or a key is missing on this host."""
    for one in parse_functions(options.functions):
        check_file(one)
        check_packages(one)
        if one.kind == "code":
            check_sandbox(options.code_sandbox)
        if one.is_remote:
            check_key(options)


async def _check(options: RewardOptions, rows: Sequence[bytes], progress: Callable[[str], None]) -> tuple[str, ...]:
    scorer = RewardScorer(options, output=subprocess.DEVNULL)
    parts: dict[str, None] = {}
    unused = {one.name: one for one in scorer.functions}
    try:
        if scorer.pool is not None:
            await scorer.pool.load(progress)
        for row in rows:
            response = as_text(json.loads(row).get("answer"))
            for one, outcome in zip(scorer.functions, await scorer.outcomes(response, row), strict=True):
                if outcome.is_failure:
                    raise ConfigError(f"{scorer.failures([outcome], response, row, [one])[0]}; {FIX}")
                if outcome.result is Result.OK:
                    unused.pop(one.name, None)
                parts |= dict.fromkeys(f"{one.name}/{part}" for part in outcome.parts)
            if not unused:
                return tuple(parts)
    finally:
        await scorer.close()
    one = next(iter(unused.values()))
    raise ConfigError(f"{one.described}: it returned None for the first {len(rows)} rows; {FIX}")
