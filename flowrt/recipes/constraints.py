"""Constraints on a configuration: the bounds of its fields, and what one field requires of another.

A configuration that passes `check` can still be impossible on a machine
(`flowrt.launcher.worker_commands.check_machine`) or with its data (`flowrt.recipes.tasks.registry.check_task`).
"""

import dataclasses
import os
import re
import shlex
from dataclasses import replace
from pathlib import Path
from string import Template
from typing import Any

from flowrt.engines.model_config import parse_overrides
from flowrt.engines.options import CUT_CHARACTER, Dtype
from flowrt.engines.registry import ROLLOUT_ENGINES, TRAIN_ENGINES
from flowrt.errors import ConfigError
from flowrt.recipes.acting import check_acting
from flowrt.recipes.algorithms import check_algorithm, needs_reference
from flowrt.recipes.config import (
    MAX_LIVE_SAMPLES,
    DataConfig,
    DataSetConfig,
    FilterConfig,
    ReferenceConfig,
    RolloutConfig,
    RunConfig,
    TrainerConfig,
    UniformCurriculum,
    key_values,
)
from flowrt.recipes.data.files import held_out_split, open_rows
from flowrt.recipes.data_sets import check_sets, set_data
from flowrt.recipes.devices import check_devices, with_devices
from flowrt.recipes.eval_constraints import check_eval
from flowrt.recipes.eval_names import eval_data_sets
from flowrt.recipes.guards import check_guards
from flowrt.recipes.model_files import check_model_files
from flowrt.recipes.tasks.registry import NEED_MODELS, takes_reward
from flowrt.recipes.tasks.task_file import is_task_file
from flowrt.rewards.options import RewardOptions
from flowrt.rewards.remote import check_remote
from flowrt.rewards.reward_names import parse_functions
from flowrt.runtime import time_limits
from flowrt.runtime.bounds import advice, contains, interval_of

MAX_EVAL_PROMPTS = 1_000_000
MODEL_DEVICE = re.compile(r"(cpu|cuda|npu|xpu|mps)(:\d{1,4})?")
STORED_TOKEN_BYTES = 12
"""Bytes for each token of a stored sample: its id, two log-probabilities, and text."""
LANES = ("auto", "gloo", "shm", "nccl", "hccl")
MAX_STOPS = 64
MAX_STOP_BYTES = 256
"""Limits of ``rollout.stop``: strings, and bytes of each. Every running sequence is searched for them at each token."""


def check(config: RunConfig, *, has_weights: bool = True) -> None:
    """Check the bounds of every field and the constraints between fields.

    The files of ``config.model`` are checked too; the data is not (see `flowrt.recipes.tasks.registry.check_task`).

    Args:
        config: the configuration.
        has_weights: whether the directory of the model has to have weights.

    Raises ConfigError for the first violation.
    """
    check_text(config)
    check_bounds(config)
    check_algorithm(config)
    check_guards(config)
    _check_filter(config)
    _check_curriculum(config)
    _check_products(config)
    check_devices(config)
    check_trainer(config.trainer)
    _check_decay(config)
    check_rollout(config)
    _check_reference(config)
    _check_controller(config)
    _check_hosts(config)
    check_data_options(config)
    check_eval(config)
    check_reward_options(config)
    _check_samples(config)
    check_acting(config)
    if config.checkpoint.hf_every > config.steps:
        raise ConfigError(
            f"checkpoint.hf_every is {config.checkpoint.hf_every}, above steps ({config.steps}): no model would be "
            "written but the final one; use fewer, or 0"
        )
    overrides = parse_overrides(config.model_overrides)
    if config.model and has_weights:
        check_model_files(Path(config.model), config.rollout.max_new_tokens, overrides)


def check_bounds(config: Any, prefix: str = "") -> None:
    """Raise ConfigError for the first number outside the bounds of its field; NaN is outside all bounds.

    Args:
        config: a configuration dataclass; nested ones are checked too.
        prefix: dotted prefix of its fields in messages, with the last dot.
    """
    for name, hint, value in key_values(config, prefix):
        if isinstance(value, tuple):
            for index, element in enumerate(value):
                if dataclasses.is_dataclass(element):
                    check_bounds(element, f"{name}[{index}].")
        elif value is not None and (interval := interval_of(hint)) is not None and not contains(interval, value):
            raise ConfigError(f"{name} is {value}; use {advice(interval)}")


