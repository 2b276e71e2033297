"""The models that a run starts from: written and checked before its other processes start.

``python -m flowrt.launcher.start_models --config RUN/config.toml``: where ``model`` or ``reference.model`` is a LoRA
adapter, writes its base model with the adapter merged to the run directory, where all workers and a resumed run read
it; then checks the models and the prompts. Exit code 2 and one sentence if a model or a prompt cannot be used.
"""

import argparse
import logging
import os
import shutil
import sys
from pathlib import Path

import torch
import transformers
from safetensors import SafetensorError

from flowrt.engines.exported_model import copy_generation
from flowrt.engines.hf import export_dtype, load_model, load_tokenizer
from flowrt.engines.training.lora import merged_start
from flowrt.errors import EXIT_BAD_INPUT, EXIT_OK, ConfigError, EngineError, FlowError
from flowrt.launcher.model_check import check_finite_files, check_model
from flowrt.recipes.config import RunConfig
from flowrt.recipes.config_io import from_file
from flowrt.recipes.model_files import ADAPTER_WEIGHTS, base_model_dir, is_adapter, tokenizer_dir, weight_files
from flowrt.recipes.run_dir import model_dir, reference_model_dir
from flowrt.runtime.files import fsync_tree, partial_path
from flowrt.runtime.standard_streams import log_to_stderr

log = logging.getLogger("flowrt")


def merge_starts(config: RunConfig) -> None:
    """Write the models of the run's adapters that are not there yet. Raises ConfigError if one cannot be merged."""
    for given, merged in (
        (config.model, model_dir(config)),
        (config.reference.model, reference_model_dir(config)),
    ):
        if given and is_adapter(Path(given)) and not merged.is_dir():
            write_merged(Path(given), merged)


def write_merged(adapter: Path, directory: Path) -> None:
    """Write the base model of an adapter, with the adapter merged in float32, in the dtype of the base model.

    Raises:
        ConfigError: if peft is missing, or the adapter is not of this base model.
        OSError, SafetensorError: if writing fails.
    """
    base = base_model_dir(adapter)
    check_finite_files([adapter / ADAPTER_WEIGHTS, *weight_files(base)])
    partial = partial_path(directory)
    shutil.rmtree(partial, ignore_errors=True)
    try:
        model = merged_start(load_model(base), adapter)
    except EngineError as error:
        raise ConfigError(f"the base model of adapter {adapter} cannot be loaded: {error}") from error
    model.generation_config = transformers.GenerationConfig()  # copied below
    model.to(export_dtype(base, "source")).save_pretrained(partial)
    copy_generation(base, partial)
    load_tokenizer(tokenizer_dir(adapter)).save_pretrained(partial)
    fsync_tree(partial)
    partial.rename(directory)


def main() -> int:
    parser = argparse.ArgumentParser(description="write and check the models that a run starts from")
    parser.add_argument("--config", required=True, type=Path, help="the run's config.toml")
    arguments = parser.parse_args()
    log_to_stderr()
    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    try:
        config = from_file(arguments.config)
        torch.set_num_threads(config.threads)
        merge_starts(config)
        check_model(config)
    except (FlowError, OSError, SafetensorError) as error:
        log.error("%s", error)
        return EXIT_BAD_INPUT
    return EXIT_OK


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    os._exit(code)
