"""Hugging Face checkpoints: load with `from_pretrained`, write with `save_pretrained`."""

import logging
import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from flowrt.engines.model_config import read_config, text_table
from flowrt.errors import EngineError
from flowrt.runtime.files import partial_path, replace_directory

disable_progress_bar()  # of loading and writing: the output of a worker is a log
log = logging.getLogger("flowrt")
TOKENIZER_PACKAGES = frozenset({"protobuf", "sentencepiece", "tiktoken"})
"""Packages that read a tokenizer which is not in tokenizer.json: the extra ``tokenizers``."""
_REQUIRED = re.compile(
    r"pip install (?:-U |--upgrade )?[`'\"]?([\w.-]+)(?![\w.+-])|requires (?:the )?[`'\"]?([\w.-]+)[`'\"]? library"
)
"""How transformers names a package that a checkpoint needs."""
NO_ADAPTER = {"subfolder": "no-adapter"}
"""For transformers: where to look for an adapter of a model, so that it finds none."""
NO_CODE = {"local_files_only": True, "trust_remote_code": False}
"""For transformers: load from this host only, and never run code of a checkpoint, nor ask whether to."""
COUNTS = (
    *("num_hidden_layers", "n_layer", "n_layers", "num_layers", "vocab_size"),
    *("hidden_size", "n_embd", "num_attention_heads", "n_head"),
)
"""Fields of config.json of which the number is at least 1 in every model that can be trained."""
QUANTIZATION = ("quantization_config", "compression_config")
MAX_SENTENCE = 200
_loading = threading.Lock()
"""Serialises loading, during which transformers changes process-wide state of torch."""


def load_config(path: str | os.PathLike[str]) -> Any:
    """transformers' configuration of a checkpoint.

    Raises EngineError if transformers cannot read it, or the model cannot be trained: it brings its own code, its
    weights are quantised, or it has no layers.
    """
    _check_table(path)
    with reading(path, "is no causal LM"):
        return AutoConfig.from_pretrained(path, **NO_CODE)


@contextmanager
def reading(path: str | os.PathLike[str], what: str) -> Iterator[None]:
    """Within it, what transformers raises for a checkpoint becomes an EngineError with the text of `unloadable`.

    A checkpoint may make transformers raise anything: each model has code that computes with the fields of config.json.
    """
    try:
        yield
    except Exception as error:
        raise EngineError(unloadable(path, what, error)) from error


def _check_table(path: str | os.PathLike[str]) -> None:
    """Raise EngineError for a config.json of quantised weights, or of a model without layers, heads or tokens."""
    if not (Path(path) / "config.json").is_file():
        return  # transformers says what is missing
    table = read_config(Path(path))
    for part in (table, text_table(table)):
        for name in QUANTIZATION:
            if (settings := part.get(name)) is not None:
                method = settings.get("quant_method") if isinstance(settings, Mapping) else None
                raise EngineError(
                    f"{path} is quantised ({method or name!s:.40}): its config.json has {name}, and quantised weights "
                    "cannot be trained; use the checkpoint that it was made from"
                )
    for name in COUNTS:
        count = text_table(table).get(name)
        if type(count) is int and count < 1:
            raise EngineError(
                f"{path} has {name} {count} in its config.json, and no model can be trained without; download it again"
            )


def load_model(path: str | os.PathLike[str], device: str = "cpu", dtype: torch.dtype = torch.float32) -> Any:
    """Load a causal LM from a directory, with transformers' default attention (mostly SDPA).

    Reads safetensors only: ``pytorch_model.bin`` is a pickle and is never opened. An adapter in the same directory is
    not applied.

    Raises EngineError if transformers cannot load it, or its weights do not fit its configuration.
    """
    load_config(path)  # raises for a model that cannot be trained
    with reading(path, "is no causal LM"), _loading:
        model = AutoModelForCausalLM.from_pretrained(
            path, dtype=dtype, use_safetensors=True, adapter_kwargs=NO_ADAPTER, **NO_CODE
        )
    for target, source in tied_names(model).items():
        if model.get_parameter_or_buffer(target) is not model.get_parameter_or_buffer(source):
            raise EngineError(differently_tied(path, target, source))
    return model.to(device)


