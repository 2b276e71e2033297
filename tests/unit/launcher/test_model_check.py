"""Invalid models, and models too small for the prompts, are found without loading them."""

import dataclasses
import json
import re
import shutil
import struct
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from flowrt.cli import main
from flowrt.engines.hf import load_model, load_tokenizer
from flowrt.engines.tiny_model import build_model, wrap_tokenizer
from flowrt.errors import EXIT_BAD_INPUT, ConfigError, EngineError
from flowrt.launcher.model_check import (
    check_finite,
    check_model,
    check_reference,
    check_sampling,
    check_weights,
    write_models,
)
from flowrt.launcher.prompt_check import check_prompts
from flowrt.recipes.config import RunConfig
from flowrt.recipes.config_io import parse
from flowrt.recipes.model_files import INDEX, check_model_files
from flowrt.recipes.prompt_limits import PromptLimits
from flowrt.recipes.tasks.arithmetic import Arithmetic
from flowrt.recipes.tasks.base import Example, PromptBlock, blocks
from tests.decoders import DECODERS

WEIGHTS = "model.safetensors"
POSITIONS = 64
HEAD, EMBEDDINGS = "lm_head.weight", "model.embed_tokens.weight"


@pytest.fixture(scope="module")
def intact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with its tokenizer."""
    path = tmp_path_factory.mktemp("models") / "intact"
    tokenizer = wrap_tokenizer(Arithmetic(0, 1).tokenizer())
    sizes = {"hidden_size": 32, "layers": 2, "heads": 2, "intermediate_size": 48, "max_length": POSITIONS}
    build_model(vocab_size=len(tokenizer), seed=1, **sizes).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture
def model(intact: Path, tmp_path: Path) -> Path:
    """A copy of the intact model, to be damaged."""
    return Path(shutil.copytree(intact, tmp_path / "model"))


def edit(path: Path, **changes: object) -> None:
    """Change a JSON file."""
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def change_weights(model: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(model / WEIGHTS)
    change(tensors)
    save_file(tensors, model / WEIGHTS, metadata={"format": "pt"})


def narrow(tensors: dict[str, torch.Tensor], dtype: torch.dtype) -> None:
    tensors[EMBEDDINGS] = (tensors[EMBEDDINGS] * 100).clamp(-100, 100).to(dtype)


def cut(path: Path, size: int) -> None:
    path.write_bytes(path.read_bytes()[:size])


def with_header(model: Path, text: bytes, data: bytes = b"") -> None:
    (model / WEIGHTS).write_bytes(struct.pack("<Q", len(text)) + text + data)


# ---- model files


def test_an_intact_model_passes(intact: Path) -> None:
    check_model_files(intact, POSITIONS - 1)
    assert check_weights(intact).model_type == "qwen3"
    check_finite(intact)


def replace_by_directory(file: Path) -> None:
    file.unlink()
    file.mkdir()


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "broken config.json": (lambda model: cut(model / "config.json", 50), "config.json is not JSON"),
    "config.json is a list": (
        lambda model: (model / "config.json").write_text("[]"),
        "config.json is list, not",
    ),
    "config.json is nested": (lambda model: (model / "config.json").write_text("[" * 100_000), "nested too deeply"),
    "config.json is a directory": (
        lambda model: replace_by_directory(model / "config.json"),
        "has no config.json",
    ),
    "broken generation_config.json": (
        lambda model: (model / "generation_config.json").write_text("{"),
        "generation_config.json is not JSON",
    ),
    "broken tokenizer": (lambda model: cut(model / "tokenizer.json", 99), "tokenizer.json is not JSON"),
    "empty weights": (lambda model: cut(model / WEIGHTS, 0), "of 0 bytes are incomplete or damaged"),
    "weights cut": (lambda model: cut(model / WEIGHTS, 9000), "of 9,000 bytes are incomplete or damaged"),
    "random bytes": (lambda model: (model / WEIGHTS).write_bytes(b"\xff" * 5000), "incomplete or damaged"),
    "header without tensors": (lambda model: with_header(model, b"{}"), "has no tensor in its weights"),
    "wrong size of a tensor": (
        lambda model: with_header(
            model, json.dumps({"w": {"dtype": "F32", "shape": [3], "data_offsets": [0, 4]}}).encode(), bytes(4)
        ),
        "incomplete or damaged .*invalid shape, data type, or offset for tensor",
    ),
    "a file of the index is missing": (
        lambda model: (model / INDEX).write_text('{"weight_map": {"w": "model-2.safetensors"}}'),
        "has no model-2.safetensors, which",
    ),
    "a tensor of the index is missing": (
        lambda model: (model / INDEX).write_text(json.dumps({"weight_map": {"w": WEIGHTS}})),
        "model.safetensors has no w, which",
    ),
    "an index without a map": (lambda model: (model / INDEX).write_text("{}"), "has no weight_map"),
}


@pytest.mark.parametrize(("damage", "message"), DAMAGE.values(), ids=DAMAGE)
def test_damaged_files_are_named(model: Path, damage: Callable[[Path], object], message: str) -> None:
    damage(model)
    with pytest.raises(ConfigError, match=message):
        check_model_files(model, 16)


YARN = {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": POSITIONS}}


def test_scaled_positions_are_the_limit_of_the_response(intact: Path) -> None:
    check_model_files(intact, 4 * POSITIONS - 1, YARN)
    with pytest.raises(ConfigError, match=rf"max_new_tokens is {4 * POSITIONS}, and model .* has {4 * POSITIONS} pos"):
        check_model_files(intact, 4 * POSITIONS, YARN)


def test_an_override_without_effect_is_refused(intact: Path, tmp_path: Path) -> None:
    flags = ["custom", "--model", str(intact), "--reward", "exact", "--run-dir", str(tmp_path / "run")]
    flags += ["--rollout.max-new-tokens", "16"]
    with pytest.raises(ConfigError, match=r"model_overrides has 'max_positions', which .* does not have"):
        write_models(parse([*flags, "--model-overrides", '{"max_positions": 128}']))
    assert not (tmp_path / "run").exists()
    write_models(parse([*flags, "--model-overrides", json.dumps(YARN)]))
    assert check_weights(tmp_path / "run" / "model").rope_parameters["rope_type"] == "yarn"
    with pytest.raises(ConfigError, match=r"model_overrides is .*, which changes nothing with model ''; set model"):
        parse(["--model-overrides", json.dumps(YARN)])


@pytest.mark.parametrize("is_file", [True, False])
def test_a_gguf_file_is_named_with_the_way_out(tmp_path: Path, is_file: bool) -> None:
    file = tmp_path / "model-Q4_K_M.gguf"
    file.write_bytes(b"GGUF")
    with pytest.raises(ConfigError, match=r"is in GGUF, .* gguf_file='model-Q4_K_M.gguf'\).save_pretrained"):
        check_model_files(file if is_file else tmp_path, 16)


def test_a_file_is_no_model_and_gguf_is_known_by_its_content(tmp_path: Path) -> None:
    for name in ("MODEL.GGUF", "model", "model.bin"):
        file = tmp_path / name
        file.write_bytes(b"GGUF\3\0\0\0")
        with pytest.raises(ConfigError, match=rf"{name} is in GGUF, .* gguf_file='{name}'"):
            check_model_files(file, 16)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"\0" * 8)
    with pytest.raises(ConfigError, match=r"safetensors is a file; give its directory, with config\.json"):
        check_model_files(weights, 16)


def test_responses_longer_than_the_model_positions_are_refused(intact: Path) -> None:
    with pytest.raises(ConfigError, match=rf"max_new_tokens is {POSITIONS}, and model .* has {POSITIONS} positions"):
        parse(["--model", str(intact), "--rollout.max-new-tokens", str(POSITIONS)])
    with pytest.raises(ConfigError, match=r"max_new_tokens is 128, and build.max_length, .*, is 128"):
        parse(["--rollout.max-new-tokens", "128"])


# ---- loading with transformers


MISMATCHES: dict[str, tuple[Callable[[Path], object], str]] = {
    "unknown type": (
        lambda model: edit(model / "config.json", model_type="qwen99"),
        "no causal LM that transformers can load: .* model type `qwen99`",
    ),
    "no type": (
        lambda model: (model / "config.json").write_text("{}"),
        "no causal LM that transformers can load: .*model_type",
    ),
    "no causal LM": (
        lambda model: (model / "config.json").write_text('{"model_type": "vit"}'),
        "no causal LM that transformers can load",
    ),
    "9 layers for 2": (
        lambda model: edit(model / "config.json", num_hidden_layers=9),
        r"`num_hidden_layers` \(9\) must be equal to the number of `layer_types` \(2\)",
    ),
    "4 layers for 2": (
        lambda model: edit(model / "config.json", num_hidden_layers=4, layer_types=["full_attention"] * 4),
        r"lacks 22 tensors that config.json asks for: model.layers.2.input_layernorm.weight, ",
    ),
    "another width": (
        lambda model: edit(model / "config.json", intermediate_size=64),
        r"mlp.down_proj.weight \(and 5 others\) has shape \[32, 48\], and config.json asks for \[32, 64\]",
    ),
    "another vocabulary": (
        lambda model: edit(model / "config.json", vocab_size=999),
        r"model.embed_tokens.weight has shape \[17, 32\], and config.json asks for \[999, 32\]",
    ),
    "a tensor is missing": (
        lambda model: change_weights(model, lambda tensors: tensors.pop("model.norm.weight")),
        "lacks 1 tensors that config.json asks for: model.norm.weight;",
    ),
    "a width that is not a number": (
        lambda model: edit(model / "config.json", hidden_size="wide"),
        "no causal LM that transformers can load: ",
    ),
    "custom code": (
        lambda model: edit(model / "config.json", model_type="mine", auto_map={"AutoConfig": "mine.Mine"}),
        "brings its own code \\(auto_map in its configuration\\), which is never run here; use a checkpoint of ",
    ),
    "a head of its own in a tied model": (
        lambda model: change_weights(model, lambda tensors: tensors.update({HEAD: tensors[EMBEDDINGS] + 1})),
        f"has a {HEAD} that differs from its {EMBEDDINGS}, and .* ties them; set tie_word_embeddings to false",
    ),
    "no layers": (
        lambda model: edit(model / "config.json", num_hidden_layers=0, layer_types=[]),
        "has num_hidden_layers 0 in its config.json",
    ),
    "no heads": (lambda model: edit(model / "config.json", num_attention_heads=0), "has num_attention_heads 0 in"),
    "no tokens": (lambda model: edit(model / "config.json", vocab_size=0), "has vocab_size 0 in its config.json"),
    "a negative width": (lambda model: edit(model / "config.json", hidden_size=-32), "has hidden_size -32 in its"),
    "an end token that is text": (
        lambda model: edit(model / "config.json", eos_token_id="2"),
        "no causal LM that transformers can load: Validation error for field 'eos_token_id': .*",
    ),
    "an activation that transformers lacks": (
        lambda model: edit(model / "config.json", hidden_act="nope"),
        "no causal LM that transformers can load: it does not know 'nope'",
    ),
    "integer weights": (
        lambda model: change_weights(model, lambda tensors: narrow(tensors, torch.int8)),
        f"{EMBEDDINGS} is of integers or of numbers of 8 bits, as quantised weights are, which cannot be trained",
    ),
    "weights of 8 bits": (
        lambda model: change_weights(model, lambda tensors: narrow(tensors, torch.float8_e4m3fn)),
        f"{EMBEDDINGS} is of integers or of numbers of 8 bits, as quantised weights are, which cannot be trained",
    ),
} | {
    f"quantised, {method}": (
        lambda model, method=method: edit(model / "config.json", quantization_config={"quant_method": method}),
        f"is quantised \\({method}\\): its config.json has quantization_config, and quantised weights cannot be ",
    )
    for method in ("fp8", "mxfp4", "bitsandbytes", "gptq", "awq", "compressed-tensors", "bitnet", "nope")
}


@pytest.mark.parametrize(("mismatch", "message"), MISMATCHES.values(), ids=MISMATCHES)
def test_weights_that_do_not_match_the_config_are_named(
    model: Path, mismatch: Callable[[Path], object], message: str
) -> None:
    mismatch(model)
    check_model_files(model, 16)
    with pytest.raises(ConfigError, match=f"^model {model} .*{message}|^model {model}: .*{message}") as raised:
        check_weights(model)
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) < 400


def data_check(model: Path, directory: Path, *flags: str) -> int:
    rows = directory / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"{n}+1=", "answer": str(n + 1)}) + "\n" for n in range(9)))
    common = ["--data", str(rows), "--data.eval-prompts", "0", "--rollout.max-new-tokens", "8"]
    return main(["data", "check", "--model", str(model), *common, *flags])


@pytest.mark.parametrize("name", MISMATCHES)
def test_data_check_refuses_what_a_run_refuses(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    mismatch, message = MISMATCHES[name]
    mismatch(model)
    assert data_check(model, tmp_path) == EXIT_BAD_INPUT
    assert re.search(message, capsys.readouterr().err)


def test_data_check_refuses_exporters_that_a_run_refuses(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert data_check(model, tmp_path, "--exporters", "tensorbord") == EXIT_BAD_INPUT
    assert "exporters has 'tensorbord', which is neither tensorboard" in capsys.readouterr().err


def test_code_of_a_model_is_not_run_whatever_is_answered(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers asks on the terminal."""
    edit(model / "config.json", model_type="mine", auto_map={"AutoConfig": "mine.Mine"})
    (model / "mine.py").write_text(f"open({str(tmp_path / 'run')!r}, 'w')\nclass Mine: pass\n")
    asked: list[str] = []

    def answer(question: str = "") -> str:
        asked.append(question)
        return "y"

    monkeypatch.setattr("builtins.input", answer)
    assert data_check(model, tmp_path) == EXIT_BAD_INPUT
    edit(model / "config.json", model_type="qwen3")
    edit(model / "tokenizer_config.json", tokenizer_class="Mine", auto_map={"AutoTokenizer": ["mine.Mine", None]})
    data_check(model, tmp_path)
    assert not (tmp_path / "run").exists()
    assert not asked


