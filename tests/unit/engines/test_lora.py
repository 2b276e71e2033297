"""Adapters: fresh ones change nothing, merging gives what peft's own merge gives, and both over many architectures."""

import copy
import dataclasses
import re
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    FalconConfig,
    Gemma3TextConfig,
    GPT2Config,
    Llama4TextConfig,
    LlamaConfig,
    MixtralConfig,
    OlmoeConfig,
    Phi3Config,
    PhiConfig,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from flowrt.engines.hf import named_parameters
from flowrt.engines.options import LoraOptions
from flowrt.engines.tiny_model import build_model
from flowrt.engines.training.lora import add_adapters, merge_adapters, merged_start, write_adapters
from flowrt.errors import ConfigError
from flowrt.recipes.config_io import parse
from flowrt.roles.engine_setup import rollout_engine
from flowrt.transport.weights.snapshot import Snapshot

LORA = LoraOptions(rank=4, alpha=6.0)
TOKENS = torch.randint(2, 24, (2, 9), generator=torch.Generator().manual_seed(0))
COMMON: dict[str, Any] = {
    "vocab_size": 24,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
EXPERTS: dict[str, Any] = COMMON | {"moe_intermediate_size": 16, "num_experts_per_tok": 2}
LATENT: dict[str, Any] = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4}
FAMILIES: dict[str, Callable[[], Any]] = {
    "llama": lambda: LlamaConfig(**COMMON, tie_word_embeddings=False),
    "qwen3": lambda: Qwen3Config(**COMMON, head_dim=8, tie_word_embeddings=True),
    "gpt2": lambda: GPT2Config(
        vocab_size=24, n_embd=32, n_layer=2, n_head=4, n_positions=64, bos_token_id=1, eos_token_id=1
    ),
    "gemma3": lambda: Gemma3TextConfig(**COMMON, head_dim=8),
    "phi": lambda: PhiConfig(**COMMON),
    "phi3": lambda: Phi3Config(**COMMON),
    "falcon": lambda: FalconConfig(
        vocab_size=24, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, bos_token_id=1, eos_token_id=1
    ),
    "mixtral": lambda: MixtralConfig(**COMMON, num_local_experts=4),
    "olmoe": lambda: OlmoeConfig(**COMMON, num_experts=4, num_experts_per_tok=2),
    "qwen2_moe": lambda: Qwen2MoeConfig(**EXPERTS, num_experts=4, shared_expert_intermediate_size=16),
    "qwen3_moe": lambda: Qwen3MoeConfig(**EXPERTS, head_dim=8, num_experts=4),
    "deepseek_v3": lambda: DeepseekV3Config(
        **EXPERTS | LATENT | {"num_key_value_heads": 4}, v_head_dim=8, n_routed_experts=4, n_group=1, topk_group=1
    ),
    "llama4": lambda: Llama4TextConfig(**COMMON, head_dim=8, num_local_experts=4, intermediate_size_mlp=48),
}
EXPERT_FAMILIES = ("mixtral", "olmoe", "qwen3_moe")
"""Families whose experts peft adapts with target all-linear: two adapters, nested, for each layer."""


def model() -> Any:
    return build_model(
        vocab_size=24, hidden_size=64, layers=2, heads=4, intermediate_size=96, max_length=64, seed=1
    ).eval()


