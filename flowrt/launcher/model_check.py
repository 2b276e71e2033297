"""Check of a run's model and prompts before the other processes of the run start (`flowrt.launcher.start_models`).

Names, types and shapes of the weights are read from the headers of their files.
"""

import contextlib
import json
import logging
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors import safe_open
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS, RopeParameters

from flowrt.engines.hf import (
    differently_tied,
    load_config,
    load_model,
    load_tokenizer,
    meta_model,
    parameter_shapes,
    reading,
    set_training_mode,
    tied_names,
)
from flowrt.engines.model_config import (
    CONFIG_FILE,
    ROPE,
    TEXT_TABLES,
    overwrite_config,
    parse_overrides,
    read_config,
    text_table,
    with_overrides,
    write_overridden,
)
from flowrt.engines.options import Truncation
from flowrt.engines.registry import ROLLOUT_ENGINES
from flowrt.engines.stopping import stop_token_ids
from flowrt.engines.torch.generation_path import right_way
from flowrt.engines.training.architecture import check_training
from flowrt.engines.training.lora import add_adapters
from flowrt.errors import ConfigError, EngineError, suggested
from flowrt.launcher.prompt_check import check_prompts
from flowrt.recipes.config import RunConfig
from flowrt.recipes.eval_names import chat_templates
from flowrt.recipes.eval_sets import run_prompts
from flowrt.recipes.model_files import is_adapter, tokenizer_dir, weight_files
from flowrt.recipes.prompt_limits import prompt_limits
from flowrt.recipes.run_dir import model_dir, reference_model_dir
from flowrt.recipes.tasks.registry import task_of

