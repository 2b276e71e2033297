"""config.json of a checkpoint, read without transformers: the part of the language model, positions, overrides."""

import json
import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flowrt.errors import ConfigError
from flowrt.runtime.files import atomic_write, partial_path, replace_directory

CONFIG_FILE = "config.json"
TEXT_TABLES = ("text_config", "llm_config", "language_config")
"""Names of the part of the language model in the configuration of a multimodal model."""
POSITIONS = ("max_position_embeddings", "n_positions")
ROPE = ("rope_parameters", "rope_scaling")
"""Names of the settings of rotary positions, in transformers 5 and before."""
SCALED_TYPES = ("yarn", "linear")
"""Types of rotary positions of which ``max_position_embeddings`` may be the length before scaling. That of the others
(llama3) is the length after it."""
CALL_TYPES = ("dynamic", "longrope", "su")
"""Types of rotary positions that, above the original length, depend on the longest sequence of a call: one sequence
would change the others of its batch, and rollout and trainer would differ."""
MASKED_ABOVE = "keep_window_size"
"""Field of Doge: in longer sequences transformers leaves out keys, and later tokens decide which."""
OF_ALL_TYPES = ("rope_theta", "partial_rotary_factor", "mrope_section", "mrope_interleaved")
"""Settings of rotary positions that are not of one type of scaling."""
POSITIVE = (
    *(*POSITIONS, "original_max_position_embeddings", "rope_theta", "factor", "layer_norm_eps", "rms_norm_eps"),
    *("sliding_window", "attention_chunk_size", "hidden_size", "intermediate_size", "moe_intermediate_size"),
    *("head_dim", "num_attention_heads", "num_key_value_heads", "vocab_size", "n_embd", "n_head"),
)
"""Fields of which the number is above 0 in every model."""
STOP_TOKENS = ("eos_token_id", "bos_token_id")
FIXED = (
    *("architectures", "auto_map", "model_type", "quantization_config", "tie_word_embeddings"),
    *("vocab_size", "dtype", "torch_dtype"),
    *("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
)
"""Fields that say what the weights are: with others some would not load, or would be left out."""


def text_table(table: Mapping[str, Any]) -> Mapping[str, Any]:
    """The configuration of the language model: a part of that of a multimodal model, or the whole."""
    return next((table[name] for name in TEXT_TABLES if isinstance(table.get(name), dict)), table)


def position_limit(table: Mapping[str, Any]) -> int | None:
    """Number of positions of a model, for prompt and response together, in tokens; None: unlimited or unknown.

    That of scaled rotary positions is ``factor`` times the original length, as vLLM derives it, if that is more than
    ``max_position_embeddings``; that of positions that depend on the longest sequence of a call (`CALL_TYPES`) is the
    original length. A model that is not causal in sequences above a length (`MASKED_ABOVE`) has as many positions.
    """
    text = text_table(table)
    scaled, masked = _scaled_positions(text), text.get(MASKED_ABOVE)
    return scaled if not isinstance(masked, int) else masked if scaled is None else min(scaled, masked)


def _scaled_positions(text: Mapping[str, Any]) -> int | None:
    declared: int | None = next((text[name] for name in POSITIONS if isinstance(text.get(name), int)), None)
    rope = next((text[name] for name in ROPE if text.get(name)), None)
    if declared is None or not isinstance(rope, dict):
        return declared
    of_layers = [layer for layer in (rope, *rope.values()) if isinstance(layer, dict)]
    if any(layer.get("rope_type", layer.get("type")) in CALL_TYPES for layer in of_layers):
        originals = [table.get("original_max_position_embeddings") for table in (text, *of_layers)]
        return min([declared, *(length for length in originals if isinstance(length, int))])
    kind, factor = rope.get("rope_type", rope.get("type")), rope.get("factor")
    # The factor of Gemma 3 applies to some layers, and its max_position_embeddings is the length after scaling.
    if kind not in SCALED_TYPES or not isinstance(factor, int | float) or "gemma3" in str(text.get("model_type")):
        return declared
    if not math.isfinite(factor):
        return declared
    original = rope.get("original_max_position_embeddings") or text.get("original_max_position_embeddings")
    return max(declared, int(factor * (original if isinstance(original, int) else declared)))


def parse_overrides(text: str) -> dict[str, Any]:
    """The fields of ``model_overrides``, JSON text; empty for none.

    Raises ConfigError if it is not a JSON object, or has a field that says what the weights are.
    """
    try:
        table = json.loads(text, parse_constant=_not_a_number) if text else {}
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"model_overrides is {text!r:.80}, which is not JSON: {error}") from None
    if not isinstance(table, dict):
        raise ConfigError(f"model_overrides is {text!r:.80}; make it a JSON object of fields of config.json")
    nested = [inner for name in TEXT_TABLES if isinstance(inner := table.get(name), dict)]
    if fixed := next((name for name in FIXED for fields in (table, *nested) if name in fields), ""):
        raise ConfigError(f"model_overrides has {fixed!r}, which says what the weights are; leave it out")
    return table


def _not_a_number(name: str) -> float:
    raise ValueError(f"{name} is no number of JSON")


