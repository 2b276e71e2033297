"""Low-rank adapters (LoRA, arXiv 2106.09685) with peft: add them to a model, merge them into its weights, write them.

- Adapters are peft's own modules, and the update that each adds to its weights is computed by peft. So every layer
  that peft adapts is merged as peft merges it: linear layers, the transposed ones of GPT-2 (Conv1D), and parameters of
  experts, where adapters of several parameters of one module are nested.
- `add_adapters` refuses what could not be merged, before anything is trained.
"""

import copy
import importlib
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from safetensors.torch import save_file

from flowrt.engines.hf import first_sentence
from flowrt.engines.options import LoraOptions
from flowrt.errors import ConfigError, EngineError, suggested

ADAPTER = "default"
"""Name of the adapter among those of a layer."""
ALL_LINEAR = "all-linear"
REGEX_CHARACTERS = frozenset("\\*+?()[]{}|^$")
BASE = ".base_layer"
MARK = ".lora_"
"""Part of the names of all parameters of adapters."""
PEFT_PREFIX = "base_model.model."
WEIGHTS = "adapter_model.safetensors"
MERGED_TOKENS = 8
MERGED_ERROR = 1e-3
"""Allowed difference of the logits (float32) of a merged model, relative to the largest."""
TIED = "TrainableTokensWrapper"
"""Class of peft's layers that change tokens of tied embeddings on both sides."""


def load_peft(what: str) -> ModuleType:
    """The module ``peft``. Raises ConfigError, naming ``what`` needs it, if it is not installed."""
    try:
        return importlib.import_module("peft")
    except ImportError as error:
        raise ConfigError(f"{what} needs peft: pip install 'flowrt[lora]' ({error})") from error


def add_adapters(model: Any, options: LoraOptions) -> Any:
    """Add an adapter, initially zero, to each target layer and freeze all other weights. Returns the model.

    Works on the meta device too, where it takes neither memory nor time.

    Raises ConfigError if peft is missing, a target is not in the model or cannot be adapted, or the adapters could not
    be merged into the model's weights.
    """
    peft = load_peft("trainer.lora")
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    modules = dict(model.named_modules())
    config = peft.LoraConfig(
        r=options.rank,
        lora_alpha=options.alpha,
        lora_dropout=0.0,
        target_modules=_targets(options.targets),
        exclude_modules=[
            name for name, module in modules.items() if _is_linear(module) and not _returns_tensor(module)
        ],
        task_type="CAUSAL_LM",
    )
    asked = f"trainer.lora.targets is {options.targets!r:.120}"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # peft sets what it warns of
            model = peft.inject_adapter_in_model(config, model, ADAPTER)
    except (ValueError, TypeError, RuntimeError, re.error) as error:
        if not str(error).startswith("Cannot convert"):  # names of experts that have to come together
            _check_names(asked, options.targets, _targets(options.targets), modules, ())
        raise ConfigError(f"{asked}, which peft cannot adapt: {first_sentence(error)}") from error
    layers = {name.replace(BASE, ""): layer for name, layer in _layers(model)}
    _check_names(asked, options.targets, config.target_modules, modules, tuple(layers))
    _check_tied(asked, model, layers)
    largest = max(min(layer.in_features, layer.out_features) for layer in layers.values())
    if options.rank > largest:
        raise ConfigError(
            f"trainer.lora.rank is {options.rank}, above {largest}, the rank of the largest layer of "
            f"trainer.lora.targets: train all weights, or use a lower one"
        )
    _check_merged(asked, model, shapes)
    return model


