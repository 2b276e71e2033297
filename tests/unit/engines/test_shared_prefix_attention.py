"""Models that compute each prompt of a pass once: the same log-probabilities, gradients and weights, with less work."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    PhimoeConfig,
    PhimoeForCausalLM,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from flowrt.algorithms import pack_samples
from flowrt.algorithms.objective import Objective
from flowrt.engines.base import TrainingBatch
from flowrt.engines.descriptor import MAX_PACKED_WINDOW
from flowrt.engines.hf import set_training_mode
from flowrt.engines.options import TrainOptions
from flowrt.engines.torch.trainer import TorchTrainer
from flowrt.engines.training.architecture import LENGTHS
from flowrt.engines.training.forward import (
    NAME,
    apply_optimizations,
    cut_into_passes,
    decoder_layers,
    enable_packing,
    is_packing_enabled,
    response_logprobs,
    score,
)
from flowrt.engines.training.fused_head import is_head_fused
from tests.decoders import COMMON, DECODERS
from tests.unit.engines.test_prefill import LargestTensor

UNSUPPORTED = {"gemma2": "its scores are capped, which SDPA does not support"}
GROUP_SIZE = 4


def samples(seed: int = 0) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Three prompts of four samples each, interleaved; short and long responses, one of them empty."""
    generator = torch.Generator().manual_seed(seed)
    prompts = [
        torch.randint(2, 40, (length,), generator=generator, dtype=torch.int32) for length in (9, 4, 17)
    ] * GROUP_SIZE
    lengths = (12, 30, 5, 1, 0, 28, 11, 31, 2, 29, 7, 16)
    return prompts, [torch.randint(2, 40, (length,), generator=generator, dtype=torch.int32) for length in lengths]


def build(model_class: Any, config: Any, attention: str = "sdpa") -> Any:
    torch.manual_seed(0)
    config._attn_implementation = attention
    return set_training_mode(model_class(config).float())


