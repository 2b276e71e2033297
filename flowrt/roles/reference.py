"""The reference role: log-probabilities of responses under the run's initial weights."""

import asyncio
import os
from collections.abc import Sequence
from typing import Any

import torch

from flowrt.client.session import Session
from flowrt.engines.hf import load_model
from flowrt.engines.training.forward import score
from flowrt.engines.training.fused_head import enable_fused_head
from flowrt.engines.training.shared_prefix import enable_packing
from flowrt.ids import REFERENCE
from flowrt.recipes.config import RunConfig
from flowrt.recipes.constraints import reference_dtype
from flowrt.recipes.run_dir import model_dir
from flowrt.roles.main import main
from flowrt.transport.devices import Device, choose

MAX_PULL_SLOTS = 64


async def run(session: Session, config: RunConfig) -> None:
    """Score responses with the initial model until the run ends; commits ``ref_logprobs`` ([T] float32 a slot)."""
    device = choose(config.reference.device, int(os.environ.get("LOCAL_RANK", "0")))
    with session.timeline.busy("load"):
        model = await asyncio.to_thread(load_reference, config, device)
    # One sample per pass: its shapes, hence its rounding, do not depend on what was pulled with it.
    budget_tokens = 1 if config.deterministic else config.trainer.forward_tokens
    while True:
        batch = await session.pull("reference", slots=MAX_PULL_SLOTS)
        with session.timeline.busy("reference"):
            logprobs = await asyncio.to_thread(
                score_on,
                device,
                model,
                batch.tensors["prompt"],
                batch.tensors["response"],
                config.rollout.temperature,
                budget_tokens,
            )
        await session.commit("reference", batch.slots, batch.leases, {"ref_logprobs": logprobs})


def load_reference(config: RunConfig, device: Device) -> Any:
    """The reference model: the initial model on ``device``, in the configured dtype."""
    device.use()
    dtype: torch.dtype = getattr(torch, reference_dtype(config))
    model = load_model(model_dir(config), str(device.torch), dtype).eval()
    if config.trainer.share_prompts:
        enable_packing(model)
    enable_fused_head(model)
    return model


def score_on(
    device: Device,
    model: Any,
    prompts: Sequence[torch.Tensor],
    responses: Sequence[torch.Tensor],
    temperature: float,
    budget_tokens: int,
) -> list[torch.Tensor]:
    """As `score`, in any thread; the log-probabilities are on the CPU."""
    device.use()
    return [one.cpu() for one in score(model, prompts, responses, temperature, budget_tokens)]


def start() -> None:
    """Entry point of the worker process."""
    main(REFERENCE, run, drains=True)


if __name__ == "__main__":
    start()
