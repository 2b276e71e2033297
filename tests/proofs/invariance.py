"""The gradient of a whole model, by every engine and batching, against a loop over single samples.

For each objective: one pass or many, packed or padded, one micro-batch or one per group, and one or two ranks of the
torch and the FSDP2 engine, whose parameters are gathered once per step or in each pass. Compared are the gradient of
every optimiser update of the step, relative to its norm, and the reported loss, as an absolute difference. The loop
computes only the first update; an objective with several updates is compared with the padded engine on one rank.
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
from tests.proofs import invariance_rank
from tests.proofs.presets import presets
from tests.proofs.steps import (
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

Results = dict[str, tuple[list[Tensor], float]]
"""By the name of the way of computation: the gradient of each update, and the reported loss."""


def torch_engine(algorithm: Algorithm, way: str) -> tuple[list[Tensor], float]:
    """The flat gradient of each update and the reported loss of the step, by the torch engine on one rank.

    Args:
        algorithm: the objective.
        way: a key of `WAYS`.
    """
    model = make_model()
    batch = make_step(model).batch(algorithm)
    train_options, cuts = WAYS[way]
    engine = TorchTrainer(model, train_options, algorithm, temperature=TEMPERATURE)
    recorded: list[Tensor] = []
    engine.on_gradient = lambda gradient: recorded.append(gradient.clone())
    metrics = run_step(engine, batch, cuts)
    return recorded, metrics["loss"]


def gradients_of_ranks(names: Sequence[str], folder: Path) -> dict[str, Results]:
    """The gradients and losses by two ranks and by FSDP2, for each objective, from one torchrun.

    Args:
        names: the objectives, of `presets`.
        folder: directory for the model and the results.

    Raises RuntimeError if a rank fails.
    """
    model, out = folder / "model", folder / "found"
    save_model(model)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    paths = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    process = subprocess.run(
        [*command, invariance_rank.__file__, str(model), str(out), *names],
        timeout=RANKS_TIMEOUT_S,
        env={**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONPATH": paths},
        capture_output=True,
        text=True,
    )
    if process.returncode:
        raise RuntimeError(f"the ranks failed:\n{process.stderr[-4000:]}")
    gradients = load_file(out.with_suffix(".safetensors"))
    losses: dict[str, dict[str, float]] = json.loads(out.with_suffix(".json").read_text())
    return {
        name: {
            way: ([gradients[key] for key in sorted(gradients) if key.startswith(f"{name}/{way}/")], loss)
            for way, loss in losses[name].items()
        }
        for name in names
    }


def distances(algorithm: Algorithm, computed: Mapping[str, tuple[list[Tensor], float]]) -> dict[str, float]:
    """The larger distance, of gradients or loss, of each way from the loop; with several updates, from the first."""
    gradients, loss = next(iter(computed.values()))
    if algorithm.plan.optimizer_steps == 1:
        gradient, loss = plain_gradient(algorithm)
        gradients = [gradient]
    return {
        way: max(_distance(gradients, recorded), abs(reported - loss)) for way, (recorded, reported) in computed.items()
    }


def _distance(expected: Sequence[Tensor], recorded: Sequence[Tensor]) -> float:
    if len(expected) != len(recorded):
        return float("inf")
    return max(
        float((gradient - other).norm() / gradient.norm()) for gradient, other in zip(expected, recorded, strict=True)
    )


def measure_all(names: Sequence[str] | None = None) -> dict[str, dict[str, float]]:
    """The distances of each way, for each objective of ``names``; None: for all."""
    algorithms = presets(LIMIT)
    chosen = list(names or algorithms)
    with tempfile.TemporaryDirectory(prefix="flowrt-bench-") as folder:
        ranks = gradients_of_ranks(chosen, Path(folder))
    return {
        name: distances(algorithms[name], {way: torch_engine(algorithms[name], way) for way in WAYS} | ranks[name])
        for name in chosen
    }


def measure(quick: bool) -> dict[str, float]:
    """The largest distance, and the numbers of objectives and of ways."""
    torch.set_num_threads(1)
    differences = measure_all(QUICK if quick else None)
    return {
        "invariance_max": max(value for ways in differences.values() for value in ways.values()),
        "invariance_methods": float(len(differences)),
        "invariance_ways": float(len(next(iter(differences.values())))),
    }
