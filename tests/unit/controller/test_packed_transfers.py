"""Rows of several columns with the same owner are sent in one transfer, not in one for each column."""

from flowrt.controller.events import WorkerDisconnected
from flowrt.ids import WorkerId
from flowrt.protocol import messages as m
from flowrt.protocol.messages import Part
from tests.simulation.core_driver import CoreDriver
from tests.simulation.scenario import offer_one


def disconnect_reward_worker(driver: CoreDriver) -> None:
    """Remove the copies that were sent for scoring: each column has one owner again."""
    driver.event(WorkerDisconnected(WorkerId("reward0"), ""))


def test_all_columns_of_one_owner_are_sent_in_one_transfer() -> None:
    """Two columns of rollout0 and the prompt, although reward0 has a copy of one column."""
    driver = CoreDriver()
    driver.ready_to_train()
    commands = driver.send("trainer0", m.Pull(request=1, stage="train", slots=1, tokens=0, step=0))
    ((who, grant),) = driver.sent(commands, m.Grant)
    assert who == "trainer0"
    (incoming,) = grant.incoming
    assert incoming.turn.sender == "rollout0"
    assert sorted(incoming.parts, key=lambda part: part.column) == [
        Part("logprobs", grant.slots, (3,)),
        Part("prompt", grant.groups, (4,)),
        Part("response", grant.slots, (3,)),
    ]
    ((sender, order),) = driver.sent(commands, m.SendSamples)
    assert (sender, order.turn, order.parts) == ("rollout0", incoming.turn, incoming.parts)


def test_rows_of_two_owners_are_sent_in_one_transfer_per_owner() -> None:
    driver = CoreDriver(members=3)
    driver.send(
        "source0",
        offer_one(request=0, members=3),
    )
    slots_by_worker: dict[str, list[int]] = {"rollout0": [], "rollout1": []}
    for worker in ("rollout0", "rollout1", "rollout0"):
        generate = driver.pull(worker, "rollout")
        assert generate is not None
        driver.send(worker, driver.generated(generate))
        slots_by_worker[worker] += generate.slots
    for _ in range(3):
        driver.score()
    disconnect_reward_worker(driver)
    grant = driver.pull("trainer0", "train", 0)
    assert grant is not None
    assert len(grant.slots) == 3
    assert len(grant.incoming) == 2
    assert {
        incoming.turn.sender: [part for part in incoming.parts if part.column != "prompt"]
        for incoming in grant.incoming
    } == {
        worker: [Part(column, tuple(slots), (3,) * len(slots)) for column in ("response", "logprobs")]
        for worker, slots in slots_by_worker.items()
    }
