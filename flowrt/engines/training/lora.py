"""Low-rank adapters (LoRA, arXiv 2106.09685) with peft: add them to a model, merge them into its weights."""

import importlib
from collections.abc import Mapping
from typing import Any

import torch

from flowrt.engines.options import LoraOptions
from flowrt.errors import ConfigError, EngineError

BASE = ".base_layer"
DOWN = ".lora_A.default.weight"
UP = ".lora_B.default.weight"


def add_adapters(model: Any, options: LoraOptions) -> Any:
    """Add an adapter, initially zero, to each target layer and freeze all other weights. Returns the model.

    Raises ConfigError if peft is missing or a target is not in the model.
    """
    try:
        peft = importlib.import_module("peft")
    except ImportError as error:
        raise ConfigError(f"trainer.lora needs peft: pip install 'flowrt[lora]' ({error})") from error
    names = options.targets.split(",")
    targets = options.targets if names == ["all-linear"] else names
    config = peft.LoraConfig(
        r=options.rank, lora_alpha=options.alpha, lora_dropout=0.0, target_modules=targets, task_type="CAUSAL_LM"
    )
    try:
        return peft.inject_adapter_in_model(config, model)
    except ValueError as error:
        raise ConfigError(f"trainer.lora.targets is {options.targets!r}: {error}") from error


def merge_adapters(tensors: Mapping[str, torch.Tensor], options: LoraOptions) -> dict[str, torch.Tensor]:
    """Full weights under their names in the model without adapters: W + alpha / rank B A.

    ``tensors`` are all parameters of a model of `add_adapters`, by name; ``options.rank`` is above 0. Products are
    computed in float32. Raises EngineError for adapter parameters that cannot be merged.
    """
    scale = options.alpha / options.rank
    merged: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if name.endswith((DOWN, UP)):
            continue
        if ".lora_" in name:
            raise EngineError(
                f"{name} belongs to an adapter that cannot be merged; set trainer.lora.publish to adapters"
            )
        stem, base, rest = name.partition(BASE)
        if base and rest == ".weight":
            update = tensors[stem + UP].float() @ tensors[stem + DOWN].float()
            tensor = tensor + (scale * update).to(tensor.dtype)
        merged[stem + rest] = tensor
    return merged
