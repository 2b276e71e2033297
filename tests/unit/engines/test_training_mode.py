"""A forward pass of training is a function of the tokens: no dropout, no layer dropout, no noise of a router."""

from collections.abc import Callable

import pytest
import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    OPTConfig,
    OPTForCausalLM,
    PhimoeConfig,
    PhimoeForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Starcoder2Config,
    Starcoder2ForCausalLM,
)

from flowrt.engines.hf import random_rates, set_training_mode

TOKENS = torch.arange(12).unsqueeze(0)
SIZES = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
KEYS = {"num_key_value_heads": 2, "intermediate_size": 16}


def qwen2(rate: float) -> PreTrainedModel:
    return Qwen2ForCausalLM(Qwen2Config(**SIZES, **KEYS, attention_dropout=rate))


def gpt2(rate: float) -> PreTrainedModel:
    rates = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), rate)
    return GPT2LMHeadModel(GPT2Config(vocab_size=32, n_embd=16, n_layer=1, n_head=2, **rates))


def opt(rate: float) -> PreTrainedModel:
    return OPTForCausalLM(OPTConfig(**SIZES, ffn_dim=16, word_embed_proj_dim=16, dropout=rate))


def starcoder2(rate: float) -> PreTrainedModel:
    return Starcoder2ForCausalLM(Starcoder2Config(**SIZES, **KEYS, residual_dropout=rate))


def phimoe(rate: float) -> PreTrainedModel:
    jitter = {"router_jitter_noise": float(rate), "input_jitter_noise": float(rate)}
    return PhimoeForCausalLM(PhimoeConfig(**SIZES, **KEYS, num_local_experts=4, **jitter))


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("rate", [0.5, 1])  # config.json may have an integer
@pytest.mark.parametrize("build", [qwen2, gpt2, opt, starcoder2, phimoe])
def test_training_logits_equal_those_of_sampling(
    build: Callable[[float], PreTrainedModel], rate: float, recompute: bool
) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = build(rate)
    sampled = model.eval()(TOKENS).logits
    assert random_rates(model)
    assert not torch.equal(set_training_mode(model, dropout=True)(TOKENS).logits, sampled)
    if recompute:
        model.activation_checkpointing_enable({"use_reentrant": False})
    configured = {name: value for name, value in model.config.to_dict().items() if "drop" in name or "jitter" in name}
    trained = set_training_mode(model)(TOKENS).logits
    assert torch.equal(trained, sampled)
    assert not any("drop" in name for name in random_rates(model))
    assert configured.items() <= model.config.to_dict().items()  # the exported model keeps its settings
    assert any(module.training for module in model.modules()) is recompute


def test_dropout_that_was_asked_for_is_on_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    model = opt(0.25)
    first, second = (set_training_mode(model, dropout=True)(TOKENS).logits for _ in range(2))
    assert not torch.equal(first, second)
    assert "trainer.dropout is on: dropout 0.25" in caplog.text
