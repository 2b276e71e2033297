"""A LoRA adapter as the start of a run: its files are checked, and it is merged into its base model."""

import importlib
import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file

from flowrt.cli import main
from flowrt.engines.hf import load_model, load_tokenizer, save_model
from flowrt.engines.options import LoraOptions
from flowrt.engines.tiny_model import build_model, wrap_tokenizer
from flowrt.engines.training.lora import add_adapters, merged_start, write_adapters
from flowrt.errors import ConfigError
from flowrt.launcher.doctor.model_shape import read_shape, shape_of
from flowrt.launcher.model_check import check_model, write_models
from flowrt.launcher.resume import with_own_models
from flowrt.launcher.start_models import merge_starts
from flowrt.recipes.config import RunConfig
from flowrt.recipes.config_io import parse
from flowrt.recipes.model_files import base_model_dir, check_model_files, tokenizer_dir
from flowrt.recipes.run_dir import has_adapters_to_merge, model_dir, reference_model_dir
from flowrt.recipes.tasks.arithmetic import Arithmetic

TOKENS = torch.tensor([[3, 4, 5, 6, 7, 8, 9]])


@pytest.fixture
def base(tmp_path: Path) -> Path:
    torch.set_num_threads(1)
    tokenizer = wrap_tokenizer(Arithmetic(0, 1).tokenizer())
    sizes = {"hidden_size": 32, "layers": 1, "heads": 2, "intermediate_size": 48, "max_length": 64}
    save_model(build_model(vocab_size=len(tokenizer), seed=1, **sizes), tokenizer, tmp_path / "base")
    return tmp_path / "base"


@pytest.fixture
def adapter(base: Path, tmp_path: Path) -> Path:
    model = add_adapters(load_model(base), LoraOptions(rank=2))
    torch.manual_seed(0)
    tensors = {name: 0.3 * torch.randn_like(parameter) for name, parameter in model.named_parameters()}
    write_adapters(model, tensors, base, tmp_path / "adapter")
    return tmp_path / "adapter"


def logits(path: Path) -> torch.Tensor:
    with torch.no_grad():
        result: torch.Tensor = load_model(path)(input_ids=TOKENS).logits
    return result


def config(model: Path, run_dir: Path, *flags: str) -> RunConfig:
    run_dir.mkdir(exist_ok=True)
    return parse(["arithmetic", "--model", str(model), "--run-dir", str(run_dir), *flags])


def change(adapter: Path, **values: Any) -> None:
    path = adapter / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_the_run_starts_from_the_merged_model(base: Path, adapter: Path, tmp_path: Path) -> None:
    run = config(adapter, tmp_path / "run")
    assert has_adapters_to_merge(run)
    merge_starts(run)
    assert model_dir(run) == reference_model_dir(run) == tmp_path / "run" / "model"
    assert not has_adapters_to_merge(run)
    check_model(run)
    assert (logits(model_dir(run)) - logits(base)).abs().max() > 0.01
    whole = peft.PeftModel.from_pretrained(load_model(base), str(adapter))
    with torch.no_grad():
        torch.testing.assert_close(logits(model_dir(run)), whole(input_ids=TOKENS).logits, atol=1e-5, rtol=1e-5)
    assert shape_of(run) == read_shape(base)


def test_a_reference_may_be_an_adapter_too(base: Path, adapter: Path, tmp_path: Path) -> None:
    run = config(base, tmp_path / "run", "--algorithm.kl.coef", "0.1", "--reference.model", str(adapter))
    assert has_adapters_to_merge(run)
    merge_starts(run)
    assert (model_dir(run), reference_model_dir(run)) == (base, tmp_path / "run" / "model-reference")
    check_model(run)


def test_weights_next_to_an_adapter_are_its_base(base: Path, adapter: Path, tmp_path: Path) -> None:
    """As for transformers, whatever base_model_name_or_path says."""
    run = config(adapter, tmp_path / "run")
    merge_starts(run)
    both = Path(shutil.copytree(base, tmp_path / "both"))
    shutil.copytree(adapter, both, dirs_exist_ok=True)
    change(both, base_model_name_or_path="/nowhere")
    assert torch.equal(logits(both), logits(base)), "an engine never applies an adapter by itself"
    other = config(both, tmp_path / "other")
    merge_starts(other)
    assert torch.equal(logits(model_dir(other)), logits(model_dir(run)))
    (both / "adapter_model.safetensors").unlink()  # a merged model with a file that was left
    left = config(both, tmp_path / "left")
    assert not has_adapters_to_merge(left)
    assert torch.equal(logits(model_dir(left)), logits(base))


