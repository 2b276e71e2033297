"""Constraints on a configuration: the bounds of its fields, and what one field requires of another.

A configuration that passes `check` can still be impossible on a machine
(`flowrt.launcher.worker_commands.check_machine`) or with its data (`flowrt.recipes.tasks.registry.check_task`).
"""

import dataclasses
import re
import shlex
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from string import Template
from typing import Any

from flowrt.engines.model_config import parse_overrides
from flowrt.engines.options import CUT_CHARACTER
from flowrt.engines.registry import ROLLOUT_ENGINES, TRAIN_ENGINES
from flowrt.errors import refuse
from flowrt.recipes.acting import acting_mistakes
from flowrt.recipes.algorithm_config import MAX_LIVE_SAMPLES, FilterConfig
from flowrt.recipes.algorithms import algorithm_mistakes, needs_reference
from flowrt.recipes.config import RolloutConfig, RunConfig, UniformCurriculum, key_values
from flowrt.recipes.data_constraints import data_mistakes
from flowrt.recipes.devices import with_devices
from flowrt.recipes.eval_constraints import eval_mistakes
from flowrt.recipes.guards import guard_mistakes
from flowrt.recipes.model_files import check_model_files
from flowrt.recipes.open_work import open_samples
from flowrt.recipes.tasks.registry import NEED_MODELS, takes_reward
from flowrt.recipes.tasks.task_file import is_task_file
from flowrt.rewards.options import RewardOptions
from flowrt.rewards.remote import judge_mistakes
from flowrt.rewards.reward_names import parse_functions
from flowrt.runtime import time_limits
from flowrt.runtime.bounds import advice, contains, interval_of

MODEL_DEVICE = re.compile(r"(cpu|cuda|npu|xpu|mps)(:\d{1,4})?")
STORED_TOKEN_BYTES = 12
"""Bytes for each token of a stored sample: its id, two log-probabilities, and text."""
MAX_STOPS = 64
MAX_STOP_BYTES = 256
"""Limits of ``rollout.stop``: strings, and bytes of each. Every running sequence is searched for them at each token."""


def check(config: RunConfig, *, has_weights: bool = True) -> None:
    """Check the bounds of every field and the constraints between fields.

    The files of ``config.model`` are checked too; the data is not (see `flowrt.recipes.tasks.registry.check_task`).

    Args:
        config: the configuration.
        has_weights: whether the directory of the model has to have weights.

    Raises ConfigError with all mistakes; of the constraints between fields only where every value is in its bounds.
    """
    refuse(value_mistakes(config))
    refuse(
        algorithm_mistakes(config),
        guard_mistakes(config),
        _group_mistakes(config),
        _size_mistakes(config),
        _trainer_mistakes(config),
        rollout_mistakes(config),
        _reference_mistakes(config),
        _controller_mistakes(config),
        _host_mistakes(config),
        data_mistakes(config),
        eval_mistakes(config),
        reward_mistakes(config),
        acting_mistakes(config),
        _file_mistakes(config, has_weights=has_weights),
    )


def value_mistakes(table: Any, prefix: str = "") -> Iterator[str]:
    """Numbers outside the bounds of their fields, and text with a NUL or with bytes that are no text in the locale.

    Args:
        table: a configuration dataclass, with those in it.
        prefix: dotted prefix of its fields in messages, with the last dot.
    """
    for name, hint, value in key_values(table, prefix):
        interval = interval_of(hint)
        for index, element in enumerate(value if isinstance(value, tuple) else (value,)):
            if dataclasses.is_dataclass(element):
                yield from value_mistakes(element, f"{name}[{index}].")
            elif isinstance(element, str):
                yield from _text_mistakes(element, name)
            elif element is not None and interval is not None and not contains(interval, element):
                yield f"{name} is {element}; use {advice(interval)}"


def _text_mistakes(text: str, name: str) -> Iterator[str]:
    if "\0" in text:
        yield f"{name} is {text!r:.80}, with a NUL in it; remove it"
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        yield (
            f"{name} is {text!r}, which has bytes that are not text in this locale; use a UTF-8 locale "
            "(LC_ALL=C.UTF-8), or another name"
        )


