"""Two ranks of a trainer: each sees its share of a fixed step, and the first writes its gradient."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist

from flowrt.algorithms.objective import Kl, Objective
from flowrt.engines.base import TrainingBatch
from flowrt.engines.options import TrainOptions
from flowrt.engines.tiny_model import build_model
from flowrt.engines.torch.trainer import TorchTrainer
from tests.integration.helpers.forked_ranks import run_ranks

SAMPLES = 24


def step_gradient(cuts: list[list[int]], double: bool) -> torch.Tensor:
    """The gradient [parameters] of one step whose samples come in these micro-batches."""
    torch.set_num_threads(1)
    dtype = torch.float64 if double else torch.float32
    model = build_model(
        vocab_size=32, hidden_size=64, layers=2, heads=2, intermediate_size=128, max_length=64, seed=3
    ).to(dtype)
    # A learning rate of 0 leaves the weights; no clipping leaves the gradient.
    trainer = TorchTrainer(model, TrainOptions(lr=0.0, max_grad_norm=1e9), Objective(kl=Kl(1e-3)), temperature=1.0)
    gradients: list[torch.Tensor] = []
    trainer.on_gradient = lambda gradient: gradients.append(gradient.clone())
    generator = torch.Generator().manual_seed(5)
    lengths = torch.randint(1, 20, (SAMPLES, 2), generator=generator).tolist()
    prompts = [torch.randint(2, 32, (p,), generator=generator) for p, _ in lengths]
    responses = [torch.randint(2, 32, (r,), generator=generator) for _, r in lengths]
    rollout = [-3.5 + 0.3 * torch.randn(r, generator=generator) for _, r in lengths]
    reference = [-3.5 + 0.3 * torch.randn(r, generator=generator) for _, r in lengths]
    advantages_N = torch.randn(SAMPLES, generator=generator)
    for cut in cuts:
        trainer.accumulate(
            TrainingBatch(
                prompts=[prompts[i] for i in cut],
                responses=[responses[i] for i in cut],
                rollout_logprobs=[rollout[i].to(dtype) for i in cut],
                reference_logprobs=[reference[i].to(dtype) for i in cut],
                advantages_N=advantages_N[cut].to(dtype),
                weights_N=torch.ones(len(cut), dtype=dtype),
                groups_N=torch.zeros(len(cut), dtype=torch.int64),
            )
        )
    trainer.step()
    return gradients[0]


def run_rank(store: dist.Store, rank: int, out: Path, dtype: str) -> None:
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    # Uneven shares, in smaller micro-batches on one rank: ranks pull at their own speed.
    mine = list(range(5)) if rank == 0 else list(range(5, SAMPLES))
    cuts = [mine] if rank == 0 else [mine[i : i + 3] for i in range(0, len(mine), 3)]
    gradient = step_gradient(cuts, double=dtype == "double")
    if rank == 0:
        torch.save(gradient, out)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    run_ranks(2, lambda store, rank: run_rank(store, rank, Path(sys.argv[1]), sys.argv[2]))