def with_overrides(table: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration with these fields in place of its own.

    Tables are merged field by field. A field of a multimodal model is that of its language model, unless it is a field
    of the whole; it may also be in a table with the name of that of the language model, as in config.json. Both names
    of the settings of rotary positions mean the one that the configuration has; null means no scaling.

    Raises ConfigError for settings of rotary positions of a model that has some for each type of layer, and for a
    number that no model can compute with.
    """
    check_numbers(overrides, {**table, **text_table(table)})
    of_text: dict[str, Any] = {}
    for name in TEXT_TABLES:
        if isinstance(nested := overrides.get(name), dict):
            of_text |= nested
    flat = {key: value for key, value in overrides.items() if not isinstance(value, dict) or key not in TEXT_TABLES}
    name = next((name for name in TEXT_TABLES if isinstance(table.get(name), dict)), "")
    if name:
        own = {key: value for key, value in flat.items() if key in table}
        of_text = {key: value for key, value in flat.items() if key not in table} | of_text
        return {**_merged(table, own), name: with_overrides(table[name], of_text)}
    rope = next((key for key in ROPE if table.get(key)), "")
    merged = dict(table)
    for key, value in (flat | of_text).items():
        if rope and key in ROPE:
            merged[rope] = _with_rope(merged[rope], key, value)
        elif rope == ROPE[0] and key == "rope_theta" and key not in table:
            merged[rope] = _merged(merged[rope], {key: value})
        else:
            merged = _merged(merged, {key: value})
    return merged


def check_numbers(overrides: Mapping[str, Any], own: Mapping[str, Any], prefix: str = "") -> None:
    """Raises ConfigError for a number that the field cannot have in any model, such as a negative size.

    Args:
        overrides: fields of ``model_overrides``.
        own: the fields of the configuration: a field of which the number is negative there may be negative.
        prefix: the names of the tables in which these fields are, with dots.
    """
    for name, value in overrides.items():
        what, old = f"model_overrides has {prefix}{name}", own.get(name)
        if isinstance(value, dict):
            check_numbers(value, old if isinstance(old, dict) else {}, f"{prefix}{name}.")
        for number in value if isinstance(value, list) else [value]:
            if isinstance(number, bool) or not isinstance(number, int | float):
                continue
            if "drop" in name and not 0 <= number < 1:
                raise ConfigError(f"{what} {number!r}; use a probability below 1")
            if name in POSITIVE and not 0 < number < math.inf:
                raise ConfigError(f"{what} {number!r}; use a number above 0")
            usual = old if isinstance(old, int | float) else 0
            if number < 0 <= usual and (name in own or name in STOP_TOKENS):
                raise ConfigError(f"{what} {number!r}; use a number of at least 0")


def _with_rope(present: Any, key: str, value: Any) -> Any:
    """Settings of rotary positions with those of an override, which may be null, or in the form of transformers 4.

    Of another type of scaling, only the settings that all types have stay. Raises ConfigError if the override does not
    say which layers it is of.
    """
    if not isinstance(present, dict):
        return value
    layers = [name for name, layer in present.items() if isinstance(layer, dict)]
    if layers and not (isinstance(value, dict) and set(value) <= set(layers)):
        raise ConfigError(
            f"model_overrides has {key!r}, and the model has rotary positions by type of layer; give a table for "
            f"{' or '.join(layers)}: {{{key!r}: {{{layers[0]!r}: {{…}}}}}}"
        )
    if layers:
        return present | {name: _with_rope(present[name], key, layer) for name, layer in value.items()}
    if value is None:
        value = {"rope_type": "default"}
    if not isinstance(value, dict):
        return value
    if "type" in value:
        value = {"rope_type": value["type"]} | {name: setting for name, setting in value.items() if name != "type"}
    own = dict(present)
    if "type" in own:
        own.setdefault("rope_type", own.pop("type"))
    if value.get("rope_type", own.get("rope_type")) != own.get("rope_type"):
        own = {name: setting for name, setting in own.items() if name in OF_ALL_TYPES}
    return _merged(own, value)


def _merged(table: Mapping[str, Any], others: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(table)
    for key, value in others.items():
        old = merged.get(key)
        merged[key] = _merged(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return merged


def write_overridden(source: Path, directory: Path, overrides: Mapping[str, Any]) -> None:
    """Make ``directory`` the checkpoint ``source`` with overridden fields: links to its files, and another config.json.

    Raises OSError if it cannot be written, ConfigError if config.json is not a JSON object.
    """
    partial = partial_path(directory)
    shutil.rmtree(partial, ignore_errors=True)  # left by a killed process
    partial.mkdir(parents=True, mode=0o700)
    for file in source.iterdir():
        if file.name != CONFIG_FILE and file.is_file():
            _link(file.resolve(), partial / file.name)
    table = with_overrides(read_config(source), overrides)
    (partial / CONFIG_FILE).write_text(json.dumps(table, indent=2) + "\n")
    replace_directory(partial, directory)


def _link(file: Path, link: Path) -> None:
    """Make a hard link, which outlives the file, or, on another file system, a symbolic one."""
    try:
        link.hardlink_to(file)
    except OSError:
        link.symlink_to(file)


def overwrite_config(directory: Path, overrides: Mapping[str, Any]) -> None:
    """Put fields into config.json of a checkpoint that was written for this run. Raises as `write_overridden`."""
    atomic_write(
        directory / CONFIG_FILE, json.dumps(with_overrides(read_config(directory), overrides), indent=2) + "\n"
    )


def read_config(path: Path) -> dict[str, Any]:
    """The content of config.json of a checkpoint. Raises OSError, and ConfigError if it is not a JSON object."""
    try:
        table = json.loads((path / CONFIG_FILE).read_text())
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path / CONFIG_FILE} is not JSON: {str(error)[:120]}; download it again") from None
    if not isinstance(table, dict):
        raise ConfigError(f"{path / CONFIG_FILE} is {type(table).__name__}, not a JSON object; download it again")
    return table