def test_the_base_model_is_found_from_the_directory_of_the_adapter(base: Path, adapter: Path) -> None:
    change(adapter, base_model_name_or_path="../base")
    assert base_model_dir(adapter).resolve() == base
    assert tokenizer_dir(adapter).resolve() == base
    shutil.copyfile(base / "tokenizer.json", adapter / "tokenizer.json")
    assert tokenizer_dir(adapter) == adapter
    check_model_files(adapter, 8)


def test_data_check_reads_the_base_model(adapter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"{n}+1=", "answer": str(n + 1)}) + "\n" for n in range(9)))
    flags = ["--data", str(rows), "--data.eval-prompts", "0", "--rollout.max-new-tokens", "8"]
    assert main(["data", "check", "--model", str(adapter), *flags]) == 0
    assert "rows          9: 9 to train on" in capsys.readouterr().out


@pytest.mark.parametrize("start", ["adapter", "base"])
def test_a_start_with_overrides_survives_a_resume_without_its_source(
    base: Path, adapter: Path, tmp_path: Path, start: str
) -> None:
    yarn = json.dumps({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}})
    first = config({"adapter": adapter, "base": base}[start], tmp_path / "run", "--model-overrides", yarn)
    merge_starts(first)
    write_models(first)
    before = logits(model_dir(first))
    shutil.rmtree(adapter)
    shutil.rmtree(base)
    for _ in range(2):
        again = with_own_models(first, tmp_path / "run")
        merge_starts(again)
        write_models(again)
        assert torch.equal(logits(model_dir(again)), before)


def lose_a_tensor(adapter: Path) -> None:
    tensors = load_file(adapter / "adapter_model.safetensors")
    tensors.pop(next(iter(tensors)))
    save_file(tensors, adapter / "adapter_model.safetensors")


def damage_a_tensor(adapter: Path) -> None:
    tensors = load_file(adapter / "adapter_model.safetensors")
    next(iter(tensors.values()))[0, 0] = float("nan")
    save_file(tensors, adapter / "adapter_model.safetensors", {"format": "pt"})


def rename_tensors(adapter: Path) -> None:
    tensors = load_file(adapter / "adapter_model.safetensors")
    wrong = {name: torch.zeros(5, 7) for name in tensors}
    save_file(wrong, adapter / "adapter_model.safetensors", {"format": "pt"})


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda path: change(path, base_model_name_or_path="/no/model"),
            "is of the base model /no/model, which is no mod",
        ),
        (lambda path: change(path, base_model_name_or_path=None), "names no base model: set base_model_name_or_path"),
        (lambda path: change(path, base_model_name_or_path=7), "names no base model"),
        (lambda path: change(path, peft_type="IA3"), "is of peft_type 'IA3', and only LORA adapters can be merged"),
        (lambda path: (path / "adapter_config.json").write_text("{"), "adapter_config.json is not JSON"),
        (lambda path: (path / "adapter_model.safetensors").unlink(), "has no weights in adapter_model.safetensors"),
        (
            lambda path: (path / "adapter_model.safetensors").rename(path / "adapter_model.bin"),
            "but a pickle, which is never opened here",
        ),
        (lambda path: (path / "adapter_model.safetensors").write_bytes(b"12"), "incomplete or damaged"),
        (rename_tensors, "cannot be merged into its base model"),
        (lose_a_tensor, "it lacks 1 tensors that its configuration asks for, such as base_model.model.model.layers.0"),
        (
            lambda path: change(path, target_modules=["q_proj"]),
            "12 of its tensors have no place there, such as base_model.model.model.layers.0",
        ),
        (damage_a_tensor, "adapter/adapter_model.safetensors: base_model.model.model.layers.0"),
        (lambda path: change(path, layer_replication=[[0, 1], [0, 1]]), "repeats layers of its base model (layer_repl"),
        (lambda path: change(path, alora_invocation_tokens=[3, 4]), "acts only after its invocation tokens (alora_inv"),
        (lambda path: change(path, r=3), "Error(s) in loading state_dict for PeftModelForCausalLM: size mismatch for"),
    ],
)
def test_an_adapter_that_cannot_be_merged_is_one_sentence(
    adapter: Path, tmp_path: Path, damage: Callable[[Path], object], message: str
) -> None:
    damage(adapter)
    with pytest.raises(ConfigError) as refusal:
        merge_starts(config(adapter, tmp_path / "run"))
    assert message in str(refusal.value)
    assert str(adapter) in str(refusal.value)
    assert "\n" not in str(refusal.value)
    assert not list((tmp_path / "run").iterdir())


