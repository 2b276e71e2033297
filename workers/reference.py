"""The reference worker: log-probabilities of responses under the weights that the run started from."""

import asyncio

from flowrt.workers.entry import main

from flowrt.client.session import Session
from flowrt.engines.checkpoint import load_model
from flowrt.engines.folded_attention import use_folded
from flowrt.engines.scoring import score
from flowrt.recipes.config import RunConfig
from flowrt.recipes.paths import model_dir

SLOTS_AT_ONCE = 64


async def run(session: Session, config: RunConfig) -> None:
    """Score whatever has a response, as soon as it has one."""
    with session.timeline.busy("load"):
        model = (await asyncio.to_thread(load_model, model_dir(config))).eval()
        if config.trainer.share_prompts:
            await asyncio.to_thread(use_folded, model)
    # One sample at a time has the same shapes, and so the same bits, whatever was pulled with it.
    budget_tokens = 1 if config.deterministic else config.trainer.forward_tokens
    while True:
        batch = await session.pull("reference", slots=SLOTS_AT_ONCE)
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


if __name__ == "__main__":
    main("reference", run, drains=True)