def check_text(config: Any, prefix: str = "") -> None:
    """Raise ConfigError for text with a NUL, or with bytes that are not valid text in the locale."""
    for name, _, value in key_values(config, prefix):
        for element in value if isinstance(value, tuple) else (value,):
            if dataclasses.is_dataclass(element):
                check_text(element, f"{name}.")
            elif isinstance(element, str):
                _check_one_text(element, name)


def _check_one_text(text: str, name: str) -> None:
    if "\0" in text:
        raise ConfigError(f"{name} is {text!r:.80}, with a NUL in it; remove it")
    if not text.isascii():
        try:
            text.encode("utf-8")
        except UnicodeEncodeError:
            raise ConfigError(
                f"{name} is {text!r}, which has bytes that are not text in this locale; "
                "use a UTF-8 locale (LC_ALL=C.UTF-8), or another name"
            ) from None


def check_data_options(config: RunConfig) -> None:
    """Raise ConfigError for options of the data that are unusable, or have no effect in the recipe."""
    data = config.data
    data.prompt_format  # noqa: B018 (raises for unusable options)
    is_own = is_task_file(config.recipe)
    if not is_own:
        for key, is_set in (
            ("recipe_sha256", bool(config.recipe_sha256)),
            ("data.check_timeout_s", data.check_timeout_s != DataConfig.check_timeout_s),
        ):
            if is_set:
                raise ConfigError(f"{key} changes nothing in recipe {config.recipe}; it is for a task in a file")
    if not takes_reward(config.recipe):
        for name, value in (
            ("prefill", data.prefill),
            ("allow_overlap", data.allow_overlap and not is_own),
            ("difficulty_key", data.difficulty_key),
            ("tools_key", data.tools_key != DataConfig.tools_key),
        ):
            if value:
                raise ConfigError(f"data.{name} changes nothing in recipe {config.recipe}; it is of recipe custom")
    _check_difficulty(data)
    check_sets(data, config.recipe, mixes=takes_reward(config.recipe))
    for set_ in data.sets:
        _check_set_options(data, set_, "data")
    for set_ in eval_data_sets(config).values():
        _check_set_options(data, set_, "eval.data")
        if set_.tools_key is not None and not takes_reward(config.recipe):
            raise ConfigError(
                f"tools_key of eval.data changes nothing in recipe {config.recipe}; it is of recipe custom"
            )
    paths = [set_.path for set_ in data.sets] or ([data.path] if data.path else [])
    if data.split != DataConfig.split and paths and all(Path(path).is_file() for path in paths):
        raise ConfigError(f"data.split is {data.split!r}, and {paths[0]} is a file; a split is of a directory")


def _check_set_options(data: DataConfig, data_set: DataSetConfig, of: str) -> None:
    """Raise ConfigError for unusable options of a data set. ``of``: the key that has it, in messages."""
    try:
        set_data(data, data_set).prompt_format  # noqa: B018 (raises for unusable options)
    except ConfigError as error:
        raise ConfigError(f"data set {data_set.name!r} of {of}: {error}") from None
    if data_set.split is not None and os.path.isfile(data_set.path):
        raise ConfigError(
            f"data set {data_set.name!r} of {of} has split {data_set.split!r}, and {data_set.path} is a file"
        )
    if data_set.prompt_key == "":
        raise ConfigError(f"data set {data_set.name!r} of {of} has an empty prompt_key; name a column")


def check_reward_options(config: RunConfig) -> None:
    """Raise ConfigError for reward functions that are unusable, or that the recipe does not call."""
    options = config.reward
    of_task = f"task:{config.recipe}" if is_task_file(config.recipe) and not takes_reward(config.recipe) else ""
    if of_task:
        if options.functions not in ((), (of_task,)):
            raise ConfigError(
                f"task {config.recipe} has a reward of its own, and would not use {options.functions[0]}; leave it "
                "out, or give the recipe takes_reward=True"
            )
    elif options != RewardOptions() and not takes_reward(config.recipe):
        raise ConfigError(f"recipe {config.recipe} has a built-in reward; to use your own: flowrt run custom")
    kinds = {function.kind for function in parse_functions(options.functions)}
    if not of_task and "task" in kinds:
        raise ConfigError("a reward function of kind task is for a task in a file alone: flowrt run FILE.py")
    check_remote(options)
    if not MODEL_DEVICE.fullmatch(options.model_device):
        raise ConfigError(f"reward.model_device is {options.model_device!r:.80}; use cpu, or cuda:0 as torch names it")