def logprobs_and_gradients(
    model: Any, weights_T: torch.Tensor, temperature: float = 0.8
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    model.zero_grad()
    logprobs_T, _ = response_logprobs(model, *samples(), temperature)
    (logprobs_T * weights_T).sum().backward()
    return logprobs_T.detach(), [parameter.grad.clone() for parameter in model.parameters()]


def assert_packing_changes_nothing(model: Any) -> None:
    weights_T = torch.randn(sum(map(len, samples()[1])), generator=torch.Generator().manual_seed(1))
    expected, expected_gradients = logprobs_and_gradients(model, weights_T)
    assert enable_packing(model)
    assert is_packing_enabled(model)
    actual, actual_gradients = logprobs_and_gradients(model, weights_T)
    torch.testing.assert_close(actual, expected, atol=2e-5, rtol=0)
    for gradient, expected_gradient in zip(actual_gradients, expected_gradients, strict=True):
        torch.testing.assert_close(gradient, expected_gradient, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("name", [name for name in DECODERS if name not in UNSUPPORTED])
def test_log_probabilities_and_gradients_are_those_of_padded_samples(name: str) -> None:
    assert_packing_changes_nothing(build(*DECODERS[name]))


@pytest.mark.parametrize("window", [5, 16])
def test_a_sliding_window_applies_to_each_sample(window: int) -> None:
    config = MistralConfig(**COMMON, sliding_window=window)
    model, wide = build(MistralForCausalLM, config), build(MistralForCausalLM, MistralConfig(**COMMON))
    narrow, _ = response_logprobs(model, *samples(), 1.0)
    assert (narrow - response_logprobs(wide, *samples(), 1.0)[0]).abs().max() > 0.1
    assert_packing_changes_nothing(model)


EXPERTS = {"num_experts_per_tok": 2, "sliding_window": 16}


@pytest.mark.parametrize(
    ("model_class", "config"),
    [
        (PhimoeForCausalLM, PhimoeConfig(**COMMON, **EXPERTS, num_local_experts=4)),  # its attention has no window
        (OlmoeForCausalLM, OlmoeConfig(**COMMON, **EXPERTS, num_experts=4)),  # its mask has no window
    ],
)
def test_a_model_with_different_windows_in_mask_and_attention_is_not_packed(model_class: Any, config: Any) -> None:
    assert not enable_packing(build(model_class, config))


def test_a_model_with_a_window_too_wide_to_verify_is_not_packed() -> None:
    assert not enable_packing(build(MistralForCausalLM, MistralConfig(**COMMON, sliding_window=MAX_PACKED_WINDOW + 1)))


@pytest.mark.parametrize("is_scaled", [False, True])
def test_the_check_of_packing_computes_few_logits(is_scaled: bool) -> None:
    """Vocabulary 262k and a window of 512 tokens, with a fused head and, changed in an unknown way, without."""
    vocabulary = 262_144
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "max_position_embeddings": 1024}
    config = MistralConfig(**COMMON | sizes | {"vocab_size": vocabulary}, sliding_window=512)
    model = build(MistralForCausalLM, config)
    if is_scaled:
        model.register_forward_hook(lambda _, __, out: setattr(out, "logits", out.logits * 0.7))
    with LargestTensor() as of_all_checks:
        apply_optimizations(model, TrainOptions(share_prompts=False))
    assert is_head_fused(model) is not is_scaled
    with LargestTensor() as of_packing:
        assert enable_packing(model)
    assert of_packing.elements <= 20 * vocabulary
    assert of_all_checks.elements <= len(LENGTHS) * max(LENGTHS) * vocabulary


def test_a_model_that_is_not_packed_is_logged_with_the_reason(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "flowrt"):
        assert not enable_packing(
            build(MistralForCausalLM, MistralConfig(**COMMON, sliding_window=MAX_PACKED_WINDOW + 1))
        )
        assert enable_packing(build(*DECODERS["llama"]))
    (line,) = caplog.messages
    assert line.startswith("samples of MistralForCausalLM are padded")
    assert line.endswith("its sliding window of 1025 tokens is above 1024")


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_a_model_without_sdpa_attention_is_unchanged(name: str) -> None:
    model = build(*DECODERS[name], attention="eager")
    expected, _ = response_logprobs(model, *samples(), 1.0)
    assert not enable_packing(model)
    assert torch.equal(response_logprobs(model, *samples(), 1.0)[0], expected)


def test_a_model_that_mixes_tokens_outside_of_attention_is_not_packed() -> None:
    model = build(*DECODERS["llama"])
    model.model.layers[0].mlp.register_forward_hook(lambda _, __, out: out + 0.5 * out.roll(1, dims=1))
    assert not enable_packing(model)
    assert model.config._attn_implementation == "sdpa"


def test_a_model_that_rejects_the_packed_argument_is_not_packed() -> None:
    model = build(*DECODERS["llama"])

    def refuse(_: Any, args: Any, named: dict[str, Any]) -> None:
        if "packed" in named:
            raise TypeError("forward() got an unexpected keyword argument 'packed'")

    model.register_forward_pre_hook(refuse, with_kwargs=True)
    assert not enable_packing(model)
    assert len(response_logprobs(model, *samples(), 1.0)[0]) == sum(map(len, samples()[1]))


def test_half_precision_is_verified_within_its_own_rounding() -> None:
    model = build(*DECODERS["llama"]).to(torch.bfloat16)
    model.lm_head.weight.data *= 20  # logits of 50 and more, in steps of a quarter
    assert enable_packing(model)
    model.config._attn_implementation = "sdpa"
    model.model.layers[0].mlp.register_forward_hook(lambda _, __, out: out + 0.5 * out.roll(1, dims=1))
    assert not enable_packing(model)


def test_half_precision_attention_is_computed_in_float32_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The backward pass of PyTorch's own is several times slower."""
    model = build(*DECODERS["llama"])
    exact = {name: parameter.grad.clone() for name, parameter in gradients(model).items()}
    model = build(*DECODERS["llama"]).to(torch.bfloat16)
    assert enable_packing(model)
    types = []

    def recorded(module: Any, query: torch.Tensor, *others: Any, **options: Any) -> Any:
        types.append(query.dtype)
        return sdpa_attention_forward(module, query, *others, **options)

    monkeypatch.setattr("flowrt.engines.training.forward.sdpa_attention_forward", recorded)
    first = model.model.layers[0]
    for frozen in (model.model.embed_tokens, first.input_layernorm, first.self_attn.q_proj, first.self_attn.k_proj):
        frozen.requires_grad_(False)  # as with adapters elsewhere: only values have gradients
    parameters = gradients(model)
    assert set(types) == {torch.float32}
    trainable = {name: expected for name, expected in exact.items() if parameters[name].requires_grad}
    assert len(trainable) == len(exact) - 4
    for name, expected in trainable.items():
        assert (parameters[name].grad.float() - expected).norm() < 0.1 * expected.norm(), name


def gradients(model: Any) -> dict[str, Any]:
    """Parameters, with the gradients of log-probabilities with fixed weights."""
    logprobs_T, _ = response_logprobs(model, *samples(), 1.0)
    weights_T = torch.randn(len(logprobs_T), generator=torch.Generator().manual_seed(7))
    (logprobs_T * weights_T).sum().backward()
    return dict(model.named_parameters())


def test_a_prompt_is_computed_once_for_its_samples_and_padding_never() -> None:
    model = build(*DECODERS["qwen2"])
    rows: list[int] = []
    model.model.layers[0].mlp.register_forward_hook(lambda _, args, __: rows.append(args[0].shape[:-1].numel()))
    enable_packing(model)
    rows.clear()
    prompts, responses = samples()
    response_logprobs(model, prompts, responses, 1.0)
    assert rows == [9 + 4 + 17 + sum(max(len(each) - 1, 0) for each in responses)]


def test_scores_keep_their_order_for_any_token_budget() -> None:
    model = build(*DECODERS["llama"]).eval()
    prompts, responses = samples()
    expected = score(model, prompts, responses, 1.0, budget_tokens=1000)
    enable_packing(model)
    for budget in (1, 60, 1000):
        scores = score(model, prompts, responses, 1.0, budget)
        for logprobs, other in zip(scores, expected, strict=True):
            torch.testing.assert_close(logprobs, other, atol=2e-5, rtol=0)
    assert len(cut_into_passes(model, prompts, responses, 60)) < len(prompts)


def batch(seed: int) -> TrainingBatch:
    prompts, responses = samples(seed)
    generator = torch.Generator().manual_seed(seed)
    logprobs = [-3 * torch.rand(len(each), generator=generator) for each in responses]
    advantages_N = torch.randn(len(prompts), generator=generator)
    return TrainingBatch(
        prompts=prompts,
        responses=responses,
        rollout_logprobs=logprobs,
        reference_logprobs=None,
        advantages_N=advantages_N,
        weights_N=torch.ones(len(prompts)),
        groups_N=torch.zeros(len(prompts), dtype=torch.int64),
    )


def train(model: Any, **options: Any) -> TorchTrainer:
    settings = TrainOptions(lr=1e-3, warmup_steps=1, forward_tokens=120, **options)
    engine = TorchTrainer(model, settings, Objective(), temperature=1.0)
    for seed in range(3):
        engine.accumulate(batch(seed))
        engine.step()
    return engine


def test_packed_training_gives_the_same_weights_and_exports_a_plain_model(tmp_path: Path) -> None:
    model = build(*DECODERS["qwen2"])
    shared = train(model)
    assert is_packing_enabled(shared.model)
    padded = train(build(*DECODERS["qwen2"]), share_prompts=False)
    assert not is_packing_enabled(padded.model)
    for name, weight in padded.parameters().items():
        torch.testing.assert_close(shared.parameters()[name], weight, atol=2e-5, rtol=0, msg=name)
    shared.export(tmp_path / "final")
    assert NAME not in (tmp_path / "final" / "config.json").read_text()
    assert AutoConfig.from_pretrained(tmp_path / "final").model_type == "qwen2"


@pytest.mark.filterwarnings("ignore")  # torch.compile triggers warnings that it ignores itself
@pytest.mark.skipif(not shutil.which("g++"), reason="torch.compile needs a C++ compiler on a CPU")
@pytest.mark.long
@pytest.mark.slow
def test_compiled_layers_give_the_same_weights_and_compile_once() -> None:
    compiled = train(build(*DECODERS["qwen2"]), compile=True)
    assert all(layer._compiled_call_impl is not None for layer in decoder_layers(compiled.model))
    plain = train(build(*DECODERS["qwen2"]))
    for name, weight in plain.parameters().items():
        torch.testing.assert_close(compiled.parameters()[name], weight, atol=2e-5, rtol=0, msg=name)
    tiles = set()
    with torch._dynamo.config.patch(error_on_recompile=True):
        for seed in range(3, 9):  # other numbers of samples, of samples per prompt and of tiles
            rows = list(range(0, 12, 1 + seed % 3))
            prompts, responses = samples(seed)
            subset = [prompts[row] for row in rows], [responses[row][: 3 * seed] for row in rows]
            response_logprobs(compiled.model, *subset, 1.0)[0].sum().backward()
            tiles.add(len(pack_samples(*subset).tiles))
    assert len(tiles) > 2


def test_optimizations_that_are_not_enabled_change_nothing() -> None:
    model = apply_optimizations(build(*DECODERS["qwen2"]), TrainOptions(share_prompts=False))
    assert not is_packing_enabled(model)
    assert decoder_layers(model)[0]._compiled_call_impl is None


@pytest.mark.parametrize("positions", [1, 5, 6, 8, 11, 12])
@pytest.mark.parametrize("config_class", [GPT2Config, LlamaConfig])
def test_packing_is_verified_within_the_positions_of_the_model(config_class: Any, positions: int) -> None:
    if config_class is GPT2Config:
        model = build(GPT2LMHeadModel, GPT2Config(vocab_size=40, n_embd=32, n_layer=1, n_head=4, n_positions=positions))
    else:
        model = build(LlamaForCausalLM, LlamaConfig(**COMMON | {"max_position_embeddings": positions}))
    assert enable_packing(model) is (positions > 5)
    if positions > 5:
        sequences = [torch.arange(2, 2 + positions // 2)] * 2
        assert len(response_logprobs(model, sequences, sequences, 1.0)[0]) == 2 * len(sequences[0])
