"""The torch engines on a device: tokens/s of generation and training, gain of each optimisation, memory.

Models have random weights: speed does not need trained ones.
"""

import statistics
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from flowrt.algorithms.objective import Kl, Objective
from flowrt.engines.base import Prompt, Response, TrainingBatch
from flowrt.engines.descriptor import ModelShape, PublishedWeights, largest_pass
from flowrt.engines.options import Dtype, TrainOptions
from flowrt.engines.registry import ROLLOUT_ENGINES, TRAIN_ENGINES
from flowrt.engines.stopping import StopConditions
from flowrt.engines.torch.rollout import TorchRollout
from flowrt.engines.torch.trainer import TorchTrainer
from flowrt.recipes.config_io import parse
from flowrt.transport.devices import Device

SEED = 0
MEMBERS = 8


@dataclass(frozen=True, slots=True)
class Load:
    """A model and its load: rows generated at once, tokens of a prompt, of a response and of a forward pass."""

    config: Qwen3Config
    rows: int
    prompt: int
    response: int
    forward_tokens: int


def load_of(quick: bool) -> Load:
    """A Qwen3 of 0.6 billion parameters, or one of 100,000."""
    if quick:
        config = Qwen3Config(
            vocab_size=64,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            max_position_embeddings=128,
        )
        return Load(config, rows=8, prompt=8, response=8, forward_tokens=512)
    config = Qwen3Config(
        vocab_size=151_936,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
    )
    return Load(config, rows=64, prompt=128, response=256, forward_tokens=16_384)


def model_of(load: Load, device: Device, dtype: torch.dtype) -> Any:
    torch.manual_seed(SEED)
    with device.torch:
        return Qwen3ForCausalLM(load.config).to(dtype)


def dtype_of(device: Device) -> torch.dtype:
    """float32 on a CPU, bfloat16 on other devices."""
    return torch.float32 if device.kind == "cpu" else torch.bfloat16


def shape_of(load: Load, model: Any) -> ModelShape:
    config = load.config
    return ModelShape(
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        kv_size=config.num_key_value_heads * config.head_dim,
        vocab_size=config.vocab_size,
        max_length=config.max_position_embeddings,
        intermediate_size=config.intermediate_size,
    )


# ---- generation


def rollout_of(load: Load, device: Device, dtype: torch.dtype, *, compiled: bool) -> TorchRollout:
    return TorchRollout(
        model_of(load, device, dtype),
        stop=StopConditions(),
        rows=load.rows,
        max_new_tokens=load.response,
        temperature=1.0,
        compiled=compiled,
    )