def merge_adapters(model: Any, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Full weights under their names in the model without adapters.

    Args:
        model: a model of `add_adapters`, of which only the structure is read.
        tensors: its parameters, and buffers or not, whole and by name. They are not changed.

    Returns:
        The tensors in their order, without those of adapters. What is not adapted is the same tensor as in ``tensors``.

    Raises:
        EngineError: if a tensor of an adapter is missing.
    """
    updates = {_weight_name(name, layer): (name, layer) for name, layer in _layers(model)}
    merged: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if MARK in name:
            continue
        if name in updates:
            path, layer = updates[name]
            tensor = tensor + _update(path, layer, name, tensors).to(tensor.device, tensor.dtype)
        merged[name.replace(BASE, "")] = tensor
    return merged


def adapted_names(model: Any) -> frozenset[str]:
    """The names, in a model of `add_adapters`, of the weights that adapters are merged into, and of the adapters."""
    weights = {_weight_name(name, layer) for name, layer in _layers(model)}
    return frozenset(weights | {name for name, _ in model.named_parameters() if MARK in name})


def write_adapters(model: Any, tensors: Mapping[str, torch.Tensor], base: Path, directory: Path) -> None:
    """Write adapters in the format of `peft.PeftModel.from_pretrained`.

    Args:
        model: a model of `add_adapters`, of which only the structure is read.
        tensors: the parameters of its adapters by name, and others or not.
        base: directory of the model that they belong to.
        directory: created by the call.

    Raises OSError or SafetensorError if writing fails.
    """
    peft = load_peft("trainer.lora")
    own = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items() if MARK in name}
    named = peft.get_peft_model_state_dict(model, state_dict=own, adapter_name=ADAPTER, save_embedding_layers=False)
    directory.mkdir()
    save_file({f"{PEFT_PREFIX}{name}": tensor for name, tensor in named.items()}, directory / WEIGHTS, {"format": "pt"})
    config = copy.copy(model.peft_config[ADAPTER])
    config.base_model_name_or_path, config.inference_mode = str(base), True
    config.target_modules = _short_names(model, config.target_modules or ())
    config.exclude_modules = config.exclude_modules or None
    config.save_pretrained(str(directory))


def merged_start(base: Any, adapter: Path) -> Any:
    """The model ``base`` with the adapter of a directory merged into its weights. Raises ConfigError if it is another
    kind of adapter, or does not fit the model."""
    peft = load_peft(f"the adapter {adapter}")
    what = f"the adapter {adapter} cannot be merged into its base model {getattr(base, 'name_or_path', '')}"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = peft.PeftModel.from_pretrained(base, str(adapter))
            loaded = model.load_adapter(str(adapter), ADAPTER)  # again, as from_pretrained does not say what is missing
            _check_loaded(what, loaded.missing_keys, loaded.unexpected_keys)
            _check_embeddings(what, base)
            return _merged(what, model.eval())
    except (OSError, ValueError, TypeError, RuntimeError, KeyError, AttributeError) as error:
        raise ConfigError(f"{what}: {first_sentence(error)}") from error


@torch.no_grad()
def _merged(what: str, model: Any) -> Any:
    """The model with its adapter merged. Raises ConfigError if that changes what it computes for a few tokens.

    So adapters of kinds that no weights are equal to are found whatever they are.
    """
    tokens_BL = torch.arange(MERGED_TOKENS).unsqueeze(0) % model.get_input_embeddings().weight.shape[0]
    before = model(input_ids=tokens_BL, use_cache=False).logits
    merged = model.merge_and_unload()
    off = (merged(input_ids=tokens_BL, use_cache=False).logits - before).abs().max() / before.abs().max()
    if not off <= MERGED_ERROR:
        raise ConfigError(
            f"{what}: the merged model computes other logits than the model with the adapter (by {float(off):.2g} of "
            "the largest), so it is of a kind that cannot be merged; use a plain LORA adapter"
        )
    return merged


def _check_loaded(what: str, missing: Sequence[str], unexpected: Sequence[str]) -> None:
    """Raise ConfigError for tensors that an adapter lacks, and for those that its base model has no place for."""
    if missing:
        raise ConfigError(
            f"{what}: it lacks {len(missing)} tensors that its configuration asks for, such as {missing[0]}"
        )
    if unexpected:
        raise ConfigError(
            f"{what}: {len(unexpected)} of its tensors have no place there, such as {unexpected[0]}; is it of another "
            "model?"
        )


def _check_embeddings(what: str, model: Any) -> None:
    """Raise ConfigError if an adapter changes one of two layers that share their weights (tie_word_embeddings)."""
    if not getattr(model.config.get_text_config(), "tie_word_embeddings", False):
        return
    for name, layer in (("input", model.get_input_embeddings()), ("output", model.get_output_embeddings())):
        if type(layer).__module__.startswith("peft.") and type(layer).__name__ != TIED:
            raise ConfigError(
                f"{what}: it changes the {name} embeddings, which share their weights with others "
                "(tie_word_embeddings), and merged weights cannot hold that; merge it with peft, and untie them"
            )


def _targets(text: str) -> str | list[str]:
    """The targets in peft's form: ``all-linear``, a regular expression, or a list of names."""
    if text.strip() == ALL_LINEAR or REGEX_CHARACTERS & set(text):
        return text.strip()
    return [name.strip() for name in text.split(",") if name.strip()]


def _short_names(model: Any, targets: str | Iterable[str]) -> str | list[str]:
    """The last parts of the targets' names, sorted, if they name the same modules, else the targets."""
    if isinstance(targets, str):
        return targets
    adapted = {name for name, layer in _layers(model) if not hasattr(layer, "parameter_name")}
    modules = {name for name, _ in model.named_modules() if BASE not in name and MARK not in f"{name}."}
    short = {target.rpartition(".")[2] for target in targets}
    named = {name for name in modules if name.rpartition(".")[2] in short}
    return sorted(short if named == adapted else targets)


def _layers(model: Any) -> Iterator[tuple[str, Any]]:
    """The adapted layers, each with its name; of nested ones each."""
    kind: Any = importlib.import_module("peft.tuners.lora").LoraLayer
    return ((name, module) for name, module in model.named_modules() if isinstance(module, kind))


def _weight_name(name: str, layer: Any) -> str:
    """The name of the parameter that an adapted layer adds its update to."""
    parameter = getattr(layer, "parameter_name", "weight")
    while hasattr(layer, "base_layer"):
        name, layer = f"{name}{BASE}", layer.base_layer
    return f"{name}.{parameter}"


class _Update(torch.nn.Module):
    """The update of an adapted layer as a function of its tensors."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer = layer

    def forward(self) -> torch.Tensor:
        update: torch.Tensor = self.layer.get_delta_weight(ADAPTER)
        return update


def _update(path: str, layer: Any, weight: str, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The update of an adapted layer at ``path`` to the parameter ``weight``. Raises EngineError."""
    inside = len(path) + 1
    names = [f"{path}.{name}" for name, _ in layer.named_parameters() if name.startswith(MARK[1:])]
    if missing := [name for name in names if name not in tensors]:
        raise EngineError(f"{missing[0]} is missing: the adapters are not those of this model")
    given = {f"layer.{name[inside:]}": tensors[name] for name in (*names, weight)}
    with torch.no_grad():
        update: torch.Tensor = torch.func.functional_call(_Update(layer), given, ())
    return update


def _check_names(asked: str, text: str, targets: Any, modules: Mapping[str, Any], adapted: tuple[str, ...]) -> None:
    """Raise ConfigError for a target that names no module, or one that is not adapted.

    Args:
        asked: beginning of the message.
        text: ``trainer.lora.targets``.
        targets: the targets that have to name a module; peft has taken out names of experts that it knows.
        modules: of the model without adapters, by name.
        adapted: names of the adapted modules; empty if none could be.
    """
    if text.strip() == ALL_LINEAR:
        if not adapted:
            raise ConfigError(f"{asked}, and the model has no linear layer; name its layers")
        return
    if REGEX_CHARACTERS & set(text):
        try:
            pattern = re.compile(text.strip())
        except re.error as error:
            raise ConfigError(f"{asked}, which is no regular expression: {error}") from None
        matching = [name for name in modules if pattern.fullmatch(name)]
        if not matching and not adapted:
            raise ConfigError(
                f"{asked}, a regular expression that matches the whole name of no module; a name is like "
                f"{_example(modules)}"
            )
        return
    if not _targets(text):
        raise ConfigError(f"{asked}; name layers (q_proj,v_proj), or use {ALL_LINEAR}")
    for target in sorted(targets):
        matching = [name for name in modules if name == target or name.endswith(f".{target}")]
        if not matching:
            known = {name.rpartition(".")[2] for name, module in modules.items() if _is_weighted(module)}
            raise ConfigError(f"{asked}, and the model has no module {target!r}{suggested(target, known)}")
        first = modules[matching[0]]
        can_be_adapted = _is_linear(first) and _returns_tensor(first)
        if not any(name in adapted for name in matching) and (adapted or not can_be_adapted):
            kind = type(modules[matching[0]]).__name__
            inner = sorted(
                {name.rpartition(".")[2] for name, module in modules.items() if _is_linear(module) and target in name}
            )
            fix = f"name its layers ({', '.join(inner[:8])})" if inner else "name linear layers"
            raise ConfigError(f"{asked}, and {target} ({kind}) has no weights that an adapter could change; {fix}")


def _is_weighted(module: Any) -> bool:
    """Whether a module has a matrix of its own."""
    return any(parameter.dim() > 1 for parameter in module.parameters(recurse=False))


def _is_linear(module: Any) -> bool:
    return isinstance(module, torch.nn.Linear) or type(module).__name__ == "Conv1D"


def _returns_tensor(linear: Any) -> bool:
    """Whether a linear layer returns one tensor, as an adapter expects; some routers of experts return several."""
    if type(linear).forward is torch.nn.Linear.forward or not isinstance(linear, torch.nn.Linear):
        return True
    with torch.no_grad():
        return isinstance(linear(linear.weight.new_zeros(1, linear.in_features)), torch.Tensor)


def _example(modules: Mapping[str, Any]) -> str:
    return next((name for name, module in modules.items() if _is_linear(module)), "model.layers.0.self_attn.q_proj")


def _check_tied(asked: str, model: Any, layers: Mapping[str, Any]) -> None:
    """Raise ConfigError if an adapted layer shares its weights with another one."""
    if not getattr(model.config.get_text_config(), "tie_word_embeddings", False):
        return
    for name, layer in layers.items():
        if layer in (model.get_input_embeddings(), model.get_output_embeddings()):
            raise ConfigError(
                f"{asked}, and {name} shares its weights with another layer (tie_word_embeddings): merged weights "
                "cannot hold an adapter of one of them; leave it out"
            )


def _check_merged(asked: str, model: Any, shapes: Mapping[str, torch.Size]) -> None:
    """Raise ConfigError unless adapters can be merged: the names, order and shapes of the weights stay the same."""
    empty = {name: torch.empty(parameter.shape, device="meta") for name, parameter in model.named_parameters()}
    try:
        merged = {name: tensor.shape for name, tensor in merge_adapters(model, empty).items()}
    except (EngineError, RuntimeError, AttributeError, NotImplementedError) as error:
        raise ConfigError(f"{asked}, and the adapters cannot be merged: {first_sentence(error)}") from error
    if list(merged.items()) != list(shapes.items()):
        other = next((name for name in merged if merged[name] != shapes.get(name)), next(iter(shapes)))
        raise ConfigError(
            f"{asked}, and the adapters cannot be merged into {other} of {type(model).__name__}; choose other targets"
        )
