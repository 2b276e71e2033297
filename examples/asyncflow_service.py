"""A three-armed bandit, trained with the five service calls of AsyncFlow alone (`flowrt.asyncflow`)."""

import asyncio

import torch

from flowrt import asyncflow

ARMS, BEST, STEPS, PROMPTS, SAMPLES = 3, 2, 40, 4, 8
COLUMNS = (asyncflow.Column("prompt", "int64", "group"), asyncflow.Column("response", "int64", "slot"))
ROLLOUT = asyncflow.Stage("actor_rollout", needs=("prompt",), makes=("response",), generates=True)
REWARD = asyncflow.Stage("reward", needs=("response",), makes=("reward",))
UPDATE = asyncflow.Stage(
    "actor_update", needs=("response", "reward"), makes=(), flow=asyncflow.PROMPTS, whole_groups=True
)


async def data(calls: asyncflow.Service) -> None:
    prompts = [torch.zeros(1, dtype=torch.int64) for _ in range(PROMPTS)]
    while await calls.put_prompts_data({"prompt": prompts}, samples=SAMPLES):
        pass


async def rollout(calls: asyncflow.Service) -> None:
    weights = {"logits": torch.zeros(ARMS)}
    while batch := await calls.get_experience_data("actor_rollout", SAMPLES, weights):
        choices = torch.multinomial(weights["logits"].softmax(0), len(batch), replacement=True)
        await calls.put_experience_data("actor_rollout", batch, {"response": choices.split(1)})


async def reward(calls: asyncflow.Service) -> None:
    while batch := await calls.get_experience_data("reward", 64):
        rewards = [float(choice == BEST) for choice in batch.tensors["response"]]
        await calls.put_experience_data("reward", batch, {"reward": rewards})


async def update(calls: asyncflow.Service) -> None:
    logits = torch.zeros(ARMS)
    for _ in range(STEPS):
        while not (batch := await calls.get_experience_data("actor_update")).closed:
            advantages = torch.tensor(batch.inline["reward"]) - sum(batch.inline["reward"]) / len(batch)
            for choice, advantage in zip(batch.tensors["response"], advantages, strict=True):
                logits += 0.1 * advantage * (torch.nn.functional.one_hot(choice[0], ARMS) - logits.softmax(0))
        await calls.weight_sync_notify({"logits": logits})
    print(f"probability of the paying arm: {logits.softmax(0)[BEST]:.2f}")


if __name__ == "__main__":
    engines = {"data": data, "rollout": rollout, "reward": reward, "actor_update": update}
    tasks = (ROLLOUT, REWARD, UPDATE)
    asyncio.run(
        asyncflow.init_engines(
            COLUMNS, tasks, engines, update="actor_update", steps=STEPS, prompts_per_step=PROMPTS, micro_batch_tokens=8
        )
    )