def _check_difficulty(data: DataConfig) -> None:
    """Raise ConfigError for limits of the difficulty that exclude all rows, and for its options that have no effect."""
    least, most = data.difficulties
    if not data.difficulty_key:
        if data.order == "easy_first":
            raise ConfigError("data.order is easy_first, and data.difficulty_key is empty; name the column")
        return
    if least > most:
        raise ConfigError(f"data.min_difficulty is {least:g}, above data.max_difficulty ({most:g}); no row is left")
    if data.min_difficulty is data.max_difficulty is None and data.order != "easy_first":
        raise ConfigError(
            "data.difficulty_key is set and changes nothing; set data.min_difficulty, data.max_difficulty or "
            "data.order easy_first too"
        )


def _check_filter(config: RunConfig) -> None:
    """Raise ConfigError for a group filter that refuses every group, and for its options that have no effect."""
    options, none = config.algorithm.filter, FilterConfig()
    if options.zero_variance and config.group_size == 1:
        raise ConfigError(
            "algorithm.filter.zero_variance is on and group_size is 1: the rewards of every group would be equal, and "
            "all would be filtered; use groups of 2 or more, or leave it out"
        )
    low, high = options.rewards
    if low > high:
        raise ConfigError(
            f"algorithm.filter.min_reward is {low}, above algorithm.filter.max_reward ({high}): no group would be "
            "trained; use a lower one"
        )
    if options == replace(none, tries=options.tries) != none:
        raise ConfigError(
            f"algorithm.filter.tries is {options.tries}, and no groups are filtered; set "
            "algorithm.filter.zero_variance, algorithm.filter.min_reward, algorithm.filter.max_reward or "
            "algorithm.filter.function, or leave it out"
        )


def _check_curriculum(config: RunConfig) -> None:
    """Raise ConfigError for contradictory options of a curriculum."""
    options = config.curriculum
    if isinstance(options, UniformCurriculum):
        return
    if options.failed_reward >= options.solved_reward:
        raise ConfigError(
            f"curriculum.failed_reward is {options.failed_reward}, not below curriculum.solved_reward "
            f"({options.solved_reward}); change one of them"
        )
    if config.data.epochs == 1:
        raise ConfigError(
            "curriculum.type is solve_rate and data.epochs is 1: every prompt is new in the first epoch, and none is "
            "skipped; use 2 epochs or more, or 0 for as many as the steps need"
        )