def test_data_check_names_the_adapter_whose_base_is_absent(
    adapter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": "1+1=", "answer": "2"}) + "\n")
    change(adapter, base_model_name_or_path="/no/model")
    assert main(["data", "check", "--model", str(adapter), "--data", str(rows), "--data.eval-prompts", "0"]) == 2
    assert f"adapter {adapter} is of the base model /no/model, which is no model on" in capsys.readouterr().err


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore:.*is_gradient_checkpointing:FutureWarning")
@pytest.mark.parametrize("initial", ["pissa", "olora", "gaussian"])
def test_adapters_that_change_their_base_are_merged_as_peft_computes_them(
    base: Path, tmp_path: Path, initial: Literal["pissa", "olora", "gaussian"]
) -> None:
    """PiSSA and OLoRA subtract the first adapter from the weights of the base model."""
    options = peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=initial)
    whole = peft.get_peft_model(load_model(base), options)
    torch.manual_seed(3)
    for name, parameter in whole.named_parameters():
        if "lora_" in name:
            parameter.data += 0.3 * torch.randn_like(parameter)
    whole.save_pretrained(str(tmp_path / "adapter"))
    change(tmp_path / "adapter", base_model_name_or_path=str(base))
    with torch.no_grad():
        expected = whole(input_ids=TOKENS).logits
    run = config(tmp_path / "adapter", tmp_path / "run")
    merge_starts(run)
    torch.testing.assert_close(logits(model_dir(run)), expected, atol=1e-4, rtol=1e-4)


def test_an_adapter_that_no_weights_are_equal_to_is_refused(
    adapter: Path, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of whatever kind: the logits before and after merging are compared."""
    monkeypatch.setattr(peft.PeftModel, "merge_and_unload", lambda self: self.unload(), raising=False)
    with pytest.raises(ConfigError, match="the merged model computes other logits than the model with the adapter"):
        merged_start(load_model(base), adapter)


@pytest.mark.parametrize(
    "options",
    [
        {"target_modules": ["lm_head", "q_proj"]},
        {"target_modules": ["embed_tokens"]},
        {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    ],
    ids=str,
)
def test_an_adapter_of_one_of_two_tied_layers_is_refused(base: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    """Merged weights hold one matrix for both, so the merged model would be another one."""
    tied = load_model(base)
    tied.config.tie_word_embeddings = True
    tied.tie_weights()
    save_model(tied, load_tokenizer(base), tmp_path / "tied")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft warns of it
        adapted = peft.get_peft_model(load_model(tmp_path / "tied"), peft.LoraConfig(task_type="CAUSAL_LM", **options))
        adapted.save_pretrained(tmp_path / "other")
    with pytest.raises(ConfigError, match=r"it changes the (input|output) embeddings, which share their weights"):
        merge_starts(config(tmp_path / "other", tmp_path / "run"))
    assert not list((tmp_path / "run").iterdir())


def test_an_adapter_of_an_adapter_is_refused(adapter: Path, tmp_path: Path) -> None:
    second = Path(shutil.copytree(adapter, tmp_path / "second"))
    change(second, base_model_name_or_path=str(adapter))
    with pytest.raises(ConfigError, match=r"is of the base model .*adapter, which is no model on this host"):
        check_model_files(second, 8)


def test_without_peft_the_extra_is_named(adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.import_module

    def without_peft(name: str, package: str | None = None) -> ModuleType:
        if name.partition(".")[0] == "peft":
            raise ImportError("No module named 'peft'")
        return real(name, package)

    monkeypatch.setattr(importlib, "import_module", without_peft)
    with pytest.raises(ConfigError, match=r"needs peft: pip install 'flowrt\[lora\]'"):
        merge_starts(config(adapter, tmp_path / "run"))


@pytest.mark.parametrize(
    ("targets", "message"), [("q_prj", "did you mean 'q_proj'"), ("q_proj,mlp", "name its layers (down_proj")]
)
def test_targets_are_checked_before_the_run_starts(base: Path, tmp_path: Path, targets: str, message: str) -> None:
    lora = ["--trainer.engine", "fsdp", "--trainer.lora.rank", "2", "--trainer.lora.targets", targets]
    with pytest.raises(ConfigError) as refusal:
        check_model(config(base, tmp_path / "run", *lora))
    assert message in str(refusal.value)
