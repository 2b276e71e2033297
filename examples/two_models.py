"""Two named models, an actor and a critic whose weights travel by themselves: a bandit whose best arm is the prompt."""

import torch

from flowrt import api

ARMS, STEPS, PROMPTS = 3, 40, 16
COLUMNS = (api.Column("prompt", "int64", "group"), api.Column("choice", "int64", "slot"))
PLAY = api.Stage("play", needs=("prompt",), makes=("choice",), generates=True)
JUDGE = api.Stage("judge", needs=("prompt", "choice"), makes=("reward",))
ESTIMATE = api.Stage("estimate", needs=("prompt",), makes=("value",))
LEARN_FROM = ("prompt", "choice", "reward", "value")
LEARN = api.Stage("learn", needs=LEARN_FROM, makes=(), flow="train", whole_groups=True)
FLOW = api.Dataflow(COLUMNS, (PLAY, JUDGE, ESTIMATE, LEARN), "learn", "train", token_columns=("choice",))
SETTINGS = api.Settings(
    steps=STEPS, groups_per_step=PROMPTS, completing_roles=("learner",), model="actor", more_models=("critic",)
)
POLICIES = api.Policies(api.StrictLag(1), api.Fifo(), api.TokenBudget(PROMPTS), api.DelayedUpdate())


async def source(session: api.Session) -> None:
    number = 0
    while await session.offer("train", number, 0, 1, {"prompt": torch.tensor([number % ARMS])}) is not None:
        number += 1


async def actor(session: api.Session) -> None:
    weights, versions = {"logits": torch.zeros(ARMS, ARMS)}, [0]

    def swap(snapshot: api.Snapshot) -> None:
        snapshot.restore(weights)
        versions.append(snapshot.version)

    session.params.applied("actor", 0)
    while batch := await api.pull_between(session, "play", PROMPTS, swap):
        logits = weights["logits"][torch.cat(batch.tensors["prompt"])]
        choices = torch.multinomial(logits.softmax(1), 1).flatten().split(1)
        await session.commit(
            "play", batch.slots, batch.leases, {"choice": choices}, spans=[(versions[-1], 1)] * len(batch)
        )


async def judge(session: api.Session) -> None:
    while batch := await session.pull("judge", slots=64):
        pairs = zip(batch.tensors["prompt"], batch.tensors["choice"], strict=True)
        rewards = [float(prompt == choice) for prompt, choice in pairs]
        await session.commit("judge", batch.slots, batch.leases, inline={"reward": rewards})


async def critic(session: api.Session) -> None:
    weights = {"values": torch.zeros(ARMS)}
    session.params.applied("critic", 0)
    while batch := await session.pull("estimate", slots=64):
        if staged := session.params.staged("critic"):
            staged.snapshot.restore(weights)
            session.params.applied("critic", staged.snapshot.version)
        values = weights["values"][torch.cat(batch.tensors["prompt"])].tolist()
        await session.commit("estimate", batch.slots, batch.leases, inline={"value": values})


async def learner(session: api.Session) -> None:
    logits, values = torch.zeros(ARMS, ARMS), torch.zeros(ARMS)
    for step in range(STEPS):
        while not (batch := await session.pull("learn", slots=0, step=step)).closed:
            prompts, choices = torch.cat(batch.tensors["prompt"]), torch.cat(batch.tensors["choice"])
            rewards, baselines = torch.tensor(batch.inline["reward"]), torch.tensor(batch.inline["value"])
            scores = torch.nn.functional.one_hot(choices, ARMS) - logits[prompts].softmax(1)
            logits.index_add_(0, prompts, 0.3 * (rewards - baselines).unsqueeze(1) * scores)
            values.index_add_(0, prompts, 0.05 * (rewards - values[prompts]))
        session.step_done(step, {})
        await session.params.publish("actor", api.Snapshot.take(step + 1, {"logits": logits}))
        await session.params.publish("critic", api.Snapshot.take(step + 1, {"values": values}))
    print(f"probability of the paying arm: {logits.softmax(1).diagonal().mean():.2f}")
    print(f"expected by the critic: {values.mean():.2f}")
    session.finished()


if __name__ == "__main__":
    roles = {"source": source, "actor": actor, "judge": judge, "critic": critic, "learner": learner}
    api.run_loop(api.run_roles(FLOW, SETTINGS, POLICIES, roles))