def tied_names(model: Any) -> dict[str, str]:
    """Names of parameters that share their values with another one by the model's configuration, and of that one."""
    names: dict[str, str] = model.get_expanded_tied_weights_keys(all_submodels=True)
    return names


def differently_tied(path: str | os.PathLike[str], target: str, source: str) -> str:
    """That a checkpoint has two values for two parameters which its configuration ties, in one sentence."""
    return (
        f"{path} has a {target} that differs from its {source}, and its config.json ties them; set tie_word_embeddings "
        "to false in config.json"
    )


def weight_bytes(path: str | os.PathLike[str]) -> int:
    """Size of the weight files of a checkpoint, in bytes; 0 without any."""
    return sum(file.stat().st_size for file in Path(path).glob("*.safetensors"))


@contextmanager
def head_on(model: Any, select: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[None]:
    """Within it, the LM head of the model is called on ``select`` of its input, the last hidden states [B, L, D].

    So logits are computed at the selected positions only, and the model does with them what it does with all logits
    (soft-capping, scaling).
    """
    hook = model.get_output_embeddings().register_forward_pre_hook(lambda _, inputs: select(inputs[0]))
    try:
        yield
    finally:
        hook.remove()


def load_classifier(path: str | os.PathLike[str], dtype: Any) -> tuple[Any, list[str], Any]:
    """Load a sequence classifier and its tokenizer.

    Args:
        path: directory of the checkpoint.
        dtype: a torch dtype, or "auto".

    Returns:
        The model, the names of the weights that the checkpoint lacks, and the tokenizer. Raises the errors of
        transformers.
    """
    model, info = AutoModelForSequenceClassification.from_pretrained(
        path, **NO_CODE, use_safetensors=True, dtype=dtype, output_loading_info=True
    )
    return model, sorted(info["missing_keys"]), AutoTokenizer.from_pretrained(path, **NO_CODE)


def load_tokenizer(path: str | os.PathLike[str]) -> Any:
    """Load a checkpoint's tokenizer. Raises EngineError if there is none or it has no end token."""
    with reading(path, "has no tokenizer"):
        tokenizer = AutoTokenizer.from_pretrained(path, **NO_CODE)
    if tokenizer.eos_token_id is None:
        raise EngineError(f"the tokenizer in {path} has no end-of-sequence token; set eos_token in its configuration")
    return tokenizer


def unloadable(path: str | os.PathLike[str], what: str, error: Exception) -> str:
    """Why transformers cannot load a part of a checkpoint, in one sentence.

    Args:
        path: the checkpoint.
        what: the fault if no package is missing: "is no causal LM", "has no tokenizer".
        error: of transformers.
    """
    if "trust_remote_code" in str(error):
        return (
            f"{path} brings its own code (auto_map in its configuration), which is never run here; use a checkpoint of "
            "a model and tokenizer that transformers has"
        )
    package = missing_package(error)
    if package in TOKENIZER_PACKAGES:
        return (
            f"the tokenizer of {path} is in no tokenizer.json, and the packages that read its other files are not "
            "installed here: pip install 'flowrt[tokenizers]'"
        )
    if package:
        return f"{path} needs the package {package}, which is not installed here: pip install {package}"
    if "backend tokenizer" in str(error):
        return (
            f"{path} has no tokenizer.json, and no other file of a tokenizer that transformers reads; is it complete?"
        )
    return f"{path} {what} that transformers can load: {first_sentence(error)}"


def missing_package(error: Exception) -> str:
    """The package whose absence transformers reports with this error; empty: none, or it is installed."""
    match = _REQUIRED.search(str(error))
    name = (isinstance(error, ModuleNotFoundError) and error.name) or (match and (match[1] or match[2])) or ""
    name = name.split(".")[0].lower()
    try:
        return "" if not name or distribution(name) else name
    except PackageNotFoundError:
        return name


def first_sentence(error: Exception) -> str:
    """The first line of an error, and those that continue it, without the advice that follows."""
    if isinstance(error, KeyError):
        return f"it does not know {error!s:.80}"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[0] if lines else type(error).__name__
    for line in lines[1:]:
        if not text.endswith((":", ",")):
            break
        text = f"{text} {line}"
    cut = "…" if len(text) > MAX_SENTENCE else ""
    return text[:MAX_SENTENCE].rstrip(". ") + cut


def save_model(model: Any, tokenizer: Any, path: Path) -> None:
    """Write model and tokenizer to a temporary directory, then rename it to ``path``, so the write is atomic."""
    partial = partial_path(path)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)  # the run directory may be on another host
    model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    replace_directory(partial, path)


