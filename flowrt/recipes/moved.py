"""A run that goes on may do so elsewhere, on more or on less than before; what it computes stays what it was."""

import dataclasses
from collections.abc import Iterator, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

from flowrt.errors import ConfigError
from flowrt.recipes.config import RunConfig
from flowrt.recipes.load import check, read_flags

FREE = (
    "steps",
    "threads",
    "restarts",
    "rollout.workers",
    "rollout.rows",
    "rollout.sglang",
    "trainer.ranks",
    "trainer.nodes",
    "trainer.ranks_s",
    "trainer.micro_batch_tokens",
    "trainer.forward_tokens",
    "checkpoint.keep",
    "checkpoint.drain_s",
    "controller",
    "supervisor",
    "launch",
)
"""What may change, whole tables among it. None of it decides what is sampled or trained, but for rounding."""


def moved(config: RunConfig, words: Sequence[str]) -> RunConfig:
    """The configuration of a run that goes on, with what these flags change in it.

    Raises ConfigError when that is what the run computes; leaves with exit code 2 on bad flags, as a new run does.
    """
    told = f"A run goes on with what it has; what may change: {', '.join(FREE)}."
    changed = read_flags("flowrt resume RUN", told, words, config)
    for name in _changes(dataclasses.asdict(config), dataclasses.asdict(changed)):
        if not any(name == free or name.startswith(f"{free}.") for free in FREE):
            was, now = attrgetter(name)(config), attrgetter(name)(changed)
            raise ConfigError(
                f"{name} is {was!r} in {config.run_dir}, and stays that when it goes on, not {now!r}: where a run is, "
                f"and on how much, may change ({', '.join(FREE)}), but not what it computes; for that start "
                "another one, which can have this one's model with --model"
            )
    if keys := changed.controller.keys:
        controller = dataclasses.replace(changed.controller, keys=str(Path(keys).absolute()))
        changed = dataclasses.replace(changed, controller=controller)
    check(changed)
    return changed


def _changes(old: dict[str, Any], new: dict[str, Any], path: str = "") -> Iterator[str]:
    """The names of the values that differ."""
    for key, value in old.items():
        if isinstance(value, dict):
            yield from _changes(value, new[key], f"{path}{key}.")
        elif value != new[key]:
            yield f"{path}{key}"