log = logging.getLogger("flowrt")
MAX_NAMES = 3
MAX_SCANNED_BYTES = 4 * 10**9
"""Larger weights are not searched for NaN and infinity: it would take too long."""
MAX_LOADED_BYTES = 5 * 10**8
"""Models with larger weights are not loaded before the run starts: they would take as much memory twice."""
COMPARED_ROWS = 4096
"""Rows of two matrices of weights that are compared at a time."""
WIDE = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Types of weights that can be trained, as safetensors names them."""


def check_model(config: RunConfig, *, are_fit: bool = False) -> None:
    """Raises ConfigError if the model or reference.model cannot be loaded, or a prompt or top-k does not fit.

    ``are_fit``: whether the prompts of the task, but not those of ``eval.data``, are known to fit.
    """
    try:
        _check_model(config, are_fit=are_fit)
    except (ConfigError, EngineError) as error:
        raise ConfigError(as_named(config, str(error))) from error


def as_named(config: RunConfig, text: str) -> str:
    """A message with the names that the user gave to models, in place of directories that a run writes."""
    overridden = " with model_overrides" if config.model_overrides else ""
    for given, written in (
        (config.reference.model, reference_model_dir(config)),  # first: its path may begin with that of the model
        (config.model, model_dir(config)),
    ):
        if given and str(written) != given:
            text = text.replace(str(written), f"{given}{overridden}")
    return text


def _check_model(config: RunConfig, *, are_fit: bool) -> None:
    path = model_dir(config)
    if config.model_overrides:
        write_models(config)
    if config.trainer.lora.rank:
        add_adapters(meta_model(path, torch.float32), config.trainer.lora)
    if config.reference.model:
        check_reference(config)
    if not config.model:
        return  # built by flowrt
    _check_tokens(config, path, path, check_weights(path), are_fit=are_fit)
    check_finite(path)
    check_architecture(
        path, generates=ROLLOUT_ENGINES[config.rollout.engine].is_in_worker, compiled=config.rollout.compile
    )


def check_without_weights(config: RunConfig, path: Path, *, are_fit: bool = False) -> None:
    """Raises ConfigError if a prompt or top-k does not fit the tokenizer and the configuration of a model.

    Args:
        config: of the run.
        path: directory of the model, which needs no weights.
        are_fit: as of `check_model`.
    """
    try:
        if not (path / CONFIG_FILE).is_file():
            raise ConfigError(f"model {path} has no config.json; is it a Hugging Face checkpoint?")
        _check_tokens(config, path, tokenizer_dir(path), load_config(path), are_fit=are_fit)
    except EngineError as error:
        raise ConfigError(str(error)) from error


def _check_tokens(config: RunConfig, path: Path, with_tokenizer: Path, model_config: Any, *, are_fit: bool) -> None:
    tokenizer = load_tokenizer(with_tokenizer)
    stop_token_ids(path, tokenizer, chat_templates(config))  # raises if its files cannot be read
    text_config = model_config.get_text_config()
    check_sampling(config, getattr(text_config, "vocab_size", None) or sys.maxsize, f"model {path}")
    check_prompts(
        run_prompts(config, task_of(config), are_fit=are_fit),
        tokenizer,
        limits=prompt_limits(config, text_config),
        what=f"model {path}",
        form=config.data.prompt_format,
    )


def write_models(config: RunConfig) -> None:
    """Make the checkpoints with overridden fields, from which all workers load.

    Raises ConfigError for a field that the model does not have: it would have no effect.
    """
    overrides = parse_overrides(config.model_overrides)
    sources = {config.model: model_dir(config), config.reference.model: reference_model_dir(config)}
    for name, directory in sources.items():
        if not name:
            continue
        merged = is_adapter(Path(name))  # written to the run directory before
        source = directory if merged else Path(name)
        check_overrides(name, source, overrides)
        if merged or source.resolve() == directory.resolve():  # a resumed run has only what it wrote
            overwrite_config(directory, overrides)
        else:
            write_overridden(source, directory, overrides)


def check_overrides(name: str, source: Path, overrides: Mapping[str, Any]) -> None:
    """Raises ConfigError for a field that the configuration of a model does not have.

    Args:
        name: the model in messages.
        source: directory with its config.json.
        overrides: the fields of ``model_overrides``.
    """
    table = read_config(source)
    original = load_config(source)
    whole, text = original.to_dict(), original.get_text_config()
    fields = dict(overrides)
    for nested in TEXT_TABLES:
        if nested in table and isinstance(inner := fields.get(nested), dict):
            fields = {key: value for key, value in fields.items() if key != nested} | inner
    rope: Mapping[str, Any] = next((rope_table for name in ROPE if (rope_table := text_table(table).get(name))), {})
    known = {*table, *text_table(table), *whole, *text.to_dict(), *ROPE, *(["rope_theta"] if rope else [])}
    for field, value in fields.items():
        if field not in known and not hasattr(text, field):
            raise ConfigError(
                f"model_overrides has {field!r}, which the configuration of model {name} does not have"
                f"{suggested(field, known)}; it would have no effect"
            )
        if field in ROPE and isinstance(value, dict):
            check_rope(field, value, rope)
    with TemporaryDirectory(prefix="flowrt-") as directory:
        (Path(directory) / CONFIG_FILE).write_text(json.dumps(with_overrides(table, overrides)))
        try:
            meta_model(directory, torch.float32)
        except EngineError as error:
            raise ConfigError(f"model {str(error).replace(directory, f'{name} with model_overrides')}") from error


def check_rope(field: str, settings: Mapping[str, Any], present: Mapping[str, Any]) -> None:
    """Raises ConfigError for settings of rotary positions that transformers would ignore, or could not compute with.

    Args:
        field: the name of the settings in ``model_overrides``.
        settings: those of ``model_overrides``.
        present: those of config.json.
    """
    tables: list[Mapping[str, Any]] = [setting for setting in settings.values() if isinstance(setting, dict)] or [
        settings
    ]
    known = {*RopeParameters.__annotations__, "type", *present}
    for name, value in ((name, value) for table in tables for name, value in table.items()):
        if name not in known:
            raise ConfigError(
                f"model_overrides has {field}.{name}, which no type of rotary positions has{suggested(name, known)}"
            )
        if name == "factor" and not (isinstance(value, int | float) and not isinstance(value, bool) and value >= 1):
            raise ConfigError(f"model_overrides has {field}.factor {value!r}; use a number of at least 1")
        if name in ("rope_type", "type") and value not in ROPE_INIT_FUNCTIONS and value not in ("default", "mrope"):
            kinds = suggested(str(value), ["default", *ROPE_INIT_FUNCTIONS])
            raise ConfigError(f"model_overrides has {field}.{name} {value!r}, which transformers does not have{kinds}")


def check_reference(config: RunConfig) -> None:
    """Raises ConfigError if ``reference.model`` cannot be loaded, or cannot score the run's responses.

    The reference model needs the vocabulary of the trained model, positions for a prompt and its response, and, to be
    refreshed, the same parameters.
    """
    path, policy = reference_model_dir(config), model_dir(config)
    text_config = check_weights(path).get_text_config()
    sizes = [load_config(directory).get_text_config().vocab_size for directory in (policy, path)]
    if sizes[0] != sizes[1]:
        raise ConfigError(
            f"reference.model {path} has a vocab_size of {sizes[1]}, and the trained model {policy} of {sizes[0]}: the "
            "reference scores the same tokens; use a checkpoint with the same vocabulary"
        )
    ours, theirs = (load_tokenizer(folder).get_vocab() for folder in (policy, path))
    if ours != theirs:
        token = min(token for token, _ in ours.items() ^ theirs.items())
        raise ConfigError(
            f"reference.model {path} has another vocabulary than the trained model {policy}: token {token!r:.40} is "
            f"{theirs.get(token, 'missing')} and not {ours.get(token, 'missing')}; use a checkpoint with the same "
            "vocabulary"
        )
    if config.reference.refresh and parameter_shapes(path) != parameter_shapes(policy):
        raise ConfigError(
            f"reference.refresh is {config.reference.refresh}, and reference.model {path} has other parameters than "
            f"the trained model {policy}; use one of the same architecture, or set reference.refresh to 0"
        )
    check_prompts(
        task_of(config).prompt_blocks(),
        load_tokenizer(policy),  # the tokenizer of the run's prompts
        limits=prompt_limits(config, text_config),
        what=f"reference.model {path}",
        form=config.data.prompt_format,
    )
    check_finite(path)
    check_architecture(path, generates=False)


def check_sampling(config: RunConfig, vocab_size: int, what: str) -> None:
    """Raises ConfigError if top-k is the only truncation and excludes no token. ``what``: the model in messages."""
    truncation = config.rollout.truncation
    if truncation.top_k >= vocab_size and truncation == Truncation(truncation.top_k):
        raise ConfigError(
            f"rollout.top_k is {truncation.top_k}, and {what} has a vocab_size of {vocab_size}: no token would be "
            "excluded; use fewer, or 0 to sample from all"
        )


def check_weights(path: Path, report: Callable[[str], object] = log.warning) -> Any:
    """The model's configuration.

    Args:
        path: directory of the model.
        report: receives a sentence that names tensors of the files which the model does not use, if there are some.

    Raises ConfigError if transformers cannot build the model, or its weights do not fit its configuration.
    """
    try:
        model_config = load_config(path)
        plain = meta_model(path, torch.float32)
        with reading(path, "has no weights"):
            headers = _headers(path)
    except EngineError as error:
        raise ConfigError(f"model {error}") from error
    loaded = _loaded(path, plain, model_config, headers)
    if mismatched := loaded["mismatched_keys"]:
        name, there, wanted = sorted(mismatched)[0]
        others = f" (and {len(mismatched) - 1} others)" if len(mismatched) > 1 else ""
        raise ConfigError(
            f"model {path}: {name}{others} has shape {list(there)}, and config.json asks for {list(wanted)}; take both "
            "from one checkpoint"
        )
    if missing := loaded["missing_keys"]:
        raise ConfigError(
            f"model {path} lacks {len(missing)} tensors that config.json asks for: {_some(missing)}; take both from "
            "one checkpoint"
        )
    if narrow := {name for name, tensor in headers.items() if tensor.dtype not in WIDE.values()}:
        wide = {name: tensor for name, tensor in headers.items() if name not in narrow}
        without = _loaded(path, plain, model_config, wide)["missing_keys"]
        if integers := sorted(without & {name for name, _ in plain.named_parameters()}):
            raise ConfigError(
                f"model {path}: {_some(integers)} is of integers or of numbers of 8 bits, as quantised weights are, "
                "which cannot be trained; use the checkpoint that it was made from"
            )
    _check_tied(path, plain, set(headers))
    if unused := loaded["unexpected_keys"]:
        report(
            f"model {path}: {len(unused)} tensors of its files are not used, as its config.json has no place for them: "
            f"{_some(unused)}"
        )
    return model_config


def _loaded(path: Path, model: Any, model_config: Any, tensors: Mapping[str, torch.Tensor]) -> dict[str, set[Any]]:
    """What transformers says of loading these tensors into a model like this one."""
    try:
        with reading(path, "is no causal LM"):
            _, report = type(model).from_pretrained(
                None,
                config=model_config,
                state_dict=dict(tensors),
                device_map={"": "meta"},
                ignore_mismatched_sizes=True,
                output_loading_info=True,
            )
    except EngineError as error:
        raise ConfigError(f"model {error}") from error
    return {name: set(keys) for name, keys in report.items() if isinstance(keys, set | list)}


def _check_tied(path: Path, model: Any, names: set[str]) -> None:
    """Raise ConfigError if the files have two values for weights that the configuration ties.

    Matrices are found by the ends of their names; `load_model` compares all that are tied.
    """
    for target, source in tied_names(model).items():
        stored = [[name for name in names if name.endswith(_end(tied))] for tied in (target, source)]
        if any(len(same_end) != 1 for same_end in stored) or stored[0] == stored[1]:
            continue
        with contextlib.ExitStack() as files:
            first, second = (_slice(path, name, files) for (name,) in stored)
            if not _is_equal(first, second):
                raise ConfigError(f"model {differently_tied(path, target, source)}")


def _end(name: str) -> str:
    """The last two parts of a parameter's name."""
    return ".".join(name.split(".")[-2:])


