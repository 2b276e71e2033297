"""A loop of your own on `flowrt.api`, without a recipe: a three-armed bandit with one dataflow and four roles."""

import torch

from flowrt import api

ARMS, BEST, STEPS, GROUPS, MEMBERS = 3, 2, 40, 4, 8
COLUMNS = (api.Column("question", "int64", "group"), api.Column("choice", "int64", "slot"))
PLAY = api.Stage("play", needs=("question",), makes=("choice",), generates=True)
JUDGE = api.Stage("judge", needs=("choice",), makes=("reward",))
LEARN = api.Stage("learn", needs=("choice", "reward"), makes=(), flow="train", whole_groups=True)
FLOW = api.Dataflow(COLUMNS, (PLAY, JUDGE, LEARN), "learn", "train", token_columns=("choice",))
SETTINGS = api.Settings(steps=STEPS, groups_per_step=GROUPS, completing_roles=("learner",), model="arms")
POLICIES = api.Policies(api.StrictLag(1), api.Fifo(), api.TokenBudget(MEMBERS), api.DelayedUpdate())


async def source(session: api.Session) -> None:
    prompt = 0  # each is offered once in an epoch
    while await session.offer("train", prompt, 0, MEMBERS, {"question": torch.zeros(1, dtype=torch.int64)}) is not None:
        prompt += 1


async def player(session: api.Session) -> None:
    weights = {"logits": torch.zeros(ARMS)}
    versions = [0]

    def swap(snapshot: api.Snapshot) -> None:
        snapshot.restore(weights)
        versions.append(snapshot.version)

    session.params.applied("arms", 0)
    while batch := await api.pull_between(session, "play", MEMBERS, swap):
        choices = torch.multinomial(weights["logits"].softmax(0), len(batch), replacement=True).split(1)
        spans = [(versions[-1], 1)] * len(batch)
        await session.commit("play", batch.slots, batch.leases, {"choice": choices}, spans=spans)


async def judge(session: api.Session) -> None:
    while batch := await session.pull("judge", slots=64):
        rewards = [float(choice == BEST) for choice in batch.tensors["choice"]]
        await session.commit("judge", batch.slots, batch.leases, inline={"reward": rewards})


async def learner(session: api.Session) -> None:
    logits = torch.zeros(ARMS)
    for step in range(STEPS):
        while not (batch := await session.pull("learn", slots=0, step=step)).closed:
            advantages = torch.tensor(batch.inline["reward"]) - sum(batch.inline["reward"]) / len(batch)
            for choice, advantage in zip(batch.tensors["choice"], advantages, strict=True):
                logits += 0.1 * advantage * (torch.nn.functional.one_hot(choice[0], ARMS) - logits.softmax(0))
        session.step_done(step, {})
        await session.params.publish("arms", api.Snapshot.take(step + 1, {"logits": logits}))
    print(f"probability of the paying arm: {logits.softmax(0)[BEST]:.2f}")
    session.finished()


if __name__ == "__main__":
    roles = {"source": source, "player": player, "judge": judge, "learner": learner}
    api.run_loop(api.run_roles(FLOW, SETTINGS, POLICIES, roles))
