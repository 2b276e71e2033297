"""Adapters: what is published, and that merged weights compute what the adapted model does."""

import dataclasses
import sys
from typing import Any

import pytest
import torch

from flowrt.engines.hf import named_parameters
from flowrt.engines.options import LoraOptions
from flowrt.engines.tiny_model import build_model
from flowrt.engines.training.lora import add_adapters, merge_adapters
from flowrt.errors import ConfigError
from flowrt.recipes.config_io import parse
from flowrt.roles.engines import rollout_engine
from flowrt.transport.weights.snapshot import Snapshot

LORA = LoraOptions(rank=4, alpha=6.0)
TOKENS = torch.randint(2, 24, (2, 9), generator=torch.Generator().manual_seed(0))


def model() -> Any:
    return build_model(
        vocab_size=24, hidden_size=64, layers=2, heads=4, intermediate_size=96, max_length=64, seed=1
    ).eval()


def adapted(seed: int) -> Any:
    """A model with non-zero adapters; new ones are initialised to have no effect."""
    adapted_model = add_adapters(model(), LORA)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in named_parameters(adapted_model).values():
            tensor.copy_(0.1 * torch.randn(tensor.shape, generator=generator))
    return adapted_model


def logits(adapted_model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = adapted_model(input_ids=TOKENS).logits
    return found


def test_fresh_adapters_change_nothing() -> None:
    assert torch.equal(logits(add_adapters(model(), LORA)), logits(model()))


def test_only_adapter_parameters_are_trained() -> None:
    names = named_parameters(adapted(0)).keys()
    assert names
    assert all(".lora_" in name for name in names)


def test_merged_weights_give_the_same_logits_under_the_plain_names() -> None:
    adapted_model = adapted(0)
    plain = model()
    whole = merge_adapters({name: parameter.detach() for name, parameter in adapted_model.named_parameters()}, LORA)
    assert list(whole) == list(named_parameters(plain)), "buckets are filled in this order"
    plain.load_state_dict(whole, strict=False)
    plain.tie_weights()
    torch.testing.assert_close(logits(plain), logits(adapted_model), atol=1e-5, rtol=1e-5)
    assert (logits(plain) - logits(model())).abs().max() > 0.1


def test_a_model_with_adapters_is_restored_from_a_snapshot_of_adapters() -> None:
    sender, receiver = adapted(1), adapted(2)
    snapshot = Snapshot.take(1, named_parameters(sender))
    snapshot.restore(named_parameters(receiver))
    assert torch.equal(logits(receiver), logits(sender))
    assert sum(snapshot.bucket_bytes()) < 0.3 * sum(p.nbytes for p in model().parameters())


def test_an_unknown_target_module_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"trainer\.lora\.targets is 'nowhere'"):
        add_adapters(model(), LoraOptions(rank=4, targets="nowhere"))


def test_a_worker_with_a_server_engine_refuses_adapters() -> None:
    server = ["--rollout.engine", "sglang", "--rollout.sglang.python", sys.executable]
    adapters = ["--trainer.engine", "fsdp", "--trainer.lora.rank", "4"]
    config = parse([*server, *adapters, "--trainer.lora.publish", "merged"])
    lora = dataclasses.replace(config.trainer.lora, publish="adapters")
    by_hand = dataclasses.replace(config, trainer=dataclasses.replace(config.trainer, lora=lora))
    with pytest.raises(ConfigError, match=r"use --trainer\.lora\.publish merged"):
        rollout_engine(by_hand, "rollout-0")