def _slice(path: Path, name: str, files: contextlib.ExitStack) -> Any:
    """A tensor of the weight files, of which the values are not read yet."""
    for file in weight_files(path):
        tensors = files.enter_context(safe_open(file, framework="pt"))
        if name in tensors.keys():  # noqa: SIM118 (it is no mapping)
            return tensors.get_slice(name)
    raise ConfigError(f"model {path} has no {name}; download it again")


def _is_equal(first: Any, second: Any) -> bool:
    rows = first.get_shape()[0]
    return first.get_shape() == second.get_shape() and all(
        torch.equal(first[begin : begin + COMPARED_ROWS], second[begin : begin + COMPARED_ROWS])
        for begin in range(0, rows, COMPARED_ROWS)
    )


def check_finite(path: Path) -> None:
    """Raises ConfigError for a weight that is NaN or infinite; does nothing above `MAX_SCANNED_BYTES`."""
    check_finite_files(weight_files(path))


def check_finite_files(files: Sequence[Path]) -> None:
    """As `check_finite`, of these files."""
    if sum(file.stat().st_size for file in files) > MAX_SCANNED_BYTES:
        return
    for file in files:
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (it is no mapping)
                tensor = tensors.get_tensor(name)
                if tensor.dtype in WIDE.values() and tensor.numel():
                    least, most = torch.aminmax(tensor)
                    if not (least.isfinite() and most.isfinite()):
                        raise ConfigError(
                            f"weights {file}: {name} contains {least if not least.isfinite() else most}: they are "
                            "damaged, or from a training that diverged; use others"
                        )