def test_two_values_of_tied_weights_are_refused_wherever_the_model_is_loaded(model: Path) -> None:
    change_weights(model, lambda tensors: tensors.update({HEAD: tensors[EMBEDDINGS].clone()}))
    check_weights(model)  # stored twice, with equal values
    before = load_model(model)(input_ids=torch.tensor([[3, 4, 5]])).logits
    change_weights(model, lambda tensors: tensors[HEAD].mul_(2))
    with pytest.raises(EngineError, match=f"has a {HEAD} that differs from its {EMBEDDINGS}, and its config.json ties"):
        load_model(model)
    edit(model / "config.json", tie_word_embeddings=False)
    check_weights(model)
    untied = load_model(model)(input_ids=torch.tensor([[3, 4, 5]])).logits
    torch.testing.assert_close(untied, 2 * before)


def test_tensors_that_the_model_does_not_use_are_named(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def add(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.0.self_attn.q_proj.bias"] = torch.ones(32)
        tensors["model.layers.7.mlp.up_proj.weight"] = torch.ones(48, 32)

    change_weights(model, add)
    reports: list[str] = []
    check_weights(model, reports.append)
    names = "model.layers.0.self_attn.q_proj.bias, model.layers.7.mlp.up_proj.weight"
    assert reports == [
        f"model {model}: 2 tensors of its files are not used, as its config.json has no place for them: {names}"
    ]
    assert data_check(model, tmp_path) == 0
    assert reports[0] in capsys.readouterr().out


def test_an_end_token_beyond_the_vocabulary_is_refused_by_data_check(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = load_tokenizer(model)
    tokenizer.add_special_tokens({"eos_token": "<new>"})
    tokenizer.save_pretrained(model)
    assert data_check(model, tmp_path) == EXIT_BAD_INPUT
    assert "the tokenizer's end token is 17, and vocab_size 17; they do not match" in capsys.readouterr().err


def test_a_missing_tokenizer_is_one_whole_sentence(model: Path) -> None:
    (model / "tokenizer.json").unlink()
    with pytest.raises(EngineError, match=r"no tokenizer.json, and no other file of a tokenizer .*; is it complete\?$"):
        load_tokenizer(model)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"hidden_act": "nope"}, "with model_overrides is no causal LM .*: it does not know 'nope'"),
        ({"intermediate_size": 64}, "with model_overrides: .* has shape .*, and config.json asks for"),
        ({"vocab_size": 99}, "model_overrides has 'vocab_size', which says what the weights are"),
        ({"dtype": "float16"}, "model_overrides has 'dtype', which says what the weights are"),
    ],
    ids=str,
)
def test_a_wrong_override_is_named_as_the_user_gave_it(
    intact: Path, tmp_path: Path, overrides: dict[str, Any], message: str
) -> None:
    flags = ["arithmetic", "--model", str(intact), "--run-dir", str(tmp_path / "run")]
    with pytest.raises(ConfigError, match=message) as refusal:
        check_model(parse([*flags, "--model-overrides", json.dumps(overrides)]))
    assert str(tmp_path / "run") not in str(refusal.value)


