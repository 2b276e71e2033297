"""The reward worker: decodes responses and checks their answers."""

from flowrt.workers.entry import main

from flowrt.client.batches import Batch
from flowrt.client.session import Session
from flowrt.engines.checkpoint import load_tokenizer
from flowrt.recipes.config import RunConfig
from flowrt.recipes.paths import model_dir
from flowrt.recipes.subjects import subject

SLOTS_AT_ONCE = 256


async def run(session: Session, config: RunConfig) -> None:
    """Score whatever has a response, as soon as it has one."""
    with session.timeline.busy("load"):
        subject_ = subject(config)
        tokenizer = load_tokenizer(model_dir(config))

    def rewards(batch: Batch) -> list[float]:
        scored = []
        for tokens, answer in zip(batch.tensors["response"], batch.tensors["answer"], strict=True):
            ids = tokens.tolist()
            # A response that was cut off has not answered yet, in most recipes.
            complete = subject_.scores_unfinished or (bool(ids) and ids[-1] == tokenizer.eos_token_id)
            text = tokenizer.decode(ids, skip_special_tokens=True) if complete else ""
            scored.append(subject_.reward(text, bytes(answer.tolist()).decode()))
        return scored

    while True:
        batch = await session.pull("reward", slots=SLOTS_AT_ONCE)
        with session.timeline.busy("reward"):
            scored = rewards(batch)
        await session.commit("reward", batch.slots, batch.leases, inline={"reward": scored})


if __name__ == "__main__":
    main("reward", run, drains=True)