def reward_mistakes(config: RunConfig) -> Iterator[str]:
    """Reward functions that the recipe does not call, and those that are unusable.

    Raises ConfigError for a function that is malformed.
    """
    options = config.reward
    of_task = f"task:{config.recipe}" if is_task_file(config.recipe) and not takes_reward(config.recipe) else ""
    if of_task:
        if options.functions not in ((), (of_task,)):
            yield (
                f"task {config.recipe} has a reward of its own, and would not use {options.functions[0]}; leave it "
                "out, or give the recipe takes_reward=True"
            )
    elif options != RewardOptions() and not takes_reward(config.recipe):
        yield f"recipe {config.recipe} has a built-in reward; to use your own: flowrt run custom"
    if not MODEL_DEVICE.fullmatch(options.model_device):
        yield f"reward.model_device is {options.model_device!r:.80}; use cpu, or cuda:0 as torch names it"
    kinds = {function.kind for function in parse_functions(options.functions)}
    if not of_task and "task" in kinds:
        yield "a reward function of kind task is for a task in a file alone: flowrt run FILE.py"
    if "judge" in kinds:
        yield from judge_mistakes(options.judge)


def _group_mistakes(config: RunConfig) -> Iterator[str]:
    """A group filter that refuses every group, or none, and a curriculum with contradictory options."""
    options, none = config.algorithm.filter, FilterConfig()
    if options.zero_variance and config.group_size == 1:
        yield (
            "algorithm.filter.zero_variance is on and group_size is 1: the rewards of every group would be equal, and "
            "all would be filtered; use groups of 2 or more, or leave it out"
        )
    low, high = options.rewards
    if low > high:
        yield (
            f"algorithm.filter.min_reward is {low}, above algorithm.filter.max_reward ({high}): no group would be "
            "trained; use a lower one"
        )
    if options == replace(none, tries=options.tries) != none:
        yield (
            f"algorithm.filter.tries is {options.tries}, and no groups are filtered; set "
            "algorithm.filter.zero_variance, algorithm.filter.min_reward, algorithm.filter.max_reward or "
            "algorithm.filter.function, or leave it out"
        )
    curriculum = config.curriculum
    if isinstance(curriculum, UniformCurriculum):
        return
    if curriculum.failed_reward >= curriculum.solved_reward:
        yield (
            f"curriculum.failed_reward is {curriculum.failed_reward}, not below curriculum.solved_reward "
            f"({curriculum.solved_reward}); change one of them"
        )
    if config.data.epochs == 1:
        yield (
            "curriculum.type is solve_rate and data.epochs is 1: every prompt is new in the first epoch, and none is "
            "skipped; use 2 epochs or more, or 0 for as many as the steps need"
        )