def export_dtype(path: str | os.PathLike[str], wanted: str) -> torch.dtype:
    """The dtype to export a model in: ``wanted``, or for "source" that of the checkpoint at ``path``.

    The checkpoint's dtype is read from its config.json; float32 if it has none.
    """
    if wanted != "source":
        dtype: torch.dtype = getattr(torch, wanted)
        return dtype
    config = load_config(path).get_text_config()
    return config.dtype or torch.float32


DROPOUT = "drop"
RANDOM_RATE = re.compile(f"{DROPOUT}|jitter|noise")
"""Names of attributes with a rate of random changes of a forward pass: dropout, layer dropout, noise of a router."""


def random_rates(model: Any) -> dict[str, float]:
    """Rates above 0 of random changes of a model's forward passes in training mode, by their name in its modules."""
    rates: dict[str, float] = {}
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout) and module.p:
            rates["dropout"] = max(float(module.p), rates.get("dropout", 0.0))
        rates |= {name: float(value) for name, value in _rates_of(module).items() if value}
    return rates


def set_training_mode(model: Any, *, dropout: bool = False) -> Any:
    """Make a forward pass of training a function of the tokens, so that the trained policy equals the sampled one.

    All modules are in evaluation mode, without dropout and noise of routers. Only layers with activation checkpointing
    are in training mode, which they need, and dropout rates are 0 for them. The model's configuration, and so the
    exported model, keeps its settings.

    Args:
        model: a causal LM.
        dropout: keep all rates, and set the model to training mode.

    Returns:
        The model.
    """
    if dropout:
        rates = ", ".join(f"{name} {value:g}" for name, value in sorted(random_rates(model).items()))
        log.warning("trainer.dropout is on: %s", rates or "the model has no rate above 0")
        return model.train()
    model.eval()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        for name in _rates_of(module):
            if DROPOUT in name:  # the noise of a router also sets a threshold in evaluation mode
                setattr(module, name, 0.0)
        if getattr(module, "gradient_checkpointing", False):
            module.training = True
    return model


def _rates_of(module: torch.nn.Module) -> dict[str, float]:
    """Numbers among the attributes of a module that are rates of random changes, such as attention_dropout."""
    return {
        name: value
        for name, value in vars(module).items()
        if isinstance(value, int | float) and not isinstance(value, bool) and RANDOM_RATE.search(name)
    }


def model_name(model: Any) -> str:
    """The directory of a model and the type of its configuration, for messages."""
    config = getattr(model, "config", None)
    kind = getattr(config, "model_type", "") or type(model).__name__
    path = str(getattr(model, "name_or_path", ""))
    return f"{path} ({kind})" if path else str(kind)


def named_parameters(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Detached trainable parameters by name, in the model's order; tied parameters once, under their first name.

    In a model with adapters, only the adapters are trainable.
    """
    return {name: parameter.detach() for name, parameter in model.named_parameters() if parameter.requires_grad}


def parameter_shapes(path: str | os.PathLike[str]) -> dict[str, torch.Size]:
    """Shapes of `named_parameters` of the checkpoint's model, without loading its weights.

    Raises EngineError if transformers does not support the model.
    """
    model = meta_model(path, torch.float32)
    model.tie_weights()
    return {name: parameter.shape for name, parameter in named_parameters(model).items()}


def meta_model(path: str | os.PathLike[str], dtype: torch.dtype) -> Any:
    """The checkpoint's model on the meta device, without memory for its weights.

    Raises EngineError if transformers does not support the model.
    """
    config = load_config(path)
    with reading(path, "is no causal LM"), _loading, torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
