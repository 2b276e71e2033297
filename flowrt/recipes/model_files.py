"""Checks of a Hugging Face checkpoint without torch: truncated, damaged and missing files.

- `flowrt.launcher.model_check` does the checks that need transformers.
- A LoRA adapter (adapter_config.json and its weights) stands for its base model with the adapter merged. As for
  transformers, the base is the model in the same directory, if it has a config.json, else ``base_model_name_or_path``.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from flowrt.engines.model_config import position_limit, with_overrides
from flowrt.errors import ConfigError

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")
ADAPTER_CONFIG = "adapter_config.json"
UNMERGEABLE = {
    "layer_replication": "repeats layers of its base model",
    "alora_invocation_tokens": "acts only after its invocation tokens",
}
"""Settings of an adapter with which no weights of the base model are equal to it, and what such an adapter does."""
ADAPTER_WEIGHTS = "adapter_model.safetensors"
TRAINER_STATE = "trainer_state.json"
"""In each checkpoint of a trainer: what the directory is."""
GGUF = ".gguf"
GGUF_MAGIC = b"GGUF"
INDEX = "model.safetensors.index.json"
MAX_JSON_BYTES = 1_000_000_000


def check_model_files(path: Path, max_new_tokens: int, overrides: Mapping[str, Any] | None = None) -> None:
    """Raise ConfigError unless the directory is a complete Hugging Face checkpoint with a long enough context.

    Args:
        path: the directory; also one of a LoRA adapter, whose base model is checked too.
        max_new_tokens: maximum length of a response, in tokens; must be below the positions of the model.
        overrides: fields in place of those of config.json.
    """
    try:
        _check_files(path, max_new_tokens, overrides or {})
    except OSError as error:
        raise ConfigError(f"model {path} cannot be read: {error.strerror}, {error.filename}") from error


def _check_files(path: Path, max_new_tokens: int, overrides: Mapping[str, Any]) -> None:
    _check_gguf(path)
    if not path.is_dir():
        what = "a file; give its directory," if path.is_file() else "not a directory; give one"
        raise ConfigError(f"model {path} is {what} with config.json, weights and a tokenizer")
    has_config = (path / "config.json").is_file()
    if is_adapter(path) or ((path / ADAPTER_CONFIG).is_file() and not has_config):
        base = _checked_base(path)
        if base != path:
            _check_files(base, max_new_tokens, overrides)
            return
    elif not has_config and (path / TRAINER_STATE).is_file():
        raise ConfigError(
            f"model {path} is a checkpoint of a trainer, and not a model: flowrt export {path.parent.parent} --hf DIR "
            f"--step {int(path.name.rpartition('-')[2])} makes one of it"
        )
    elif not has_config:
        raise ConfigError(f"model {path} has no config.json; is it a Hugging Face checkpoint?")
    shapes = _check_weights(path)
    if not has_tokenizer(path):
        raise ConfigError(f"model {path} has no tokenizer ({', '.join(TOKENIZER_FILES)}); is the download complete?")
    config = _read_json(path / "config.json")
    for name in ("generation_config.json", "tokenizer_config.json", "tokenizer.json"):
        if (path / name).is_file():
            _read_json(path / name)
    if not any(shapes.values()):
        raise ConfigError(f"model {path} has no tensor in its weights ({', '.join(shapes)}); download them again")
    if (path / INDEX).is_file():
        _check_index(path, shapes)
    positions = position_limit(with_overrides(config, overrides))
    if positions is not None and max_new_tokens >= positions:
        raise ConfigError(
            f"rollout.max_new_tokens is {max_new_tokens}, and model {path} has {positions} positions for prompt and "
            f"response together; use fewer, or scale them with model_overrides, if its card says how"
        )


def _check_gguf(path: Path) -> None:
    """Raise ConfigError for a GGUF file, and for a directory of such files."""
    files = (
        [path]
        if path.is_file()
        else sorted(candidate for candidate in path.glob("*") if candidate.suffix.lower() == GGUF)
    )
    file = next((file for file in files if _is_gguf(file)), None)
    if file is not None and not weight_files(path):
        raise ConfigError(
            f"model {path} is in GGUF, the format of llama.cpp, which cannot be trained; use the checkpoint that it "
            f"was made from, or convert it: AutoModelForCausalLM.from_pretrained({str(file.parent)!r}, "
            f"gguf_file={file.name!r}).save_pretrained(DIRECTORY), and AutoTokenizer likewise"
        )


def _is_gguf(file: Path) -> bool:
    """Whether a file is in GGUF, by its name or its first bytes."""
    if not file.is_file():
        return False
    with file.open("rb") as opened:
        return file.suffix.lower() == GGUF or opened.read(len(GGUF_MAGIC)) == GGUF_MAGIC


def _check_weights(path: Path) -> dict[str, dict[str, tuple[int, ...]]]:
    """The shapes of the tensors of each weight file, by its name.

    Raises ConfigError if there are none, or one is damaged.
    """
    files = weight_files(path)
    if not files:
        if any(path.glob("*.bin")):
            raise ConfigError(
                f"model {path} has its weights in a pickle (*.bin), which is never opened here: it could run anything; "
                "if you trust it, load it with transformers and save_pretrained it again"
            )
        raise ConfigError(f"model {path} has no weights (*.safetensors); is the download complete?")
    return {file.name: tensor_shapes(file) for file in files}


def weight_files(path: Path) -> list[Path]:
    """The safetensors files of a checkpoint, sorted by name, without those of an adapter; none if it has no such."""
    return sorted(file for file in path.glob("*.safetensors") if file.name != ADAPTER_WEIGHTS)


def has_tokenizer(path: Path) -> bool:
    """Whether a directory has files of a tokenizer."""
    return any((path / name).is_file() for name in TOKENIZER_FILES)


def is_adapter(path: Path) -> bool:
    """Whether a directory has an adapter and its weights, alone or with those of a model."""
    return (path / ADAPTER_CONFIG).is_file() and (path / ADAPTER_WEIGHTS).is_file()


def base_model_dir(path: Path) -> Path:
    """The directory of the model that an adapter is of; of a directory without an adapter, itself.

    Raises ConfigError if adapter_config.json cannot be read or names no base model.
    """
    if not (path / ADAPTER_CONFIG).is_file() or (path / "config.json").is_file():
        return path
    name = _read_json(path / ADAPTER_CONFIG).get("base_model_name_or_path")
    if not isinstance(name, str) or not name:
        raise ConfigError(
            f"adapter {path} names no base model: set base_model_name_or_path in its {ADAPTER_CONFIG} to the directory "
            "of the base model"
        )
    sibling = path / name
    return sibling if not Path(name).is_dir() and sibling.is_dir() else Path(name)


def tokenizer_dir(path: Path) -> Path:
    """The directory of the tokenizer of a model or adapter: its own, if it has one, else that of its base model."""
    return path if has_tokenizer(path) else base_model_dir(path)


def _checked_base(path: Path) -> Path:
    """The base model's directory of an adapter. Raises ConfigError unless it is complete, LoRA, and its base exists."""
    settings = _read_json(path / ADAPTER_CONFIG)
    kind = settings.get("peft_type")
    if unmergeable := next((name for name in UNMERGEABLE if settings.get(name)), ""):
        raise ConfigError(
            f"adapter {path} {UNMERGEABLE[unmergeable]} ({unmergeable}), and such an adapter cannot be merged into a "
            "model; use a plain LORA adapter"
        )
    if kind != "LORA":
        raise ConfigError(
            f"adapter {path} is of peft_type {kind!r:.40}, and only LORA adapters can be merged into a model"
        )
    if not (path / ADAPTER_WEIGHTS).is_file():
        pickled = any(path.glob("adapter_model.*"))
        reason = "a pickle, which is never opened here" if pickled else "nothing"
        raise ConfigError(
            f"adapter {path} has no weights in {ADAPTER_WEIGHTS}, but {reason}; save it as safetensors with peft"
        )
    if not tensor_shapes(path / ADAPTER_WEIGHTS):
        raise ConfigError(f"adapter {path} has no tensor in {ADAPTER_WEIGHTS}; save it again")
    base = base_model_dir(path)
    if not (base / "config.json").is_file():
        raise ConfigError(
            f"adapter {path} is of the base model {base}, which is no model on this host; set base_model_name_or_path "
            f"in its {ADAPTER_CONFIG} to the directory of the base model"
        )
    return base