def _size_mistakes(config: RunConfig) -> Iterator[str]:
    """Numbers that are too large together, or that do not divide each other."""
    live_steps = min(config.max_staleness + 1, config.steps)
    samples = live_steps * config.prompts_per_step * config.group_size
    if samples > MAX_LIVE_SAMPLES:
        yield (
            f"prompts_per_step {config.prompts_per_step} x group_size {config.group_size} x {live_steps} steps at once "
            f"(staleness {config.max_staleness}) are {samples:,} samples; use at most {MAX_LIVE_SAMPLES:,} together"
        )
    is_built = not config.model and config.recipe not in NEED_MODELS
    if is_built and config.rollout.max_new_tokens >= config.build.max_length:
        yield (
            f"rollout.max_new_tokens is {config.rollout.max_new_tokens}, and build.max_length, for prompt and response "
            f"together, is {config.build.max_length}; use fewer, or a longer one"
        )
    heads = config.build.heads
    if is_built and heads % max(heads // 2, 1):
        yield (
            f"build.heads is {heads}, which its {heads // 2} key-value heads do not divide; use an even number, or 1, 3"
        )


def _trainer_mistakes(config: RunConfig) -> Iterator[str]:
    """Options that the training engine does not support, or that contradict each other."""
    trainer = config.trainer
    yield from TRAIN_ENGINES[trainer.engine].mistakes(trainer)
    if trainer.lora.rank and not trainer.lora.alpha:
        yield "trainer.lora.alpha is 0: the adapters would change nothing; use another, for example 16"
    if trainer.schedule == "constant":
        return
    if trainer.min_lr > trainer.lr:
        yield f"trainer.min_lr is {trainer.min_lr}, above trainer.lr ({trainer.lr}), from which it falls"
    left = config.steps - max(trainer.warmup_steps, 1) - trainer.decay_steps
    if trainer.decay_steps and not trainer.min_lr and left > 0:
        yield (
            f"trainer.decay_steps is {trainer.decay_steps} and trainer.min_lr 0: the last {left} of {config.steps} "
            "steps would train with a learning rate of 0; use a min_lr above 0, more decay_steps, or fewer steps"
        )


def rollout_mistakes(config: RunConfig) -> Iterator[str]:
    """Options of sampling that are unusable, and options, weights and a device that an engine does not support."""
    yield from _sampling_mistakes(config.rollout)
    yield from _support_mistakes(config)
    published = TRAIN_ENGINES[config.trainer.engine].published(config.trainer)
    rollout = with_devices(config).rollout
    yield from ROLLOUT_ENGINES[rollout.engine].mistakes(rollout, published, deterministic=config.deterministic)


def _reference_mistakes(config: RunConfig) -> Iterator[str]:
    """Options of reference workers that are unusable, and any in a run without reference workers."""
    if needs_reference(config.algorithm):
        yield from _refresh_mistakes(config)
        if config.reference.model:
            overrides = parse_overrides(config.model_overrides)
            check_model_files(Path(config.reference.model), config.rollout.max_new_tokens, overrides)
        return
    for field in dataclasses.fields(config.reference):
        value = getattr(config.reference, field.name)
        if value not in (field.default, *(["cpu"] if field.name == "device" else [])):
            yield (
                f"reference.{field.name} is {value}, and algorithm {config.algorithm.name} as configured needs no "
                "reference, so no worker is started; leave it out, or use an algorithm.kl.coef above 0"
            )


def _refresh_mistakes(config: RunConfig) -> Iterator[str]:
    """A refresh of the reference that is impossible or has no effect."""
    options = config.reference
    if not options.refresh:
        return
    if options.refresh >= config.steps:
        yield (
            f"reference.refresh is {options.refresh}, and steps is {config.steps}: no sample would be scored by "
            "refreshed weights; use fewer than the steps, or 0"
        )
    if TRAIN_ENGINES[config.trainer.engine].published(config.trainer).lora is not None:
        yield (
            f"reference.refresh is {options.refresh}, and the trainer publishes adapters alone, of which no reference "
            "can be made; set trainer.lora.publish to merged, or reference.refresh to 0"
        )


def _sampling_mistakes(rollout: RolloutConfig) -> Iterator[str]:
    """Sampling of one token alone, and unusable stop strings."""
    if rollout.top_k == 1:
        yield (
            "rollout.top_k is 1: all samples of a prompt would be the most likely one, and nothing would be learned; "
            "use 2 or more, or 0 to sample from all tokens"
        )
    for stop in rollout.stop:
        if not stop or len(stop.encode()) > MAX_STOP_BYTES:
            yield f"rollout.stop has {stop!r:.80}; a stop string has 1 to {MAX_STOP_BYTES} bytes"
        if CUT_CHARACTER in stop:
            yield (
                f"rollout.stop has {stop!r:.80}, with the character U+FFFD, which is what bytes are decoded to "
                "that are not a whole character yet; leave it out"
            )
    if len(rollout.stop) > MAX_STOPS:
        yield f"rollout.stop has {len(rollout.stop)} strings; use at most {MAX_STOPS}"


def _support_mistakes(config: RunConfig) -> Iterator[str]:
    """Truncated sampling with a training engine that ignores which tokens could be drawn."""
    engine, rollout, none = config.trainer.engine, config.rollout, RolloutConfig()
    for name in ("top_k", "top_p", "min_p"):
        value = getattr(rollout, name)
        if value != getattr(none, name) and not TRAIN_ENGINES[engine].applies_supports:
            yield (
                f"rollout.{name} is {value}, and trainer.engine {engine} does not renormalise log-probabilities over "
                "the tokens that could be drawn (applies_supports is False in its descriptor): it would train another "
                f"policy than the one sampled; leave rollout.{name} out, or use another engine"
            )


def _file_mistakes(config: RunConfig, *, has_weights: bool) -> Iterator[str]:
    """A sample store that cannot hold the samples of one step, and models at intervals that the run does not reach.

    Raises ConfigError for overrides and files of the model that are unusable.
    """
    samples = config.samples
    most = max(samples.per_step, config.group_size) if samples.per_step else 0  # groups are stored whole
    least = -(-most * config.rollout.max_new_tokens * STORED_TOKEN_BYTES // 1_000_000)
    if samples.mb < least:
        yield (
            f"samples.mb is {samples.mb}, and the samples of one step may take {least} MB ({most} samples, the larger "
            f"of samples.per_step and group_size, x rollout.max_new_tokens {config.rollout.max_new_tokens} x "
            f"{STORED_TOKEN_BYTES} bytes); set it to at least {least}, or samples.per_step to 0"
        )
    if config.checkpoint.hf_every > config.steps:
        yield (
            f"checkpoint.hf_every is {config.checkpoint.hf_every}, above steps ({config.steps}): no model would be "
            "written but the final one; use fewer, or 0"
        )
    overrides = parse_overrides(config.model_overrides)
    if config.model and has_weights:
        check_model_files(Path(config.model), config.rollout.max_new_tokens, overrides)


def _controller_mistakes(config: RunConfig) -> Iterator[str]:
    """Timeouts that contradict each other."""
    times = config.controller
    if times.worker_timeout_s <= times.heartbeat_s:
        yield (
            f"controller.worker_timeout_s is {times.worker_timeout_s}, no longer than heartbeat_s "
            f"({times.heartbeat_s}): workers would count as lost between heartbeats; make it several times as long"
        )
    least_s = time_limits.least_request_s(*open_samples(config))
    if 0 < times.request_timeout_s < least_s:
        yield (
            f"controller.request_timeout_s is {times.request_timeout_s:g}, and the samples of the open steps take at "
            f"least {least_s:.0f} s (rollout.max_new_tokens {config.rollout.max_new_tokens} at "
            f"{time_limits.MAX_TOKENS_PER_S:.0f} tokens/s): requests that wait for them would fail; use more, or 0"
        )


def _host_mistakes(config: RunConfig) -> Iterator[str]:
    """Placement options that contradict each other or cannot be split into words."""
    trainer = config.trainer
    if trainer.ranks % trainer.nodes:
        yield (
            f"trainer.ranks is {trainer.ranks}, which trainer.nodes ({trainer.nodes}) does not divide: each host runs "
            "the same number of ranks; change one of them"
        )
    if trainer.nodes > 1 and not config.launch.trainer:
        yield (
            f"trainer.nodes is {trainer.nodes}, and launch.trainer is empty, so all ranks would start on this machine; "
            f"set it to a prefix that starts a command on each of {trainer.nodes} hosts, like srun --ntasks-per-node=1"
        )
    for name in ("rollout", "trainer", "auxiliary"):
        words = getattr(config.launch, name)
        try:
            shlex.split(words)
        except ValueError as error:
            yield f"launch.{name} cannot be split into words ({error}): {words!r}; check the quotes"
    if config.launch.rollout_hosts and "HOST" not in Template(config.launch.rollout).get_identifiers():
        yield (
            f"launch.rollout_hosts is {config.launch.rollout_hosts!r}, and launch.rollout has no $HOST for them: "
            f"{config.launch.rollout!r}; put it in place of the host, as in 'ssh $HOST'"
        )
    if not all(name.strip() for name in config.launch.devices.split(",")):
        yield f"launch.devices is {config.launch.devices!r}; use auto, none, or a list like 0,1,2"
