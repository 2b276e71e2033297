"""Row `invariance`: the gradient of a whole model by every engine and cut, against a plain loop over single samples.

For each method: one pass or many, packed or padded, one micro-batch or one a group, one or two ranks of the torch and
the FSDP2 engine, whose parameters are gathered once a step or in each pass. The gradient of every optimiser step of the
training step is compared, relative to its norm, and the loss that is reported, relative to 1. A plain loop gives the
first update; a method with several is compared with the engine on one rank, padded.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from flowrt.algorithms.algorithm import Algorithm
from flowrt.engines.options import TrainOptions
from flowrt.engines.torch.trainer import TorchTrainer
from objectives_rows import invariance_rank
from objectives_rows.presets import presets
from objectives_rows.steps import (
    GROUPS,
    LIMIT,
    TEMPERATURE,
    make_model,
    make_step,
    options,
    plain_gradient,
    run_step,
    save_model,
)

WHOLE = [list(range(GROUPS))]
SINGLE = [[group] for group in range(GROUPS)]
WAYS: dict[str, tuple[TrainOptions, list[list[int]]]] = {
    "padded": (options(share_prompts=False), WHOLE),
    "packed": (options(), WHOLE),
    "padded, cut": (options(share_prompts=False, forward_tokens=24), SINGLE),
    "packed, cut": (options(forward_tokens=24), SINGLE),
}
QUICK = ("reinforce", "grpo", "dr_grpo", "gspo", "cispo", "sequence_tis", "dpo_online")
RANKS_TIMEOUT_S = 500.0

Found = dict[str, tuple[list[Tensor], float]]
"""By the way it was computed: the gradient of each update, and the reported loss."""


def torch_engine(algorithm: Algorithm, way: str) -> tuple[list[Tensor], float]:
    """The gradients and the loss of the step, by the engine on plain PyTorch, on one rank."""
    model = make_model()
    batch = make_step(model).batch(algorithm)
    train_options, cuts = WAYS[way]
    engine = TorchTrainer(model, train_options, algorithm, temperature=TEMPERATURE)
    seen: list[Tensor] = []
    engine.on_gradient = lambda gradient: seen.append(gradient.clone())
    metrics = run_step(engine, batch, cuts)
    return seen, metrics["loss"]


def of_ranks(names: Sequence[str], folder: Path) -> dict[str, Found]:
    """The same by two ranks, and by FSDP2, for each method; one torchrun for all of it."""
    model, out = folder / "model", folder / "found"
    save_model(model)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    paths = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    ended = subprocess.run(
        [*command, invariance_rank.__file__, str(model), str(out), *names],
        timeout=RANKS_TIMEOUT_S,
        env={**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONPATH": paths},
        capture_output=True,
        text=True,
    )
    if ended.returncode:
        raise RuntimeError(f"the ranks of the row invariance failed:\n{ended.stderr[-4000:]}")
    gradients = load_file(out.with_suffix(".safetensors"))
    losses: dict[str, dict[str, float]] = json.loads(out.with_suffix(".json").read_text())
    return {
        name: {
            way: ([gradients[key] for key in sorted(gradients) if key.startswith(f"{name}/{way}/")], loss)
            for way, loss in losses[name].items()
        }
        for name in names
    }


def distances(algorithm: Algorithm, found: Mapping[str, tuple[list[Tensor], float]]) -> dict[str, float]:
    """Distance of each way from the plain loop, or from the first way if there are several updates."""
    gradients, loss = next(iter(found.values()))
    if algorithm.plan.optimizer_steps == 1:
        gradient, loss = plain_gradient(algorithm)
        gradients = [gradient]
    return {way: max(_apart(gradients, seen), abs(reported - loss)) for way, (seen, reported) in found.items()}


def _apart(expected: Sequence[Tensor], seen: Sequence[Tensor]) -> float:
    if len(expected) != len(seen):
        return float("inf")
    return max(float((one - other).norm() / one.norm()) for one, other in zip(expected, seen, strict=True))


def measure_all(names: Sequence[str] | None = None) -> dict[str, dict[str, float]]:
    """Distances of each way, for each method, or for these."""
    algorithms = presets(LIMIT)
    chosen = list(names or algorithms)
    with tempfile.TemporaryDirectory(prefix="flowrt-bench-") as folder:
        ranks = of_ranks(chosen, Path(folder))
    return {
        name: distances(algorithms[name], {way: torch_engine(algorithms[name], way) for way in WAYS} | ranks[name])
        for name in chosen
    }


def measure(quick: bool) -> dict[str, float]:
    """The largest distance, and how much was compared."""
    torch.set_num_threads(1)
    found = measure_all(QUICK if quick else None)
    return {
        "invariance_max": max(value for ways in found.values() for value in ways.values()),
        "invariance_methods": float(len(found)),
        "invariance_ways": float(len(next(iter(found.values())))),
    }
