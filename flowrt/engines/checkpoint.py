"""Hugging Face checkpoints: in through `from_pretrained`, out through `save_pretrained`."""

import os
import shutil
import threading
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from flowrt.errors import EngineError

_loading = threading.Lock()
"""transformers changes torch for the whole process while it loads: one thread at a time."""


def load_model(path: str | os.PathLike[str], device: str = "cpu", dtype: torch.dtype = torch.float32) -> Any:
    """The causal LM in a directory, with the attention that transformers prefers for it (mostly SDPA).

    From safetensors alone: a ``pytorch_model.bin`` is a pickle, and is not opened.

    Raises EngineError when transformers cannot load it.
    """
    try:
        with _loading:
            model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, local_files_only=True, use_safetensors=True)
    except (OSError, ValueError, RuntimeError, KeyError, ImportError, SafetensorError) as error:
        raise EngineError(f"{path} is no causal LM that transformers can load: {_first_line(error)}") from error
    return model.to(device)


def load_tokenizer(path: str | os.PathLike[str]) -> Any:
    """The tokenizer beside a checkpoint. Raises EngineError when there is none or it has no end token."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise EngineError(f"{path} has no tokenizer that transformers can load: {_first_line(error)}") from error
    if tokenizer.eos_token_id is None:
        raise EngineError(f"the tokenizer in {path} has no end-of-sequence token; set eos_token in its configuration")
    return tokenizer


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


def save_model(model: Any, tokenizer: Any, path: Path) -> None:
    """Write model and tokenizer aside, then rename: it is there whole or not at all."""
    aside = path.with_name(f".{path.name}.part")
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)  # the run directory may be on another host
    model.save_pretrained(aside)
    tokenizer.save_pretrained(aside)
    put_in_place(aside, path)


def put_in_place(aside: Path, path: Path) -> None:
    """Give a directory that was written aside its name; what had it before is taken away."""
    old = path.with_name(f".{path.name}.old")
    shutil.rmtree(old, ignore_errors=True)  # of a process that was killed
    if path.exists():
        path.rename(old)
    aside.rename(path)
    shutil.rmtree(old, ignore_errors=True)


def written_dtype(path: str | os.PathLike[str], wanted: str) -> torch.dtype:
    """The type in which a model that began as the checkpoint there is written: ``wanted``, or the checkpoint's own.

    That is what its config.json says; float32 where it says nothing.
    """
    if wanted != "source":
        found: torch.dtype = getattr(torch, wanted)
        return found
    config = AutoConfig.from_pretrained(path, local_files_only=True).get_text_config()
    return config.dtype or torch.float32


def without_dropout(model: Any) -> Any:
    """The model with every dropout at 0: what is trained has to be the policy that was sampled, which has none.

    Its configuration keeps what it says of dropout, so what is exported does, too.
    """
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        # Decoders whose attention is a function keep its dropout as a number.
        elif isinstance(getattr(module, "attention_dropout", None), float):
            module.attention_dropout = 0.0
    return model


def named_parameters(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Every parameter that is trained, once (tied ones under their first name), in the model's order.

    In a model with adapters these are the adapters alone.
    """
    return {name: parameter.detach() for name, parameter in model.named_parameters() if parameter.requires_grad}


def parameter_shapes(path: str | os.PathLike[str]) -> dict[str, torch.Size]:
    """Names and shapes of what `named_parameters` gives for the checkpoint's model, without its weights.

    Raises EngineError when transformers knows no such model.
    """
    try:
        with _loading, torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path, local_files_only=True))
            model.tie_weights()
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise EngineError(f"{path} is no causal LM that transformers can load: {_first_line(error)}") from error
    return {name: parameter.shape for name, parameter in named_parameters(model).items()}
