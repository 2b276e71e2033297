"""Passes through the fused LM head: the same log-probabilities, entropies, gradients and weights, without logits."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import CohereConfig, CohereForCausalLM, GraniteConfig, GraniteForCausalLM, Qwen2ForCausalLM

from flowrt.algorithms.lm_head import LogitChange, fused_logprobs, fused_support_logprobs
from flowrt.algorithms.objective import Objective
from flowrt.algorithms.support import Support
from flowrt.engines.base import TrainingBatch
from flowrt.engines.fsdp.trainer import FsdpTrainer
from flowrt.engines.hf import save_model, set_training_mode
from flowrt.engines.options import FsdpOptions, LoraOptions, TrainOptions
from flowrt.engines.tiny_model import wrap_tokenizer
from flowrt.engines.torch.trainer import TorchTrainer
from flowrt.engines.training.forward import apply_optimizations, enable_packing, response_logprobs, response_predictions
from flowrt.engines.training.fused_head import FusedHead, enable_fused_head, is_head_fused
from flowrt.engines.training.lora import add_adapters
from flowrt.recipes.tasks.arithmetic import Arithmetic
from flowrt.transport.devices import choose
from tests.decoders import COMMON, DECODERS
from tests.unit.engines.test_prefill import LargestTensor

VOCABULARY = COMMON["vocab_size"]
CAPPED = "gemma2"
FUSED_FUNCTION = "flowrt.engines.training.fused_head.fused_logprobs"
WHOLE_LOGITS_LIMIT = "flowrt.engines.training.fused_head.WHOLE_LOGITS"


def build(model_class: Any, config: Any, attention: str = "sdpa") -> Any:
    """In float64: in float32 the rounding of the layers' gradients exceeds the tolerances of these tests."""
    torch.manual_seed(0)
    config._attn_implementation = attention
    return set_training_mode(model_class(config).double())


def samples(seed: int = 0) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Two prompts of three samples each; one response is empty."""
    generator = torch.Generator().manual_seed(seed)
    prompts = [torch.randint(2, VOCABULARY, (length,), generator=generator) for length in (9, 4)] * 3
    responses = [torch.randint(2, VOCABULARY, (length,), generator=generator) for length in (12, 3, 1, 0, 7, 5)]
    return prompts, responses


def outputs_and_gradients(model: Any, temperature: float = 0.8) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Log-probabilities and entropies, and the gradients of a weighted sum of both."""
    model.zero_grad()
    logprobs_T, entropy_T, _ = response_predictions(model, *samples(), temperature, entropy=True)
    assert entropy_T is not None
    coefficients = torch.randn(2, len(logprobs_T), generator=torch.Generator().manual_seed(1))
    (torch.stack([logprobs_T, entropy_T]) * coefficients).sum().backward()
    gradients = {
        name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None
    }
    return [logprobs_T.detach(), entropy_T.detach()], gradients


