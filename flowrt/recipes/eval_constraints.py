"""Constraints on evaluations: options that need data, have no effect, or name no result."""

import os
from collections.abc import Iterator, Sequence

from flowrt.engines.options import MIN_TEMPERATURE
from flowrt.engines.registry import ROLLOUT_ENGINES, TRAIN_ENGINES
from flowrt.errors import suggested
from flowrt.recipes.config import RunConfig
from flowrt.recipes.eval_names import eval_data_sets, eval_names
from flowrt.recipes.metric_names import pass_ks
from flowrt.recipes.tasks.registry import held_out_by_default


def eval_mistakes(config: RunConfig) -> Iterator[str]:
    """Impossible evaluations, and options of them that have no effect. Raises ConfigError as `eval_data_sets`."""
    options, names = config.eval, eval_names(config)
    held_out = config.data.eval_prompts
    if options.data and held_out not in (0, held_out_by_default(config.recipe)):
        yield f"data.eval_prompts is {held_out}, and with eval.data no rows are held out; leave one of them out"
    sets = eval_data_sets(config).values()
    if options.split and all(os.path.isfile(set_.path) for set_ in sets):
        there = f"{next(iter(sets)).path} is a file" if sets else "eval.data is empty"
        yield f"eval.split is {options.split!r}, and {there}; a split is of a directory of eval.data"
    yield from _sampling_mistakes(config)
    yield from _length_mistakes(config)
    if options.interval > config.steps:
        yield (
            f"eval.interval is {options.interval}, and steps is {config.steps}: no version would be due; use fewer, "
            "or 0"
        )
    if options.only:
        if not names:
            yield (
                "eval.only is on, and there is nothing to evaluate: data.eval_prompts is 0 and eval.data is empty; "
                "give one of them"
            )
        if options.interval or options.stop_at or config.checkpoint.best:
            yield (
                "eval.only is on, so nothing is trained: eval.interval, eval.stop_at and checkpoint.best change nothing"
            )
    yield from _best_mistakes(config, names)


def _length_mistakes(config: RunConfig) -> Iterator[str]:
    """A length of answers that equals that of the run, or that the engine cannot keep."""
    length, engine = config.eval.max_new_tokens, config.rollout.engine
    if not length:
        return
    if length == config.rollout.max_new_tokens:
        yield f"eval.max_new_tokens is {length}, as rollout.max_new_tokens: it changes nothing; leave it out"
    if not ROLLOUT_ENGINES[engine].limits_prompts:
        yield (
            f"eval.max_new_tokens is {length}, and rollout.engine {engine} has one limit for all responses "
            "(limits_prompts is False in its descriptor); leave it out, or use another engine"
        )
    if not config.model and length >= config.build.max_length:
        yield (
            f"eval.max_new_tokens is {length}, and build.max_length, for prompt and answer together, is "
            f"{config.build.max_length}; use fewer, or a longer one"
        )


def _sampling_mistakes(config: RunConfig) -> Iterator[str]:
    """Several samples without randomness, and truncation that has no effect."""
    options = config.eval
    if options.samples > 1 and options.temperature == 0:
        yield (
            f"eval.samples is {options.samples} and eval.temperature 0: all answers to a prompt would be the same; use "
            "a temperature above 0, leave it out to take rollout.temperature, or use 1 sample"
        )
    if options.temperature and options.temperature < MIN_TEMPERATURE:
        yield (
            f"eval.temperature is {options.temperature}; use 0 for the most likely token, or at least {MIN_TEMPERATURE}"
        )
    is_greedy = options.sampling(config.rollout.temperature) is None
    if is_greedy and options.truncation.is_active:
        yield (
            "eval.top_k, eval.top_p and eval.min_p change nothing where the most likely token is taken; set "
            "eval.temperature above 0, or eval.samples above 1"
        )


def _best_mistakes(config: RunConfig, names: Sequence[str]) -> Iterator[str]:
    """A name in ``checkpoint.best`` that is no result, and weights to keep that cannot be written."""
    checkpoint = config.checkpoint
    if not checkpoint.best:
        return
    samples = config.eval.samples
    metrics = [f"avg@{samples}", *(f"pass@{k}" for k in pass_ks(samples))]
    known = [f"{name}/{metric}" for name in names for metric in metrics]
    if checkpoint.best not in known:
        there_is = ", ".join(known[:8]) or "none, because nothing is evaluated"
        near = suggested(checkpoint.best, known)
        yield (
            f"checkpoint.best is {checkpoint.best!r}, which is no result of an evaluation{near}; there is: {there_is}"
        )
    if TRAIN_ENGINES[config.trainer.engine].published(config.trainer).lora is not None:
        yield (
            "checkpoint.best is set, and the trainer publishes adapters alone, of which no model is written; set "
            "trainer.lora.publish to merged"
        )
