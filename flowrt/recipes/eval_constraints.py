"""Constraints on evaluations: options that need data, have no effect, or name no result."""

import os
from collections.abc import Sequence

from flowrt.engines.options import MIN_TEMPERATURE
from flowrt.engines.registry import ROLLOUT_ENGINES, TRAIN_ENGINES
from flowrt.errors import ConfigError, suggested
from flowrt.recipes.config import RunConfig
from flowrt.recipes.eval_names import eval_data_sets, eval_names
from flowrt.recipes.metric_names import pass_ks
from flowrt.recipes.tasks.registry import held_out_by_default


def check_eval(config: RunConfig) -> None:
    """Raise ConfigError for evaluations that are impossible, and for their options that have no effect."""
    options, names = config.eval, eval_names(config)
    held_out = config.data.eval_prompts
    if options.data and held_out not in (0, held_out_by_default(config.recipe)):
        raise ConfigError(
            f"data.eval_prompts is {held_out}, and with eval.data no rows are held out; leave one of them out"
        )
    sets = eval_data_sets(config).values()
    if options.split and all(os.path.isfile(set_.path) for set_ in sets):
        there = f"{next(iter(sets)).path} is a file" if sets else "eval.data is empty"
        raise ConfigError(f"eval.split is {options.split!r}, and {there}; a split is of a directory of eval.data")
    _check_sampling(config)
    _check_length(config)
    if options.interval > config.steps:
        raise ConfigError(
            f"eval.interval is {options.interval}, and steps is {config.steps}: no version would be due; use fewer, "
            "or 0"
        )
    if options.only:
        if not names:
            raise ConfigError(
                "eval.only is on, and there is nothing to evaluate: data.eval_prompts is 0 and eval.data is empty; "
                "give one of them"
            )
        if options.interval or options.stop_at or config.checkpoint.best:
            raise ConfigError(
                "eval.only is on, so nothing is trained: eval.interval, eval.stop_at and checkpoint.best change nothing"
            )
    _check_best(config, names)


def _check_length(config: RunConfig) -> None:
    """Raise ConfigError for a length of answers that equals that of the run, or that the engine cannot keep."""
    length, engine = config.eval.max_new_tokens, config.rollout.engine
    if not length:
        return
    if length == config.rollout.max_new_tokens:
        raise ConfigError(
            f"eval.max_new_tokens is {length}, as rollout.max_new_tokens: it changes nothing; leave it out"
        )
    if not ROLLOUT_ENGINES[engine].limits_prompts:
        raise ConfigError(
            f"eval.max_new_tokens is {length}, and rollout.engine {engine} has one limit for all responses "
            "(limits_prompts is False in its descriptor); leave it out, or use another engine"
        )
    if not config.model and length >= config.build.max_length:
        raise ConfigError(
            f"eval.max_new_tokens is {length}, and build.max_length, for prompt and answer together, is "
            f"{config.build.max_length}; use fewer, or a longer one"
        )


def _check_sampling(config: RunConfig) -> None:
    """Raise ConfigError for several samples without randomness, and for truncation that has no effect."""
    options = config.eval
    if options.samples > 1 and options.temperature == 0:
        raise ConfigError(
            f"eval.samples is {options.samples} and eval.temperature 0: all answers to a prompt would be the same; use "
            "a temperature above 0, leave it out to take rollout.temperature, or use 1 sample"
        )
    if options.temperature and options.temperature < MIN_TEMPERATURE:
        raise ConfigError(
            f"eval.temperature is {options.temperature}; use 0 for the most likely token, or at least {MIN_TEMPERATURE}"
        )
    is_greedy = options.sampling(config.rollout.temperature) is None
    if is_greedy and options.truncation.is_active:
        raise ConfigError(
            "eval.top_k, eval.top_p and eval.min_p change nothing where the most likely token is taken; set "
            "eval.temperature above 0, or eval.samples above 1"
        )


def _check_best(config: RunConfig, names: Sequence[str]) -> None:
    """Raise ConfigError if ``checkpoint.best`` names no result, or the weights it would keep cannot be written."""
    checkpoint = config.checkpoint
    if not checkpoint.best:
        return
    samples = config.eval.samples
    metrics = [f"avg@{samples}", *(f"pass@{k}" for k in pass_ks(samples))]
    known = [f"{name}/{metric}" for name in names for metric in metrics]
    if checkpoint.best not in known:
        there_is = ", ".join(known[:8]) or "none, because nothing is evaluated"
        near = suggested(checkpoint.best, known)
        raise ConfigError(
            f"checkpoint.best is {checkpoint.best!r}, which is no result of an evaluation{near}; there is: {there_is}"
        )
    if TRAIN_ENGINES[config.trainer.engine].published(config.trainer).lora is not None:
        raise ConfigError(
            "checkpoint.best is set, and the trainer publishes adapters alone, of which no model is written; set "
            "trainer.lora.publish to merged"
        )
