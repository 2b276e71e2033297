"""Dropout is disabled in training: the trained policy equals the sampled one."""

from collections.abc import Callable

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from flowrt.engines.hf import disable_dropout

TOKENS = torch.arange(12).unsqueeze(0)


def qwen2(dropout: float) -> PreTrainedModel:
    config = Qwen2Config(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        attention_dropout=dropout,
    )
    return Qwen2ForCausalLM(config)


def gpt2(dropout: float) -> PreTrainedModel:
    rates = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout)
    return GPT2LMHeadModel(GPT2Config(vocab_size=32, n_embd=16, n_layer=1, n_head=2, **rates))


@pytest.mark.parametrize("dropout", [0.5, 1])  # config.json may have an integer
@pytest.mark.parametrize("build", [qwen2, gpt2])
def test_training_logits_equal_those_of_sampling(build: Callable[[float], PreTrainedModel], dropout: float) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = build(dropout)
    sampled = model.eval()(TOKENS).logits
    assert not torch.equal(model.train()(TOKENS).logits, sampled)
    assert torch.equal(disable_dropout(model).train()(TOKENS).logits, sampled)