def family(name: str, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(1)
    return AutoModelForCausalLM.from_config(FAMILIES[name]()).to(dtype).eval()


def trained(adapted_model: Any, seed: int) -> Any:
    """Set the adapters to random values; new ones are initialised to have no effect."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in named_parameters(adapted_model).values():
            tensor.copy_(0.1 * torch.randn(tensor.shape, generator=generator))
    return adapted_model


def adapted(seed: int) -> Any:
    return trained(add_adapters(model(), LORA), seed)


def parameters(some_model: Any) -> dict[str, torch.Tensor]:
    return {name: parameter.detach() for name, parameter in some_model.named_parameters()}


def logits(adapted_model: Any) -> torch.Tensor:
    with torch.no_grad():
        result: torch.Tensor = adapted_model(input_ids=TOKENS).logits
    return result


def test_fresh_adapters_change_nothing() -> None:
    assert torch.equal(logits(add_adapters(model(), LORA)), logits(model()))


def test_only_adapter_parameters_are_trained() -> None:
    names = named_parameters(adapted(0)).keys()
    assert names
    assert all(".lora_" in name for name in names)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FAMILIES)
def test_merging_gives_the_start_weights_before_training_and_those_of_peft_after(
    name: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    """And the written adapters give, on the start model, the logits and the merged weights of the trained model."""
    plain = family(name, dtype)
    start = {weight: tensor.clone() for weight, tensor in parameters(plain).items()}
    adapted_model = add_adapters(copy.deepcopy(plain), LORA)
    fresh = merge_adapters(adapted_model, parameters(adapted_model))
    assert list(fresh) == list(start), "buckets are filled in this order"
    assert all(torch.equal(fresh[weight], start[weight]) for weight in start)
    trained(adapted_model, seed=2)
    merged = merge_adapters(adapted_model, parameters(adapted_model))
    assert sum(not torch.equal(merged[weight], start[weight]) for weight in start) >= 6
    experts = [weight for weight in start if "experts" in weight and start[weight].dim() == 3]
    assert all(not torch.equal(merged[expert], start[expert]) for expert in experts if name in EXPERT_FAMILIES)
    write_adapters(adapted_model, parameters(adapted_model), Path("/base"), tmp_path / "adapter")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loaded = peft.PeftModel.from_pretrained(plain, str(tmp_path / "adapter"), autocast_adapter_dtype=False)
    assert torch.equal(logits(loaded), logits(adapted_model))
    of_peft = parameters(loaded.merge_and_unload())
    assert all(torch.equal(merged[weight], of_peft[weight]) for weight in start)
    if dtype == torch.float32:
        torch.testing.assert_close(logits(plain), logits(adapted_model), atol=1e-5, rtol=1e-5)


def test_an_adapter_starts_a_run_as_its_base_model_with_the_adapter_merged(tmp_path: Path) -> None:
    adapted_model = adapted(0)
    write_adapters(adapted_model, parameters(adapted_model), Path("/base"), tmp_path / "adapter")
    start = merged_start(model(), tmp_path / "adapter")
    torch.testing.assert_close(logits(start), logits(adapted_model), atol=1e-5, rtol=1e-5)
    other = family("gpt2")
    with pytest.raises(ConfigError, match=r"the adapter .* cannot be merged into its base model"):
        merged_start(other, tmp_path / "adapter")


def test_a_model_with_adapters_is_restored_from_a_snapshot_of_adapters() -> None:
    sender, receiver = adapted(1), adapted(2)
    snapshot = Snapshot.take(1, named_parameters(sender))
    snapshot.restore(named_parameters(receiver))
    assert torch.equal(logits(receiver), logits(sender))
    assert sum(snapshot.bucket_bytes()) < 0.3 * sum(p.nbytes for p in model().parameters())


@pytest.mark.parametrize(
    ("name", "targets", "message"),
    [
        ("qwen3", "nowhere", "trainer.lora.targets is 'nowhere', and the model has no module 'nowhere'; there is"),
        ("qwen3", "q_prj,v_proj", "the model has no module 'q_prj'; did you mean 'q_proj'?"),
        ("qwen3", "q_proj,,v_prj", "the model has no module 'v_prj'; did you mean 'v_proj'?"),
        ("qwen3", " , ", "trainer.lora.targets is ' , '; name layers (q_proj,v_proj), or use all-linear"),
        (
            "qwen3",
            "self_attn",
            "self_attn (Qwen3Attention) has no weights that an adapter could change; name its layers",
        ),
        ("qwen3", "q_norm", "q_norm (Qwen3RMSNorm) has no weights that an adapter could change; name linear layers"),
        (
            "qwen3",
            "q_proj,mlp",
            "mlp (Qwen3MLP) has no weights that an adapter could change; name its layers (down_proj",
        ),
        ("qwen3", "lm_head", "lm_head shares its weights with another layer (tie_word_embeddings)"),
        ("qwen3", "embed_tokens", "model.embed_tokens shares its weights with another layer"),
        ("qwen3", ".*nowhere", "a regular expression that matches the whole name of no module; a name is like model."),
        ("qwen3", "(q_proj", "which is no regular expression: missing ), unterminated subpattern"),
        ("gpt2", "q_proj", "the model has no module 'q_proj'; did you mean 'c_proj'?"),
        ("qwen3_moe", "gate_proj", "which peft cannot adapt: Cannot convert PEFT target(s) gate_proj without also"),
        ("qwen3_moe", "q_proj,nowhere", "the model has no module 'nowhere'"),
        ("llama4", "router", "router (Llama4Router) has no weights that an adapter could change"),
    ],
)
def test_targets_that_cannot_be_adapted_are_refused_by_name(name: str, targets: str, message: str) -> None:
    with torch.device("meta"):
        unloaded = AutoModelForCausalLM.from_config(FAMILIES[name]())
    with pytest.raises(ConfigError, match=re.escape(message)) as refusal:
        add_adapters(unloaded, LoraOptions(rank=4, targets=targets))
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("name", "targets", "changed"),
    [
        ("qwen3", r".*\.1\..*\.(q|v)_proj", ["model.layers.1.self_attn.q_proj", "model.layers.1.self_attn.v_proj"]),
        ("qwen3", "0.self_attn.q_proj, k_proj", ["0.self_attn.q_proj", "0.self_attn.k_proj", "1.self_attn.k_proj"]),
        ("llama", "lm_head", ["lm_head"]),
        ("llama", "embed_tokens", ["embed_tokens"]),
        ("qwen3_moe", "gate_proj,up_proj,down_proj", ["0.mlp.experts.gate_up_proj", "1.mlp.experts.down_proj"]),
    ],
)
def test_targets_are_names_or_a_regular_expression(name: str, targets: str, changed: list[str]) -> None:
    start = parameters(family(name))
    adapted_model = trained(add_adapters(family(name), LoraOptions(rank=2, targets=targets)), seed=1)
    merged = merge_adapters(adapted_model, parameters(adapted_model))
    moved = [weight for weight in start if not torch.equal(merged[weight], start[weight])]
    assert all(any(part in weight for weight in moved) for part in changed)
    assert name == "qwen3_moe" or len(moved) == len(changed)
    plain = family(name)
    plain.load_state_dict(merged, strict=False)
    torch.testing.assert_close(logits(plain), logits(adapted_model), atol=1e-5, rtol=1e-5)


def test_a_rank_above_that_of_every_layer_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"trainer\.lora\.rank is 65, above 64, the rank of the largest layer"):
        add_adapters(model(), LoraOptions(rank=65))
    add_adapters(model(), LoraOptions(rank=64))


def test_the_check_of_a_model_of_real_size_takes_no_memory_for_its_weights() -> None:
    """Above 7 B parameters in few layers, a vocabulary of 152k words, on the meta device."""
    config = Qwen3Config(
        vocab_size=151_936, hidden_size=8192, intermediate_size=28_672, num_hidden_layers=6, num_attention_heads=64
    )
    with torch.device("meta"):
        large = AutoModelForCausalLM.from_config(config)
    assert sum(parameter.numel() for parameter in large.parameters()) > 7e9
    assert all(parameter.device.type == "meta" for parameter in add_adapters(large, LoraOptions(rank=16)).parameters())


def test_a_worker_with_a_server_engine_refuses_adapters() -> None:
    server = ["--rollout.engine", "sglang", "--rollout.sglang.python", sys.executable]
    adapters = ["--trainer.engine", "fsdp", "--trainer.lora.rank", "4"]
    config = parse([*server, *adapters, "--trainer.lora.publish", "merged"])
    lora = dataclasses.replace(config.trainer.lora, publish="adapters")
    by_hand = dataclasses.replace(config, trainer=dataclasses.replace(config.trainer, lora=lora))
    with pytest.raises(ConfigError, match=r"use --trainer\.lora\.publish merged"):
        rollout_engine(by_hand, "rollout-0")