def _check_products(config: RunConfig) -> None:
    """Raise ConfigError for numbers that are too large together, or that do not divide each other."""
    live_steps = min(config.max_staleness + 1, config.steps)
    samples = live_steps * config.prompts_per_step * config.group_size
    if samples > MAX_LIVE_SAMPLES:
        raise ConfigError(
            f"prompts_per_step {config.prompts_per_step} x group_size {config.group_size} x {live_steps} steps at once "
            f"(staleness {config.max_staleness}) are {samples:,} samples; use at most {MAX_LIVE_SAMPLES:,} together"
        )
    is_built = not config.model and config.recipe not in NEED_MODELS
    if is_built and config.rollout.max_new_tokens >= config.build.max_length:
        raise ConfigError(
            f"rollout.max_new_tokens is {config.rollout.max_new_tokens}, and build.max_length, for prompt and response "
            f"together, is {config.build.max_length}; use fewer, or a longer one"
        )
    heads = config.build.heads
    if is_built and heads % max(heads // 2, 1):
        raise ConfigError(
            f"build.heads is {heads}, which its {heads // 2} key-value heads do not divide; use an even number, or 1, 3"
        )


def check_trainer(trainer: TrainerConfig) -> None:
    """Raise ConfigError for options that the training engine does not support, or that contradict each other."""
    TRAIN_ENGINES[trainer.engine].check(trainer)
    if trainer.lora.rank and not trainer.lora.alpha:
        raise ConfigError("trainer.lora.alpha is 0: the adapters would change nothing; use another, for example 16")
    if trainer.compile and trainer.fsdp.recompute:
        raise ConfigError(
            "trainer.compile changes nothing with trainer.fsdp.recompute, which runs layers uncompiled; leave out one"
        )
    if trainer.min_lr > trainer.lr:
        raise ConfigError(f"trainer.min_lr is {trainer.min_lr}, above trainer.lr ({trainer.lr}), from which it falls")


def _check_decay(config: RunConfig) -> None:
    """Raise ConfigError for a decay to a learning rate of 0 that ends before the run."""
    trainer = config.trainer
    left = config.steps - max(trainer.warmup_steps, 1) - trainer.decay_steps
    if trainer.schedule != "constant" and trainer.decay_steps and not trainer.min_lr and left > 0:
        raise ConfigError(
            f"trainer.decay_steps is {trainer.decay_steps} and trainer.min_lr 0: the last {left} of {config.steps} "
            "steps would train with a learning rate of 0; use a min_lr above 0, more decay_steps, or fewer steps"
        )


def check_rollout(config: RunConfig) -> None:
    """Raise ConfigError for unusable options of sampling, and for an engine that does not support the options, the
    device or the weights that the trainer publishes."""
    _check_sampling(config.rollout)
    _check_supports(config)
    published = TRAIN_ENGINES[config.trainer.engine].published(config.trainer)
    engine = ROLLOUT_ENGINES[config.rollout.engine]
    engine.check(config.rollout, published, deterministic=config.deterministic)
    engine.check_device(with_devices(config).rollout)


def reference_dtype(config: RunConfig) -> Dtype:
    """Dtype of the reference model; with ``auto``, that of the trainer's forward passes."""
    if config.reference.dtype != "auto":
        return config.reference.dtype
    return TRAIN_ENGINES[config.trainer.engine].forward_dtype(config.trainer)


def _check_reference(config: RunConfig) -> None:
    """Raise ConfigError for unusable options of reference workers, and for any in a run without reference workers."""
    default = ReferenceConfig()
    if needs_reference(config.algorithm):
        _check_refresh(config)
        if config.reference.model:
            overrides = parse_overrides(config.model_overrides)
            check_model_files(Path(config.reference.model), config.rollout.max_new_tokens, overrides)
        return
    given = replace(config.reference, device="" if config.reference.device == "cpu" else config.reference.device)
    if given == default:
        return
    name = next(
        field.name
        for field in dataclasses.fields(default)
        if getattr(given, field.name) != getattr(default, field.name)
    )
    raise ConfigError(
        f"reference.{name} is {getattr(config.reference, name)}, and algorithm {config.algorithm.name} as configured "
        "needs no reference, so no worker is started; leave it out, or use an algorithm.kl.coef above 0"
    )


def _check_refresh(config: RunConfig) -> None:
    """Raise ConfigError for a refresh of the reference that is impossible or has no effect."""
    options = config.reference
    if not options.refresh:
        return
    if options.refresh >= config.steps:
        raise ConfigError(
            f"reference.refresh is {options.refresh}, and steps is {config.steps}: no sample would be scored by "
            "refreshed weights; use fewer than the steps, or 0"
        )
    if TRAIN_ENGINES[config.trainer.engine].published(config.trainer).lora is not None:
        raise ConfigError(
            f"reference.refresh is {options.refresh}, and the trainer publishes adapters alone, of which no reference "
            "can be made; set trainer.lora.publish to merged, or reference.refresh to 0"
        )


def _check_sampling(rollout: RolloutConfig) -> None:
    """Raise ConfigError for sampling of one token alone, and for unusable stop strings."""
    if rollout.top_k == 1:
        raise ConfigError(
            "rollout.top_k is 1: all samples of a prompt would be the most likely one, and nothing would be learned; "
            "use 2 or more, or 0 to sample from all tokens"
        )
    for stop in rollout.stop:
        if not stop or len(stop.encode()) > MAX_STOP_BYTES:
            raise ConfigError(f"rollout.stop has {stop!r:.80}; a stop string has 1 to {MAX_STOP_BYTES} bytes")
        if CUT_CHARACTER in stop:
            raise ConfigError(
                f"rollout.stop has {stop!r:.80}, with the character U+FFFD, which is what bytes are decoded to "
                "that are not a whole character yet; leave it out"
            )
    if len(rollout.stop) > MAX_STOPS:
        raise ConfigError(f"rollout.stop has {len(rollout.stop)} strings; use at most {MAX_STOPS}")


def _check_supports(config: RunConfig) -> None:
    """Raise ConfigError for truncated sampling with a training engine that ignores which tokens could be drawn."""
    engine, none = config.trainer.engine, RolloutConfig()
    options = [(name, getattr(config.rollout, name)) for name in ("top_k", "top_p", "min_p")]
    name, value = next((option for option in options if option[1] != getattr(none, option[0])), ("", None))
    if name and not TRAIN_ENGINES[engine].applies_supports:
        raise ConfigError(
            f"rollout.{name} is {value}, and trainer.engine {engine} does not renormalise log-probabilities over the "
            "tokens that could be drawn (applies_supports is False in its descriptor): it would train another policy "
            f"than the one sampled; leave rollout.{name} out, or use another engine"
        )


def _check_samples(config: RunConfig) -> None:
    """Raise ConfigError for a sample store that cannot hold the samples of one step."""
    samples = config.samples
    most = max(samples.per_step, config.group_size) if samples.per_step else 0  # groups are stored whole
    least = -(-most * config.rollout.max_new_tokens * STORED_TOKEN_BYTES // 1_000_000)
    if samples.mb < least:
        raise ConfigError(
            f"samples.mb is {samples.mb}, and the samples of one step may take {least} MB ({most} samples, the larger "
            f"of samples.per_step and group_size, x rollout.max_new_tokens {config.rollout.max_new_tokens} x "
            f"{STORED_TOKEN_BYTES} bytes); set it to at least {least}, or samples.per_step to 0"
        )


def _check_controller(config: RunConfig) -> None:
    """Raise ConfigError for an unknown transport, and for timeouts that contradict each other."""
    times = config.controller
    if times.lanes not in LANES:
        raise ConfigError(f"controller.lanes is {times.lanes!r}; use one of {', '.join(LANES)}")
    if times.worker_timeout_s <= times.heartbeat_s:
        raise ConfigError(
            f"controller.worker_timeout_s is {times.worker_timeout_s}, no longer than heartbeat_s "
            f"({times.heartbeat_s}): workers would count as lost between heartbeats; make it several times as long"
        )

    least_s = time_limits.least_request_s(*open_samples(config))
    if 0 < times.request_timeout_s < least_s:
        raise ConfigError(
            f"controller.request_timeout_s is {times.request_timeout_s:g}, and the samples of the open steps take at "
            f"least {least_s:.0f} s (rollout.max_new_tokens {config.rollout.max_new_tokens} at "
            f"{time_limits.MAX_TOKENS_PER_S:.0f} tokens/s): requests that wait for them would fail; use more, or 0"
        )


def open_samples(config: RunConfig) -> tuple[int, int, int]:
    """The samples of the steps that are open at a time, the sequences that run at a time, and their longest response.

    Arguments of `flowrt.runtime.time_limits.request_s`.
    """
    samples = (config.max_staleness + 1) * config.prompts_per_step * config.group_size
    rows = config.rollout.workers * config.rollout.max_running_requests
    return samples, rows, config.rollout.max_new_tokens


def evaluated_answers(config: RunConfig) -> int:
    """The most answers of the evaluations that are open at a time."""
    options = config.eval
    if not (options.interval or options.at_start or options.at_end or options.only):
        return 0
    prompts = sum(_eval_rows(config, set_) for set_ in eval_data_sets(config).values()) or config.data.eval_prompts
    return prompts * options.samples * (2 if options.overlap == "wait" else 1)


def _eval_rows(config: RunConfig, data_set: DataSetConfig) -> int:
    """The most prompts of a data set of evaluations; `MAX_EVAL_PROMPTS` if this host or flowrt cannot count them."""
    if config.eval.limit or is_task_file(config.recipe):
        return config.eval.limit or MAX_EVAL_PROMPTS
    try:
        return len(
            open_rows(Path(data_set.path), held_out_split(Path(data_set.path), data_set.split or config.eval.split))
        )
    except ConfigError:
        return MAX_EVAL_PROMPTS


def _check_hosts(config: RunConfig) -> None:
    """Raise ConfigError for placement options that contradict each other or cannot be split into words."""
    trainer = config.trainer
    if trainer.ranks % trainer.nodes:
        raise ConfigError(
            f"trainer.ranks is {trainer.ranks}, which trainer.nodes ({trainer.nodes}) does not divide: each host runs "
            "the same number of ranks; change one of them"
        )
    if trainer.nodes > 1 and not config.launch.trainer:
        raise ConfigError(
            f"trainer.nodes is {trainer.nodes}, and launch.trainer is empty, so all ranks would start on this machine; "
            f"set it to a prefix that starts a command on each of {trainer.nodes} hosts, like srun --ntasks-per-node=1"
        )
    for name in ("rollout", "trainer", "auxiliary"):
        words = getattr(config.launch, name)
        try:
            shlex.split(words)
        except ValueError as error:
            raise ConfigError(
                f"launch.{name} cannot be split into words ({error}): {words!r}; check the quotes"
            ) from None
    if config.launch.rollout_hosts and "HOST" not in Template(config.launch.rollout).get_identifiers():
        raise ConfigError(
            f"launch.rollout_hosts is {config.launch.rollout_hosts!r}, and launch.rollout has no $HOST for them: "
            f"{config.launch.rollout!r}; put it in place of the host, as in 'ssh $HOST'"
        )
    if not all(name.strip() for name in config.launch.devices.split(",")):
        raise ConfigError(f"launch.devices is {config.launch.devices!r}; use auto, none, or a list like 0,1,2")
