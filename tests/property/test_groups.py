"""Groups of four under any order of their members: no batch mixes a group with a part of another, or holds a part."""

from hypothesis import given
from hypothesis import strategies as st

from flowrt.controller.batchers import GroupCount
from flowrt.testing.scenario import leases_of, offered_lengths
from flowrt.testing.talk import Talk
from flowrt.wire import messages as m
from flowrt.wire.records import Part, Values

PROMPTS, MEMBERS = 4, 4
SLOTS = PROMPTS * MEMBERS


@given(st.permutations(range(SLOTS)), st.permutations(range(SLOTS)), st.integers(1, PROMPTS), st.data())
def test_batches_are_whole_groups_in_any_order(
    made: list[int], judged: list[int], groups: int, data: st.DataObject
) -> None:
    """Samples are made in one order and judged in another; the trainer always has a pull parked."""
    talk = Talk(members=MEMBERS, groups_per_step=PROMPTS, batcher=GroupCount(groups), bound=0)
    cut = data.draw(st.integers(1, PROMPTS - 1))
    for number, prompts in enumerate((range(cut), range(cut, PROMPTS))):
        lengths = offered_lengths(4, 1, prompts=len(prompts))
        talk.say("source0", m.Offer(number, "train", tuple(prompts), 0, MEMBERS, 0, lengths, ()))
    trained = Trainer(talk, groups)
    [(_, grant)] = talk.heard(talk.say("rollout0", m.Pull(1, "rollout", SLOTS, 0, -1)), m.Grant)
    assert grant.prompts == tuple(prompt for prompt in range(PROMPTS) for _ in range(MEMBERS))
    waiting: list[m.Grant] = []
    complete: set[int] = set()
    for slot in made:
        parts = tuple(Part(column, (slot,), (3,)) for column in ("response", "logprobs"))
        talk.say("rollout0", m.Commit(2, "rollout", (slot,), (grant.lease,), parts, (), ((0, 3),)))
        waiting += [one for _, one in talk.heard(talk.say("reward0", m.Pull(3, "reward", 1, 0, -1)), m.Grant)]
    leases = {one.slots[0]: one for one in waiting}
    for slot in judged:
        reward = (Values("reward", (1.0,)),)
        commit = m.Commit(4, "reward", (slot,), leases_of(leases[slot]), (), reward, ())
        trained.hear(talk.heard(talk.say("reward0", commit), m.Grant))
        complete.add(slot)
        whole = [g for g in range(PROMPTS) if set(range(g * MEMBERS, (g + 1) * MEMBERS)) <= complete]
        assert set(trained.prompts) <= set(whole)
        full = len(whole) - len(whole) % groups if len(whole) < PROMPTS else PROMPTS
        assert len(trained.prompts) == full, "a full batch waits for nothing"


class Trainer:
    """Always has a pull parked; notes which prompts it was granted and that their groups are whole."""

    def __init__(self, talk: Talk, groups: int) -> None:
        self.talk = talk
        self.groups = groups
        self.prompts: list[int] = []
        self.pull()

    def pull(self) -> None:
        self.hear(self.talk.heard(self.talk.say("trainer0", m.Pull(1, "train", 0, 0, 0)), m.Grant))

    def hear(self, grants: list[tuple[str, m.Grant]]) -> None:
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