@pytest.mark.parametrize("name", DECODERS)
def test_every_loadable_decoder_passes(tmp_path: Path, name: str) -> None:
    kind, config = DECODERS[name]
    kind(config).save_pretrained(tmp_path)
    check_weights(tmp_path)
    load_model(tmp_path)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_non_finite_weight_is_named(model: Path, value: float, dtype: torch.dtype) -> None:
    def damage(tensors: dict[str, torch.Tensor]) -> None:
        for name in tensors:
            tensors[name] = tensors[name].to(dtype)
        tensors["model.layers.1.mlp.up_proj.weight"][3, 3] = value

    change_weights(model, damage)
    with pytest.raises(ConfigError, match=rf"model.safetensors: model.layers.1.mlp.up_proj.weight contains {value}"):
        check_finite(model)


# ---- prompts


def test_a_prompt_outside_the_vocabulary_is_named() -> None:
    words = Tokenizer(WordLevel({"<eos>": 0, "known": 1}, unk_token="<unk>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>")
    limits = PromptLimits(positions=9, vocab_size=2, max_new_tokens=4)
    with pytest.raises(ConfigError, match=r"line 2: the tokenizer of the model cannot take the prompt: .*WordLevel"):
        check_prompts(prompts("known", "new"), tokenizer, limits=limits, what="the model")


def prompts(*texts: str) -> Iterator[PromptBlock]:
    return blocks(Example(text, "", "", f"data file d, line {line}") for line, text in enumerate(texts, 1))


@pytest.mark.parametrize(
    ("text", "limits", "message"),
    [
        (
            "1" * 50,
            {},
            "line 2: the prompt has 50 tokens, and with rollout.max_new_tokens 16 more than the 64",
        ),
        ("1" * 50, {"positions": None}, ""),
        ("1" * 50, {"positions": 0}, "line 1: the prompt has 3 tokens, and with .* more than the 0 positions"),
        ("1" * 48, {}, ""),
        ("1" * 48, {"max_new_tokens": 17}, "line 2: the prompt has 48 tokens"),
        ("", {}, "line 2: the prompt has no token"),
        ("word", {}, ""),
        ("=", {"vocab_size": 14}, "line 2: the prompt has token 14, and the model a vocab_size of 14"),
        ("1", {"vocab_size": 1}, "end token is 1, and vocab_size 1; they do not match"),
    ],
)
def test_prompts_that_do_not_fit_the_model_are_named(text: str, limits: dict[str, Any], message: str) -> None:
    tokenizer = wrap_tokenizer(Arithmetic(0, 1).tokenizer())
    all_limits = {"positions": 64, "vocab_size": len(tokenizer), "max_new_tokens": 16} | limits
    if not message:
        check_prompts(prompts("1+1", text), tokenizer, what="the model", limits=PromptLimits(**all_limits))
        return
    with pytest.raises(ConfigError, match=message):
        check_prompts(prompts("1+1", text), tokenizer, what="the model", limits=PromptLimits(**all_limits))


@pytest.mark.parametrize(
    ("flags", "refused"),
    [(["16"], False), (["17"], True), (["17", "--rollout.top-p", "0.9"], False), (["0"], False)],
)
def test_top_k_that_excludes_no_token_is_refused(flags: list[str], refused: bool) -> None:
    config = parse(["arithmetic", "--rollout.top-k", *flags])
    expected = pytest.raises(ConfigError, match="no token would be excluded") if refused else nullcontext()
    with expected:
        check_sampling(config, 17, "model m")


# ---- the reference


@pytest.mark.slow
def test_a_reference_needs_the_vocabulary_of_the_trained_model(intact: Path, model: Path) -> None:
    def config(*flags: str) -> RunConfig:
        start = dataclasses.replace(parse(list(flags)), model=str(intact))
        return dataclasses.replace(start, reference=dataclasses.replace(start.reference, model=str(model)))

    check_reference(config())
    check_reference(config("--reference.refresh", "2"))
    tokenizer = wrap_tokenizer(Arithmetic(0, 1).tokenizer())
    other = {"hidden_size": 16, "layers": 1, "heads": 2, "intermediate_size": 48, "max_length": POSITIONS}
    build_model(vocab_size=len(tokenizer), seed=1, **other).save_pretrained(model)
    check_reference(config())
    with pytest.raises(ConfigError, match="has other parameters than the trained model"):
        check_reference(config("--reference.refresh", "2"))
    tokenizer.add_tokens(["another"])
    tokenizer.save_pretrained(model)
    with pytest.raises(ConfigError, match=r"has another vocabulary than the trained model .*: token 'another'"):
        check_reference(config())
    build_model(vocab_size=len(tokenizer), seed=1, **other).save_pretrained(model)
    with pytest.raises(ConfigError, match=f"has a vocab_size of {len(tokenizer)}, and the trained model"):
        check_reference(config())
    cut(model / WEIGHTS, 40)
    with pytest.raises(ConfigError):
        check_reference(config())
