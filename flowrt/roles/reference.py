"""The reference role: log-probabilities of responses under the run's initial weights."""

import asyncio

from flowrt.client.session import Session
from flowrt.engines.hf import load_model
from flowrt.engines.training.forward import score
from flowrt.engines.training.shared_prefix import enable_packing
from flowrt.ids import REFERENCE
from flowrt.recipes.config import RunConfig
from flowrt.recipes.run_dir import model_dir
from flowrt.roles.main import main

MAX_PULL_SLOTS = 64


async def run(session: Session, config: RunConfig) -> None:
    """Score responses with the initial model until the run ends; commits ``ref_logprobs`` ([T] float32 a slot)."""
    with session.timeline.busy("load"):
        model = (await asyncio.to_thread(load_model, model_dir(config))).eval()
        if config.trainer.share_prompts:
            await asyncio.to_thread(enable_packing, model)
    # One sample per pass: its shapes, hence its rounding, do not depend on what was pulled with it.
    budget_tokens = 1 if config.deterministic else config.trainer.forward_tokens
    while True:
        batch = await session.pull("reference", slots=MAX_PULL_SLOTS)
        with session.timeline.busy("reference"):
            logprobs = await asyncio.to_thread(
                score,
                model,
                batch.tensors["prompt"],
                batch.tensors["response"],
                config.rollout.temperature,
                budget_tokens,
            )
        await session.commit("reference", batch.slots, batch.leases, {"ref_logprobs": logprobs})


def start() -> None:
    """Entry point of the worker process."""
    main(REFERENCE, run, drains=True)


if __name__ == "__main__":
    start()
