"""Groups of four under any order of their members: every batch consists of whole groups."""

from hypothesis import given
from hypothesis import strategies as st

from flowrt.controller.policies.batching import GroupCount
from flowrt.protocol import messages as m
from flowrt.protocol.messages import Part, Values
from tests.simulation.core_driver import CoreDriver
from tests.simulation.scenario import leases_of, offered_lengths

PROMPTS, MEMBERS = 4, 4
SLOTS = PROMPTS * MEMBERS


@given(st.permutations(range(SLOTS)), st.permutations(range(SLOTS)), st.integers(1, PROMPTS), st.data())
def test_batches_are_whole_groups_in_any_order(
    generated: list[int], scored: list[int], groups: int, data: st.DataObject
) -> None:
    """Samples are generated in one order and scored in another; the trainer always has a pull parked."""
    driver = CoreDriver(members=MEMBERS, groups_per_step=PROMPTS, batcher=GroupCount(groups), bound=0)
    cut = data.draw(st.integers(1, PROMPTS - 1))
    for number, prompts in enumerate((range(cut), range(cut, PROMPTS))):
        lengths = offered_lengths(4, 1, prompts=len(prompts))
        driver.send(
            "source0",
            m.Offer(
                request=number,
                flow="train",
                prompts=tuple(prompts),
                epoch=0,
                members=MEMBERS,
                at_least=0,
                lengths=lengths,
                tags=(),
            ),
        )
    trainer = Trainer(driver, groups)
    [(_, grant)] = driver.sent(
        driver.send("rollout0", m.Pull(request=1, stage="rollout", slots=SLOTS, tokens=0, step=-1)), m.Grant
    )
    assert grant.prompts == tuple(prompt for prompt in range(PROMPTS) for _ in range(MEMBERS))
    waiting: list[m.Grant] = []
    complete: set[int] = set()
    for slot in generated:
        parts = tuple(Part(column, (slot,), (3,)) for column in ("response", "logprobs"))
        driver.send(
            "rollout0",
            m.Commit(
                request=2,
                stage="rollout",
                slots=(slot,),
                leases=(grant.lease,),
                parts=parts,
                inline=(),
                spans=((0, 3),),
            ),
        )
        waiting += [
            reward_grant
            for _, reward_grant in driver.sent(
                driver.send("reward0", m.Pull(request=3, stage="reward", slots=1, tokens=0, step=-1)), m.Grant
            )
        ]
    leases = {reward_grant.slots[0]: reward_grant for reward_grant in waiting}
    for slot in scored:
        reward = (Values("reward", (1.0,)),)
        commit = m.Commit(
            request=4, stage="reward", slots=(slot,), leases=leases_of(leases[slot]), parts=(), inline=reward, spans=()
        )
        trainer.receive(driver.sent(driver.send("reward0", commit), m.Grant))
        complete.add(slot)
        whole = [g for g in range(PROMPTS) if set(range(g * MEMBERS, (g + 1) * MEMBERS)) <= complete]
        assert set(trainer.prompts) <= set(whole)
        full = len(whole) - len(whole) % groups if len(whole) < PROMPTS else PROMPTS
        assert len(trainer.prompts) == full, "a full batch was not granted"


class Trainer:
    """Always has a pull parked; records its granted prompts, and asserts that their groups are whole."""

    def __init__(self, driver: CoreDriver, groups: int) -> None:
        self.driver = driver
        self.groups = groups
        self.prompts: list[int] = []
        self.pull()

    def pull(self) -> None:
        self.receive(
            self.driver.sent(
                self.driver.send("trainer0", m.Pull(request=1, stage="train", slots=0, tokens=0, step=0)), m.Grant
            )
        )

    def receive(self, grants: list[tuple[str, m.Grant]]) -> None:
        for _, grant in grants:
            if grant.closed:
                continue
            prompts = list(dict.fromkeys(grant.prompts))
            assert len(prompts) <= self.groups
            assert grant.prompts == tuple(prompt for prompt in prompts for _ in range(MEMBERS))
            assert grant.members == tuple(range(MEMBERS)) * len(prompts)
            assert not set(prompts) & set(self.prompts)
            self.prompts += prompts
            self.pull()