def tensor_shapes(file: Path) -> dict[str, tuple[int, ...]]:
    """The shape of each tensor of a safetensors file, by name; the tensors are not read.

    Raises ConfigError if it is not a safetensors file, is truncated, or its header is damaged; OSError if it cannot be
    read.
    """
    try:
        with safe_open(file, framework="np") as tensors:
            return {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118 (it is no mapping)
    except SafetensorError as error:
        size = file.stat().st_size
        raise ConfigError(
            f"weights {file} of {size:,} bytes are incomplete or damaged ({error}); download them again"
        ) from error


def _check_index(path: Path, shapes: dict[str, dict[str, tuple[int, ...]]]) -> None:
    """Raise ConfigError if a file or tensor that the index lists is missing."""
    places = _read_json(path / INDEX).get("weight_map")
    if not isinstance(places, dict):
        raise ConfigError(f"model {path}: {INDEX} has no weight_map; download it again")
    for tensor, file in places.items():
        if file not in shapes:
            raise ConfigError(f"model {path} has no {file}, which {INDEX} names; is the download complete?")
        if tensor not in shapes[file]:
            raise ConfigError(f"model {path}: {file} has no {tensor}, which {INDEX} lists; download both again")


def _read_json(file: Path) -> dict[str, Any]:
    if not file.is_file() or file.stat().st_size > MAX_JSON_BYTES:
        raise ConfigError(f"{file} is not a regular file")
    return _parse(file.read_bytes(), str(file))


def _parse(text: bytes, what: str) -> dict[str, Any]:
    """Parse a JSON object. Raises ConfigError."""
    try:
        table = json.loads(text)
    except RecursionError:
        raise ConfigError(f"{what} is nested too deeply to be read; download it again") from None
    except ValueError as error:
        raise ConfigError(f"{what} is not JSON: {str(error)[:120]}; download it again") from None
    if not isinstance(table, dict):
        raise ConfigError(f"{what} is {type(table).__name__}, not a JSON object; download it again")
    return table