def check_architecture(path: Path, *, generates: bool, compiled: bool = False) -> None:
    """Raises ConfigError for a model that cannot be trained, or that the torch rollout engine cannot generate with.

    Does nothing above `MAX_LOADED_BYTES`: then the trainer and the rollout workers find it when they load the model.

    Args:
        path: directory of the model.
        generates: whether the rollout engine computes with transformers, in the workers.
        compiled: whether its decode step is compiled.
    """
    if sum(file.stat().st_size for file in weight_files(path)) > MAX_LOADED_BYTES:
        return
    model = set_training_mode(load_model(path))
    check_training(model)
    if generates:
        right_way(model, compiled=compiled)


def _headers(path: Path) -> dict[str, torch.Tensor]:
    """A tensor on the meta device for each tensor of the weight files."""
    parameters = {}
    for file in weight_files(path):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (it is no mapping)
                part = tensors.get_slice(name)
                parameters[name] = torch.empty(part.get_shape(), dtype=_dtype(part.get_dtype()), device="meta")
    return parameters


def _dtype(name: str) -> torch.dtype:
    """The dtype of a safetensors dtype name; all that cannot be trained count as int8."""
    return WIDE.get(name, torch.int8)


def _some(names: Iterable[str]) -> str:
    listed = sorted(names)
    return ", ".join(listed[:MAX_NAMES]) + (", …" if len(listed) > MAX_NAMES else "")