def generate(engine: TorchRollout, load: Load, seed: int) -> dict[int, Response]:
    """Generate all rows at once, in groups that share a prompt; returns the responses by row."""
    generator = torch.Generator().manual_seed(seed)
    groups = -(-load.rows // MEMBERS)
    tokens = torch.randint(load.config.vocab_size, (groups, load.prompt), generator=generator, dtype=torch.int32)
    engine.add([Prompt(row, tokens[row // MEMBERS], seed * load.rows + row) for row in range(load.rows)])
    done: dict[int, Response] = {}
    never = threading.Event()
    while engine.running:
        done |= {response.key: response for response in engine.run(never)}
    return done


def generation(device: Device, quick: bool) -> dict[str, float]:
    """Tokens/s of plain and of compiled decoding, how far their log-probabilities differ, and memory."""
    load, rounds = load_of(quick), 2 if quick else 4
    dtype = dtype_of(device)
    metrics: dict[str, float] = {}
    responses: dict[str, dict[int, Response]] = {}
    for way in ("plain", "compiled"):
        if device.kind == "npu" and way == "compiled":
            continue
        begin_s = time.perf_counter()
        engine = rollout_of(load, device, dtype, compiled=way == "compiled")
        responses[way] = generate(engine, load, SEED)
        metrics[f"{way}_first_s"] = time.perf_counter() - begin_s
        rates = []
        for seed in range(1, rounds):
            begin_s = time.perf_counter()
            generate(engine, load, seed)
            rates.append(load.rows * load.response / (time.perf_counter() - begin_s))
        metrics[f"{way}_tokens_per_s"] = statistics.median(rates)
        if way == "plain":
            metrics["generation_peak_gb"] = device.memory().peak_bytes / 1e9
            metrics["generation_estimated_gb"] = generation_bytes(load, engine, dtype) / 1e9
        del engine
    if "compiled" in responses:
        metrics["compiled_times_faster"] = metrics["compiled_tokens_per_s"] / metrics["plain_tokens_per_s"]
        pairs = [(response, responses["compiled"][key]) for key, response in responses["plain"].items()]
        same = [(plain, other) for plain, other in pairs if torch.equal(plain.tokens, other.tokens)]
        metrics["compiled_differ_fraction"] = 1 - len(same) / len(pairs)
        nats = [float((plain.logprobs - other.logprobs).abs().max()) for plain, other in same]
        metrics["compiled_max_nats"] = max(nats, default=0.0)
    return metrics


def generation_bytes(load: Load, engine: TorchRollout, dtype: torch.dtype) -> int:
    """Bytes that the engine needs on its device, by the estimate of `flowrt doctor`."""
    flags = ["--rollout.device", "cuda", "--rollout.max-running-requests", str(load.rows)]
    flags += ["--rollout.max-new-tokens", str(load.response), "--build.max-length", str(4 * load.response)]
    shape = shape_of(load, engine._cached.model)
    length = load.prompt + load.response
    cache = load.rows * length * shape.layers * 2 * shape.kv_size
    name: Dtype = "bfloat16" if dtype is torch.bfloat16 else "float32"
    return ROLLOUT_ENGINES["torch"].memory(parse(flags).rollout, shape, PublishedWeights(name), cache).device


# ---- training


def batch_of(load: Load, seed: int) -> TrainingBatch:
    """A batch of whole groups with about the tokens of a forward pass."""
    generator = torch.Generator().manual_seed(seed)
    groups = max(1, load.forward_tokens // (load.prompt + MEMBERS * load.response))
    count = groups * MEMBERS
    size = load.config.vocab_size
    prompts = [torch.randint(size, (load.prompt,), generator=generator) for _ in range(groups)]
    return TrainingBatch(
        prompts=[prompts[row // MEMBERS] for row in range(count)],
        responses=[torch.randint(size, (load.response,), generator=generator) for _ in range(count)],
        rollout_logprobs=[torch.full((load.response,), -5.0) for _ in range(count)],
        reference_logprobs=[torch.full((load.response,), -5.0) for _ in range(count)],
        advantages_N=torch.randn(count, generator=generator),
        weights_N=torch.ones(count),
        groups_N=torch.arange(count) // MEMBERS,
    )


def trainer_of(load: Load, device: Device, **options: Any) -> TorchTrainer:
    return TorchTrainer(
        model_of(load, device, torch.float32),
        TrainOptions(forward_tokens=load.forward_tokens, **options),
        Objective(kl=Kl(1e-3)),
        temperature=1.0,
        narrow=dtype_of(device),
    )


def training(device: Device, quick: bool) -> dict[str, float]:
    """Tokens/s (of prompts and responses) of whole steps, with and without shared prompts; memory."""
    load, rounds = load_of(quick), 3 if quick else 6
    metrics: dict[str, float] = {}
    for way, options in (("shared", {}), ("padded", {"share_prompts": False})):
        trainer = trainer_of(load, device, **options)
        rates, norms = [], []
        for seed in range(rounds):
            batch = batch_of(load, seed)
            begin_s = time.perf_counter()
            trainer.accumulate(batch)
            norms.append(trainer.step()["grad_norm"])  # a float, so the device has finished the step
            rates.append(len(batch.responses) * (load.prompt + load.response) / (time.perf_counter() - begin_s))
        metrics[f"{way}_tokens_per_s"] = statistics.median(rates[1:])
        metrics[f"{way}_first_grad_norm"] = norms[0]
        if way == "shared":
            dtype = "float32" if device.kind == "cpu" else "bfloat16"
            flags = ["--trainer.dtype", dtype, "--trainer.forward-tokens", str(load.forward_tokens)]
            size = largest_pass(
                prompt=load.prompt,
                response=load.response,
                group=MEMBERS,
                samples=len(batch.responses),
                budget=load.forward_tokens,
                is_shared=True,
            )
            needs = TRAIN_ENGINES["torch"].memory(parse(flags).trainer, shape_of(load, trainer.model), size)
            metrics["training_peak_gb"] = device.memory().peak_bytes / 1e9
            metrics["training_estimated_gb"] = (needs.model + needs.passes) / 1e9
            metrics |= saving(trainer)
        del trainer
    return metrics


def saving(trainer: TorchTrainer) -> dict[str, float]:
    """Seconds of a checkpoint, written and read."""
    with tempfile.TemporaryDirectory(prefix="flowrt-bench-") as name:
        begin_s = time.perf_counter()
        trainer.save(Path(name))
        saved_s = time.perf_counter()
        trainer.load(Path(name))
        return {"checkpoint_write_s": saved_s - begin_s, "checkpoint_read_s": time.perf_counter() - saved_s}
