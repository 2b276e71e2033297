"""Model directories that a run writes, in the format of `AutoModelForCausalLM.from_pretrained`.

A directory has the weights; the tokenizer with the chat template that the run trained with; a generation configuration
that ends a response with the tokens that ended it in the run; and, of a run with adapters, the adapters by themselves
in "adapter", besides the weights with the adapters merged. So transformers, vLLM and SGLang serve the model as trained.
"""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from flowrt.engines.hf import export_dtype, load_model, load_tokenizer, meta_model
from flowrt.engines.options import LoraOptions, TrainOptions
from flowrt.engines.prompts import CHAT, NONE, template_text
from flowrt.engines.stopping import stop_token_ids
from flowrt.engines.training.lora import add_adapters, merge_adapters, write_adapters
from flowrt.engines.training.saved_state import MODEL, read_tensors
from flowrt.errors import EngineError

GENERATION = "generation_config.json"
ADAPTER = "adapter"
FILE_GB = TrainOptions.file_gb


def write_weights(
    source: Path, tensors: Mapping[str, torch.Tensor], directory: Path, dtype: torch.dtype, file_gb: float = FILE_GB
) -> None:
    """Write the configuration and the weights of a model.

    Args:
        source: directory of a model of the same architecture, of which the configurations are copied.
        tensors: full parameters, and buffers or not, by name.
        directory: created by the call.
        dtype: dtype of the written parameters.
        file_gb: maximum size of a file, in GB.
    """
    plain = meta_model(source, dtype)
    names = {name for name, _ in plain.named_parameters()}
    full = {name: tensor.to(dtype) if name in names else tensor for name, tensor in tensors.items()}
    plain.load_state_dict(full, assign=True, strict=False)
    plain.tie_weights()
    plain.save_pretrained(directory, max_shard_size=int(file_gb * 1e9))
    copy_generation(source, directory)


def copy_generation(source: Path, directory: Path) -> None:
    """Copy the generation configuration, which transformers refuses to write if it would not use all of its values."""
    if (source / GENERATION).is_file():
        shutil.copyfile(source / GENERATION, directory / GENERATION)


def write_checkpoint(
    checkpoint: Path,
    source: Path,
    directory: Path,
    *,
    lora: LoraOptions,
    base: Path | None = None,
    wanted: str = "source",
    file_gb: float = FILE_GB,
) -> None:
    """Write the model of a checkpoint of a training engine, with adapters merged.

    Args:
        checkpoint: directory of the checkpoint.
        source: directory of the model that the run started from.
        directory: created by the call.
        lora: options of the run's adapters; rank 0: none.
        base: the model that the written adapter names; None: ``source``.
        wanted: dtype of the written parameters; "source": that of ``source``, "state": that of the optimiser's.
        file_gb: maximum size of a file, in GB.

    Raises:
        EngineError: if the checkpoint cannot be read, or is not of the model in ``source``.
        ConfigError: if peft is missing.
        OSError, SafetensorError: if writing fails.
    """
    state = {name.removeprefix(MODEL): tensor for name, tensor in read_tensors(checkpoint, MODEL).items()}
    wide = next((tensor.dtype for tensor in state.values() if tensor.is_floating_point()), torch.float32)
    model = load_model(source, dtype=wide)
    if lora.rank:
        model = add_adapters(model, lora)
    own = {name: tensor.detach() for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    if not trained <= state.keys() <= own.keys() or any(
        own[name].shape != tensor.shape for name, tensor in state.items()
    ):
        raise EngineError(f"{checkpoint} is no checkpoint of the model {source}; was the run's model changed?")
    tensors = own | state
    full = merge_adapters(model, tensors) if lora.rank else tensors
    write_weights(source, full, directory, wide if wanted == "state" else export_dtype(source, wanted), file_gb)
    if lora.rank:
        write_adapters(model, tensors, base or source, directory / ADAPTER)


def complete(directory: Path, source: Path, chat_template: str) -> None:
    """Add the tokenizer and the generation configuration to a directory of weights.

    Args:
        directory: with the weights; it may have a generation configuration.
        source: directory of the model that the run started from.
        chat_template: the template of the run (``data.chat_template``): the path of a Jinja file, or empty, "chat" or
            "none", which leave that of the tokenizer.

    Raises:
        EngineError: if the tokenizer cannot be loaded.
        ConfigError: if the chat template cannot be read.
        OSError: if writing fails.
    """
    tokenizer = load_tokenizer(source)
    stops = stop_token_ids(source, tokenizer, chat_template)
    if chat_template not in ("", CHAT, NONE):
        tokenizer.chat_template = template_text(tokenizer, chat_template)
    tokenizer.save_pretrained(directory)
    path = directory / GENERATION
    table: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    first = table.get("eos_token_id")
    first = first if isinstance(first, list) else [] if first is None else [first]
    ends = [*first, *(stop for stop in stops if stop not in first)]
    table["eos_token_id"] = ends if len(ends) > 1 else ends[0]
    path.write_text(json.dumps(table, indent=2) + "\n")
