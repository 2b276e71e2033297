"""Estimated memory of a run (`flowrt doctor`) against the peak memory of its processes.

    python bench/estimate.py [--parts SHAPE ...] [--json PATH] [--quick]

Each shape is a model with random weights, an engine, a number of running sequences and a length: three steps are
trained with real processes on the CPU, and the peak of each trainer, rollout and reference process (VmHWM) is compared
with what `flowrt.launcher.doctor.estimate` says for its role.

estimate_error_max is the largest relative error, estimate_error_SHAPE that of a shape; estimate_gb_SHAPE_ROLE and
peak_gb_SHAPE_ROLE are both figures. --quick takes the three smallest shapes.
"""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from common.harness import Bench, Figures, Options, Part, Skipped
from common.jobs import FLOWRT
from common.memory import peak_bytes
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    Qwen2Config,
    Qwen3Config,
)

from flowrt.engines.tiny_model import wrap_tokenizer
from flowrt.launcher.doctor.estimate import estimate
from flowrt.launcher.doctor.model_shape import shape_of
from flowrt.recipes.config_io import parse
from flowrt.recipes.tasks.arithmetic import Arithmetic

ROLES = {"trainer": "flowrt.roles.trainer", "rollout": "flowrt.roles.rollout", "reference": "flowrt.roles.reference"}
POLL_S = 0.1
DEADLINE_S = 900.0
TOKENS = {"bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0}
QUICK = ("qwen3_tiny", "gpt2", "llama_activations")


def qwen3(hidden: int, layers: int, vocabulary: int, *, kv_heads: int = 2, positions: int = 4096) -> Qwen3Config:
    return Qwen3Config(
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=max(hidden // 64, kv_heads),
        num_key_value_heads=kv_heads,
        head_dim=64,
        vocab_size=vocabulary,
        max_position_embeddings=positions,
        tie_word_embeddings=True,
        **TOKENS,
    )


@dataclass(frozen=True)
class Shape:
    """A model and the size of its run: sequences at a time, lengths in tokens, and further flags."""

    model: Any
    rows: int
    new_tokens: int
    prompt_tokens: int = 16
    flags: tuple[str, ...] = ()


LLAMA = LlamaConfig(
    hidden_size=512,
    intermediate_size=1408,
    num_hidden_layers=10,
    num_attention_heads=8,
    vocab_size=2048,
    tie_word_embeddings=True,
    **TOKENS,
)
QWEN2 = Qwen2Config(
    hidden_size=384,
    intermediate_size=2048,
    num_hidden_layers=6,
    num_attention_heads=6,
    num_key_value_heads=2,
    vocab_size=151_936,
    tie_word_embeddings=True,
    **TOKENS,
)
GEMMA3 = Gemma3TextConfig(
    hidden_size=320,
    intermediate_size=1024,
    num_hidden_layers=6,
    num_attention_heads=4,
    num_key_value_heads=1,
    head_dim=256,
    vocab_size=262_144,
    sliding_window=512,
    **TOKENS,
)
GEMMA2 = Gemma2Config(
    hidden_size=320,
    intermediate_size=1024,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=2,
    head_dim=64,
    vocab_size=32_768,
    **TOKENS,
)
GPT2 = GPT2Config(vocab_size=50_257, n_embd=384, n_layer=6, n_head=6, eos_token_id=1, bos_token_id=1)
FSDP = ("--trainer.engine", "fsdp", "--trainer.fsdp.device", "cpu")
SHAPES = {
    "qwen3_tiny": Shape(qwen3(256, 4, 32_768), 64, 64),
    "gpt2": Shape(GPT2, 32, 64),
    "llama_activations": Shape(LLAMA, 32, 128),
    "qwen3_152k": Shape(qwen3(512, 8, 151_936), 32, 64),
    "qwen3_262k": Shape(qwen3(256, 4, 262_144), 64, 64),
    "qwen3_152k_top_k": Shape(qwen3(256, 4, 151_936), 64, 256, flags=("--rollout.top-k", "50")),
    "cache_64_rows": Shape(qwen3(256, 8, 2048, kv_heads=4), 64, 1024, flags=("--trainer.forward-tokens", "2048")),
    "long_prompts": Shape(qwen3(512, 8, 2048, kv_heads=4), 8, 32, prompt_tokens=2000),
    "in_flight": Shape(QWEN2, 32, 64, flags=("--rollout.weight-update", "in_flight")),
    "gemma3_262k": Shape(GEMMA3, 32, 64),
    "gemma2_scores": Shape(GEMMA2, 32, 240),
    "fsdp_152k": Shape(qwen3(384, 6, 151_936), 32, 64, flags=FSDP),
    "fsdp_bfloat16": Shape(qwen3(512, 10, 32_768), 32, 64, flags=(*FSDP, "--trainer.fsdp.dtype", "bfloat16")),
}


def prepare(shape: Shape, folder: Path) -> list[str]:
    """Write the model and its prompts; returns the arguments of the run."""
    model, rows = folder / "model", folder / "rows.jsonl"
    AutoModelForCausalLM.from_config(shape.model).save_pretrained(model)
    tokenizer = wrap_tokenizer(Arithmetic(0, 1).tokenizer())
    tokenizer.save_pretrained(model)
    text = "1+2="
    while len(tokenizer(text).input_ids) < shape.prompt_tokens:
        text = "1+2=" + text
    rows.write_text("".join(json.dumps({"prompt": text[:-1] + str(n % 10)}) + "\n" for n in range(200)))
    return [
        *("custom", "--model", str(model), "--data", str(rows), "--reward", "length:32"),
        *("--data.chat-template", "none"),
        *("--data.eval-prompts", "0", "--steps", "3", "--prompts-per-step", str(max(shape.rows // 8, 1))),
        *("--group-size", "8", "--rollout.workers", "1", "--rollout.max-running-requests", str(shape.rows)),
        *("--rollout.max-new-tokens", str(shape.new_tokens), "--data.max-prompt-tokens", str(shape.prompt_tokens + 2)),
        *("--trainer.micro-batch-tokens", "1000000", "--algorithm.kl.coef", "0.01", "--checkpoint.every", "3"),
        *("--trainer.save", "False", *shape.flags, "--run-dir", str(folder / "run")),
    ]


def peaks(arguments: list[str]) -> dict[str, int]:
    """Peak memory in bytes of a process of each role. Raises RuntimeError if the run fails, or has none of a role."""
    run = subprocess.Popen([*FLOWRT, "run", *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    highest = dict.fromkeys(ROLES, 0)
    end_s = time.monotonic() + DEADLINE_S
    while run.poll() is None and time.monotonic() < end_s:
        for process in psutil.Process(run.pid).children(recursive=True):
            with contextlib.suppress(OSError, ValueError, psutil.Error):  # it has ended
                # The words of a forked process are one text.
                words, peak = " ".join(process.cmdline()).split(), peak_bytes(process.pid)
                for role in [role for role, module in ROLES.items() if module in words]:
                    highest[role] = max(highest[role], peak)
        time.sleep(POLL_S)
    output = run.communicate(timeout=DEADLINE_S)[0]
    if run.returncode != 0:
        raise RuntimeError(f"flowrt run {' '.join(arguments)} ended with exit code {run.returncode}: {output[-2000:]}")
    if unseen := [role for role, peak in highest.items() if not peak]:
        raise RuntimeError(f"no process of {' and '.join(unseen)} was seen in {' '.join(arguments)}")
    return highest


def of_shape(name: str) -> Part:
    """The measurement of a shape."""

    def measure(options: Options) -> Figures:
        if options.quick and name not in QUICK:
            raise Skipped("a quick run has the smallest shapes")
        with tempfile.TemporaryDirectory() as folder:
            arguments = prepare(SHAPES[name], Path(folder))
            config = parse(arguments)
            needs = estimate(config, shape_of(config))
            estimated = {
                "trainer": needs.trainer_rank + needs.trainer_first + needs.trainer_device,
                "rollout": needs.rollout,
                "reference": needs.reference + needs.reference_device,
            }
            measured = peaks(arguments)
        metrics = {f"estimate_error_{name}": max(abs(estimated[role] / measured[role] - 1.0) for role in ROLES)}
        for role in ROLES:
            metrics[f"estimate_gb_{name}_{role}"] = estimated[role] / 1e9
            metrics[f"peak_gb_{name}_{role}"] = measured[role] / 1e9
        return metrics

    return measure


def largest_error(metrics: Figures) -> Figures:
    """The largest error of the shapes that were measured, and their number."""
    errors = [metrics[f"estimate_error_{name}"] for name in SHAPES if f"estimate_error_{name}" in metrics]
    return {"estimate_error_max": max(errors, default=0.0), "estimate_shapes": float(len(errors))}


BENCH = Bench(
    about=__doc__,
    parts={name: of_shape(name) for name in SHAPES},
    most={"estimate_error_max": 0.2},
    derived=largest_error,
)

if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(BENCH.main())