def assert_fusing_changes_nothing(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, expected_gradients = outputs_and_gradients(model)
    assert enable_fused_head(model)
    assert all(
        torch.equal(output, other) for output, other in zip(outputs_and_gradients(model)[0], expected, strict=True)
    )
    monkeypatch.setattr(WHOLE_LOGITS_LIMIT, 0)
    widest = WidestOutput()
    with widest:
        fused, fused_gradients = outputs_and_gradients(model)
    assert widest.width < VOCABULARY
    torch.testing.assert_close(fused, expected, atol=2e-6, rtol=1e-5)
    assert fused_gradients.keys() == expected_gradients.keys()
    for name, gradient in expected_gradients.items():
        torch.testing.assert_close(fused_gradients[name], gradient, atol=1e-5, rtol=1e-4, msg=name)


def count_fused_passes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list that grows with each pass through the fused head."""
    calls: list[int] = []

    def counting(*arguments: Any, **named: Any) -> Any:
        calls.append(1)
        return fused_logprobs(*arguments, **named)

    monkeypatch.setattr(FUSED_FUNCTION, counting)
    return calls


class WidestOutput(TorchDispatchMode):
    """The widest last dimension of a tensor with a row for each prediction."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.width = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        tokens = sum(len(response) for response in samples()[1])
        if isinstance(out, torch.Tensor) and out.dim() > 1 and out.shape[-1] in (VOCABULARY, VOCABULARY - 1):
            rows = out.shape[:-1].numel()
            self.width = max(self.width, out.shape[-1] if rows >= tokens - 3 else 0)
        return out


@pytest.fixture(autouse=True)
def _small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flowrt.algorithms.lm_head.SLICE_ELEMENTS", 7 * 28)
    monkeypatch.setattr("flowrt.algorithms.lm_head.BLOCK_ELEMENTS", 30)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("name", [name for name in DECODERS if name != CAPPED])
def test_fused_results_equal_those_of_whole_logits(name: str, packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With tied weights (GPT-2) and untied ones (the others)."""
    model = build(*DECODERS[name])
    assert enable_packing(model) or not packed
    if not packed:
        model.config._attn_implementation = "sdpa"
    assert_fusing_changes_nothing(model, monkeypatch)


@pytest.mark.parametrize("packed", [True, False])
def test_a_fused_head_with_a_bias_equals_whole_logits(packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(*DECODERS["llama"])
    model.lm_head = torch.nn.Linear(32, VOCABULARY, bias=True, dtype=torch.float64)
    torch.nn.init.normal_(model.lm_head.bias)
    if packed:
        enable_packing(model)
    assert_fusing_changes_nothing(model, monkeypatch)


def test_adapters_are_trained_through_a_frozen_head(monkeypatch: pytest.MonkeyPatch) -> None:
    model = add_adapters(build(*DECODERS["qwen2"]), LoraOptions(rank=4))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    assert enable_packing(model)
    assert_fusing_changes_nothing(model, monkeypatch)
    assert all(".lora_" in name for name in outputs_and_gradients(model)[1])


CHANGED = {
    "capped": lambda: build(*DECODERS[CAPPED], attention="eager"),
    "scaled": lambda: build(CohereForCausalLM, CohereConfig(**COMMON, logit_scale=0.3)),
    "divided": lambda: build(GraniteForCausalLM, GraniteConfig(**COMMON, logits_scaling=3.0)),
}
CHANGES = {"capped": LogitChange(cap=2.0), "scaled": LogitChange(factor=0.3), "divided": LogitChange(divisor=3.0)}


@pytest.mark.parametrize("name", CHANGED)
def test_a_model_that_scales_or_caps_its_logits_has_a_fused_head(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = CHANGED[name]()
    assert_fusing_changes_nothing(model, monkeypatch)
    assert model.get_output_embeddings().change == CHANGES[name]


@pytest.mark.parametrize("entropy", [True, False])
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("name", ["llama", "biased", *CHANGED])
def test_supports_need_only_the_logits_of_their_tokens(
    name: str, packed: bool, entropy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Log-probabilities and gradients are those of whole logits."""
    model = CHANGED[name]() if name in CHANGED else build(*DECODERS["llama"])
    if name == "biased":
        model.lm_head = torch.nn.Linear(32, VOCABULARY, bias=True, dtype=torch.float64)
        torch.nn.init.normal_(model.lm_head.bias)
    if packed and not enable_packing(model):
        return
    supports = [random_support(response) for response in samples()[1]]

    def outputs() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        model.zero_grad()
        logprobs_T, entropy_T, _ = response_predictions(model, *samples(), 0.8, entropy=entropy, supports=supports)
        values = [logprobs_T] if entropy_T is None else [logprobs_T, entropy_T]
        torch.stack([(value * torch.arange(len(value))).sum() for value in values]).sum().backward()
        return [value.detach() for value in values], [
            parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None
        ]

    expected, expected_gradients = outputs()
    assert enable_fused_head(model)
    monkeypatch.setattr(WHOLE_LOGITS_LIMIT, 0)
    with WidestOutput() as widest:
        values, gradients = outputs()
    assert widest.width < VOCABULARY
    torch.testing.assert_close(values, expected, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(gradients, expected_gradients, atol=1e-5, rtol=1e-5)


def random_support(response_T: torch.Tensor) -> Support:
    """The token itself and up to six others at each position."""
    generator = torch.Generator().manual_seed(len(response_T))
    tokens = []
    for token in response_T.tolist():
        others = torch.randperm(VOCABULARY, generator=generator)[: int(torch.randint(7, (), generator=generator))]
        tokens.append(torch.cat([torch.tensor([token]), others[others != token]]))
    counts_T = torch.tensor([len(token) for token in tokens], dtype=torch.int64)
    return Support(torch.cat(tokens) if tokens else torch.zeros(0, dtype=torch.int64), counts_T)


def test_a_support_at_a_real_vocabulary_needs_no_tensor_of_its_size() -> None:
    """2,048 tokens, 262k words, 20 candidates each: but for the matrix and its gradient, a small chunk."""
    vocabulary, width, count = 262_144, 8, 2048
    generator = torch.Generator().manual_seed(0)
    hidden_UD = torch.randn(count, width, generator=generator, requires_grad=True)
    weight_VD = torch.randn(vocabulary, width, generator=generator, requires_grad=True)
    tokens_TK = torch.randint(vocabulary, (count, 20), generator=generator)
    support = Support(tokens_TK.flatten(), torch.full((count,), 20))
    with LargestTensor() as largest:
        fused_support_logprobs(hidden_UD, weight_VD, torch.arange(count), tokens_TK[:, 0], support).sum().backward()
    assert largest.elements <= max(vocabulary * width, count * 20 * width)


UNSUPPORTED = {
    "scaled by an unknown setting": lambda: scaled(build(*DECODERS["llama"])),
    "adapted": lambda: add_adapters(build(*DECODERS["llama"]), LoraOptions(rank=4, targets="q_proj,lm_head")),
    "hooked": lambda: hooked(build(*DECODERS["llama"])),
    "shifted": lambda: build(Shifted, DECODERS["qwen2"][1]),
}


def scaled(model: Any) -> Any:
    forward = model.forward

    def changed(*arguments: Any, **named: Any) -> Any:
        out = forward(*arguments, **named)
        out.logits = out.logits * 0.7
        return out

    model.forward = changed
    return model


def hooked(model: Any) -> Any:
    model.lm_head.register_forward_hook(lambda _, __, out: 2 * out)
    return model


class Shifted(Qwen2ForCausalLM):  # type: ignore[misc]
    """A model that changes the logits of its head."""

    def forward(self, *arguments: Any, **named: Any) -> Any:
        out = super().forward(*arguments, **named)
        out.logits = out.logits[..., :VOCABULARY].view(*out.logits.shape[:2], VOCABULARY) + 1.0
        return out


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_a_model_with_an_unsupported_head_keeps_whole_logits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = UNSUPPORTED[name]()
    expected, expected_gradients = outputs_and_gradients(model)
    head_class = type(model.get_output_embeddings())
    assert not enable_fused_head(model)
    assert not is_head_fused(model)
    assert type(model.get_output_embeddings()) is head_class
    monkeypatch.setattr(WHOLE_LOGITS_LIMIT, 0)
    again, gradients_again = outputs_and_gradients(model)
    assert all(torch.equal(output, other) for output, other in zip(again, expected, strict=True))
    assert all(torch.equal(gradients_again[name], gradient) for name, gradient in expected_gradients.items())


def test_entropies_are_those_of_the_distribution_at_the_temperature(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(*DECODERS["llama"])
    prompt, response = (sample[0] for sample in samples())
    logits = model(input_ids=torch.cat([prompt, response]).unsqueeze(0)).logits[0, len(prompt) - 1 : -1]
    expected = torch.distributions.Categorical(logits=logits / 1.7).entropy()
    enable_fused_head(model)
    for limit in (1 << 24, 0):
        monkeypatch.setattr(WHOLE_LOGITS_LIMIT, limit)
        entropy_T = response_predictions(model, [prompt], [response], 1.7, entropy=True)[1]
        assert entropy_T is not None
        torch.testing.assert_close(entropy_T, expected, atol=1e-5, rtol=0)
    assert response_predictions(model, [prompt], [response], 1.7)[1] is None


def test_only_logits_above_the_limit_use_the_fused_head(monkeypatch: pytest.MonkeyPatch) -> None:
    model = apply_optimizations(build(*DECODERS["llama"]), TrainOptions())
    assert is_head_fused(model)
    calls = count_fused_passes(monkeypatch)
    predictions = 25  # of the samples; those of first tokens are shared within a group
    for limit in (predictions * VOCABULARY, predictions * VOCABULARY - 1):
        monkeypatch.setattr(WHOLE_LOGITS_LIMIT, limit)
        response_logprobs(model, *samples(), 1.0)
    assert len(calls) == 1
    assert model.get_output_embeddings().asked is None


def test_a_failed_pass_restores_the_head(monkeypatch: pytest.MonkeyPatch) -> None:
    model = apply_optimizations(build(*DECODERS["llama"]), TrainOptions())
    monkeypatch.setattr(WHOLE_LOGITS_LIMIT, 0)
    monkeypatch.setattr(FUSED_FUNCTION, lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        response_logprobs(model, *samples(), 1.0)
    assert model(input_ids=samples()[0][0].unsqueeze(0)).logits.shape[-1] == VOCABULARY


def batch(seed: int) -> TrainingBatch:
    prompts, responses = samples(seed)
    generator = torch.Generator().manual_seed(seed)
    return TrainingBatch(
        prompts=prompts,
        responses=responses,
        rollout_logprobs=[-3 * torch.rand(len(each), generator=generator) for each in responses],
        reference_logprobs=None,
        advantages_N=torch.randn(len(prompts), generator=generator),
        weights_N=torch.ones(len(prompts)),
        groups_N=torch.zeros(len(prompts), dtype=torch.int64),
    )


def train(engine: Any) -> dict[str, torch.Tensor]:
    for seed in range(3):
        engine.accumulate(batch(seed))
        engine.step()
    return {name: weight.clone() for name, weight in engine.parameters().items()}


OPTIONS = TrainOptions(lr=1e-3, warmup_steps=1, forward_tokens=40)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A model's directory, for a job of one rank: this process."""
    directory = tmp_path_factory.mktemp("model")
    save_model(build(*DECODERS["qwen2"]), wrap_tokenizer(Arithmetic(0, 0).tokenizer()), directory / "model")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield directory / "model"
    dist.destroy_process_group()


def engine(name: str, checkpoint: Path) -> Any:
    if name == "torch":
        return TorchTrainer(build(*DECODERS["qwen2"]).float(), OPTIONS, Objective(), temperature=1.0)
    gather: Any = name.partition("-")[2]
    lora = LoraOptions(rank=4) if name.startswith("adapted") else LoraOptions()
    fsdp = FsdpOptions(gather=gather)
    return FsdpTrainer(checkpoint, choose("cpu", 0), OPTIONS, Objective(), fsdp=fsdp, lora=lora, temperature=1.0)


@pytest.mark.parametrize("name", ["torch", "fsdp-step", "fsdp-pass", "adapted-step", "adapted-pass"])
def test_engines_reach_the_same_weights_with_the_fused_head(
    name: str, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = train(engine(name, checkpoint))
    calls = count_fused_passes(monkeypatch)
    monkeypatch.setattr(WHOLE_LOGITS_LIMIT, 0)
    weights = train(engine(name, checkpoint))
    assert len(calls) > 6
    for key, weight in expected.items():
        torch.testing.assert_close(weights[key], weight, atol=2e-5, rtol=0, msg=key)


@pytest.mark.usefixtures("checkpoint")
@pytest.mark.parametrize("gather", ["step", "pass"])
def test_a_scaled_head_is_fused_in_a_sharded_model(
    gather: Literal["step", "pass"], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = CHANGED["divided"]().float()
    save_model(model, wrap_tokenizer(Arithmetic(0, 0).tokenizer()), tmp_path / "model")
    expected = train(TorchTrainer(model, OPTIONS, Objective(), temperature=1.0))
    calls = count_fused_passes(monkeypatch)
    monkeypatch.setattr(WHOLE_LOGITS_LIMIT, 0)
    fsdp = FsdpOptions(gather=gather)
    place = tmp_path / "model", choose("cpu", 0)
    weights = train(FsdpTrainer(*place, OPTIONS, Objective(), fsdp=fsdp, lora=LoraOptions(), temperature=1.0))
    assert len(calls) > 6
    for key, weight in expected.items():
        torch.testing.assert_close(weights[key], weight, atol=2e-5, rtol=0, msg=key)


def test_an_exported_model_has_a_plain_head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WHOLE_LOGITS_LIMIT, 0)
    trainer = engine("torch", tmp_path)
    train(trainer)
    trainer.export(tmp_path / "final")
    again = Qwen2ForCausalLM.from_pretrained(tmp_path / "final")
    assert type(again.lm_head) is torch.nn.Linear
    assert isinstance(trainer.model.lm_head, FusedHead)
    assert torch.equal(again.lm_head.weight, trainer.model.lm_head.weight)
