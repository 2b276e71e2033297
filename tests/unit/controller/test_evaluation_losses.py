"""Lost samples of an evaluation are made again under every policy; the source is notified of dropped groups."""

import pytest

from flowrt.controller.events import Command, WorkerDisconnected
from flowrt.controller.settings import OnLostSample
from flowrt.ids import WorkerId
from flowrt.protocol import messages as m
from flowrt.protocol.messages import Part
from tests.simulation.core_driver import CoreDriver
from tests.simulation.scenario import leases_of, offered_lengths

MEMBERS = 3


def evaluate(driver: CoreDriver, request: int = 0) -> list[Command]:
    """Offer a prompt for an evaluation of version 0."""
    offer = m.Offer(
        request=request,
        flow="eval",
        prompts=(0,),
        epoch=0,
        members=MEMBERS,
        at_least=0,
        lengths=offered_lengths(4, 1),
        tags=(),
        at_most=0,
    )
    return driver.send("source0", offer)


def pull(driver: CoreDriver, worker: str, stage: str) -> m.Grant:
    message = m.Pull(request=1, stage=stage, slots=MEMBERS, tokens=0, step=-1)
    [(_, grant)] = driver.sent(driver.send(worker, message), m.Grant)
    assert isinstance(grant, m.Grant)
    return grant


def generate(driver: CoreDriver, worker: str, grant: m.Grant) -> None:
    lengths = (3,) * len(grant.slots)
    driver.send(
        worker,
        m.Commit(
            request=2,
            stage="rollout",
            slots=grant.slots,
            leases=leases_of(grant),
            parts=tuple(Part(column, grant.slots, lengths) for column in ("response", "logprobs")),
            inline=(),
            spans=((0, 3),) * len(grant.slots),
        ),
    )


@pytest.mark.parametrize("policy", OnLostSample)
def test_answers_lost_with_their_worker_are_generated_again(policy: OnLostSample) -> None:
    driver = CoreDriver(on_lost_sample=policy)
    evaluate(driver)
    grant = pull(driver, "rollout0", "rollout")
    generate(driver, "rollout0", grant)
    commands = driver.event(WorkerDisconnected(WorkerId("rollout0"), "killed"))
    assert driver.sent(commands, m.GroupsDropped) == []
    assert [group.id for group in driver.core.state.table.groups.values()] == [0]
    assert pull(driver, "rollout1", "rollout").slots == grant.slots


@pytest.mark.parametrize("policy", OnLostSample)
def test_the_source_is_notified_of_a_group_that_no_worker_can_answer(policy: OnLostSample) -> None:
    driver = CoreDriver(on_lost_sample=policy, attempts=2)
    evaluate(driver)
    for _ in range(2):
        grant = pull(driver, "rollout0", "rollout")
        lost = m.ReleaseLease(
            stage="rollout", slots=grant.slots[:1], leases=leases_of(grant)[:1], lost=True, reason="broken"
        )
        kept = m.ReleaseLease(
            stage="rollout", slots=grant.slots[1:], leases=leases_of(grant)[1:], lost=False, reason=""
        )
        driver.send("rollout0", kept)
        commands = driver.send("rollout0", lost)
    [(worker, notice)] = driver.sent(commands, m.GroupsDropped)
    assert (worker, notice.groups) == ("source0", (0,))
    assert "broken" in notice.reason
    released = [message for who, message in driver.sent(commands, m.ReleaseTensors) if who == "source0"]
    assert [message.groups for message in released] == [(0,)]
    assert not driver.core.state.table.groups
