"""Low-rank adapters by peft: put into a model, named, and added to the weights that they adapt."""

import importlib
from collections.abc import Mapping
from typing import Any

import torch

from flowrt.engines.options import LoraOptions
from flowrt.errors import ConfigError, EngineError

BASE = ".base_layer"
DOWN, UP = ".lora_A.default.weight", ".lora_B.default.weight"


def add_adapters(model: Any, options: LoraOptions) -> Any:
    """The model with an adapter at each target, which adds nothing yet; only the adapters are trained from here on.

    Raises ConfigError when peft is missing or a target is not in the model.
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


def merged(tensors: Mapping[str, torch.Tensor], options: LoraOptions) -> dict[str, torch.Tensor]:
    """Whole weights under the names that they have without adapters, each with what its adapter adds."""
    scale = options.alpha / options.rank
    whole: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if name.endswith((DOWN, UP)):
            continue
        if ".lora_" in name:
            raise EngineError(f"{name} is part of an adapter that cannot be merged; use trainer.lora.publish adapters")
        stem, base, rest = name.partition(BASE)
        if base and rest == ".weight":
            added = tensors[stem + UP].float() @ tensors[stem + DOWN].float()
            tensor = tensor + (scale * added).to(tensor.dtype)
        whole[stem + rest] = tensor
    return whole
