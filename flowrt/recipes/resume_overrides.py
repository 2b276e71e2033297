"""Configuration keys that may change when a run is resumed: placement and resources, but not what it computes."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from flowrt.errors import ConfigError
from flowrt.recipes.config import RunConfig, key_values
from flowrt.recipes.config_io import read_flags
from flowrt.recipes.constraints import check
from flowrt.recipes.data_config import DataSetConfig
from flowrt.recipes.data_sets import described
from flowrt.recipes.flag_help import HelpText

FREE = (
    "recipe_sha256",
    "steps",
    "threads",
    "device",
    "max_run_restarts",
    "run_restart_window_s",
    "guard",
    "reward.workers",
    "reward.timeout_s",
    "reward.load_timeout_s",
    "reward.memory_mb",
    "reward.max_failures",
    "reward.concurrency",
    "reward.key_variable",
    "rollout.workers",
    "rollout.device",
    "rollout.max_running_requests",
    "rollout.journal_s",
    "rollout.sglang",
    "rollout.vllm",
    "trainer.ranks",
    "trainer.device",
    "trainer.fsdp.device",
    "trainer.nodes",
    "trainer.rank_timeout_s",
    "trainer.micro_batch_tokens",
    "trainer.forward_tokens",
    "reference.device",
    "checkpoint.keep",
    "checkpoint.samples",
    "checkpoint.hf_every",
    "checkpoint.preemption_save_timeout_s",
    "samples",
    "controller",
    "recorder",
    "supervisor",
    "launch",
)
"""Keys, and names of whole tables, that may change. They have no effect on what is sampled or trained, except for
rounding, for ``steps`` (a learning rate that decays over all steps), and for guards that hold the staleness bound at 0:
a run that a guard has stopped can be resumed with other guards."""

COMMON = (
    "steps",
    "rollout.workers",
    "rollout.max_running_requests",
    "trainer.ranks",
    "trainer.micro_batch_tokens",
    "device",
    "threads",
    "guard",
    "max_run_restarts",
    "controller.no_progress_timeout_s",
)
"""Those of them that ``flowrt resume --help`` shows."""


def may_change(name: str) -> bool:
    """Whether the field of this dotted name may change when a run is resumed."""
    return any(name == free or name.startswith(f"{free}.") for free in FREE)


def apply_overrides(config: RunConfig, words: Sequence[str], help_notes: str = "") -> RunConfig:
    """The configuration of a resumed run: the stored configuration with the values of flags, checked.

    Args:
        config: the stored configuration.
        words: the flags and their values.
        help_notes: sentences that --help prints in addition.

    Raises ConfigError for a flag that is unknown or changes what the run computes, and for invalid values. Exits with
    code 0 after printing --help, which lists only the keys that may change.
    """
    about = "Continue a run from its newest checkpoint. It keeps its configuration, but for the keys that are listed."
    text = HelpText("RUN", about, help_notes, COMMON, may_change)
    changed = read_flags("flowrt resume", words, config, text)
    values = {name: value for name, _, value in key_values(changed)}
    for name, _, value in key_values(config):
        if value != (now := values.get(name)) and not may_change(name):
            raise ConfigError(
                f"{name} is {_shown(value)} in {config.run_dir}, and stays that when the run is resumed, not "
                f"{_shown(now)}: where a "
                "run is, and on how much, may change (flowrt resume --help all), but not what it computes; for that "
                "start another one, which can have this one's model with --model"
            )
    if keys := changed.controller.keys:
        controller = dataclasses.replace(changed.controller, keys=str(Path(keys).absolute()))
        changed = dataclasses.replace(changed, controller=controller)
    check(changed)
    return changed


def _shown(value: object) -> str:
    """A value as text of an error message."""
    if isinstance(value, tuple) and all(isinstance(member, DataSetConfig) for member in value):
        return described(value)
    return repr(value)
