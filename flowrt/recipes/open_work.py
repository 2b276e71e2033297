"""How much work of a run is open at a time: samples of steps, and answers of evaluations."""

from pathlib import Path

from flowrt.errors import ConfigError
from flowrt.recipes.config import RunConfig
from flowrt.recipes.data.files import held_out_split, open_rows
from flowrt.recipes.data_config import DataSetConfig
from flowrt.recipes.eval_names import eval_data_sets
from flowrt.recipes.tasks.task_file import is_task_file

MAX_EVAL_PROMPTS = 1_000_000


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
