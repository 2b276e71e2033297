"""What a run checks of its configuration and its files before it starts anything, in one place: `flowrt data check` and
`flowrt reward check` refuse what these functions refuse, and nothing else.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from flowrt.launcher.own_files import with_checked_task, with_own_needs
from flowrt.recipes.config import RunConfig
from flowrt.recipes.filter_function import check_filter_function
from flowrt.recipes.model_files import base_model_dir, is_adapter, weight_files


def check_files(config: RunConfig, progress: Callable[[str], None]) -> RunConfig:
    """Check the data, the functions and the algorithm of a run: all rows are read, and functions are called.

    Args:
        config: of the run.
        progress: receives notes on long waits.

    Returns:
        The configuration with what was found out.

    Raises ConfigError for the first mistake.
    """
    config = with_checked_task(config, progress)
    check_filter_function(config, progress)
    return with_own_needs(config)


def has_weights(model: Path) -> bool:
    """Whether a directory is a model or an adapter with weights, and not a tokenizer and a configuration alone."""
    return is_adapter(model) or bool(weight_files(base_model_dir(model)))


def check_start(config: RunConfig, *, are_fit: bool = False) -> None:
    """Check the model and all prompts of a run, as its first process does.

    Of a directory without weights the tokenizer and the prompts are checked. An adapter of a large model is not merged
    for it: its base model is checked.

    Args:
        config: of the run.
        are_fit: whether the prompts of the task, but not those of ``eval.data``, are known to fit the model.

    Raises ConfigError for the first mistake.
    """
    from flowrt.launcher.adapter_start import merge_starts
    from flowrt.launcher.model_check import MAX_LOADED_BYTES, check_model, check_without_weights

    model = Path(config.model)
    with TemporaryDirectory(prefix="flowrt-") as directory:
        own = replace(config, run_dir=directory)
        if not has_weights(model):
            check_without_weights(own, model, are_fit=are_fit)
            return
        given = [Path(one) for one in (config.model, config.reference.model) if one]
        sizes = [file.stat().st_size for one in given for file in weight_files(base_model_dir(one))]
        if sum(sizes) > MAX_LOADED_BYTES:
            reference = replace(config.reference, model=_base(config.reference.model))
            own = replace(own, model=_base(config.model), reference=reference)
        merge_starts(own)
        check_model(own, are_fit=are_fit)


def _base(model: str) -> str:
    return str(base_model_dir(Path(model))) if model else ""
