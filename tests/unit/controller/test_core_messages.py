"""The core, one message at a time: what is rejected, what is generated again, what is sent to which worker."""

import contextlib
from typing import Any

import pytest

from flowrt.controller.events import AppendLedger, Command, EndRun, StepClosed, Tick, WorkerDisconnected
from flowrt.errors import RemoteProtocolError
from flowrt.ids import WorkerId
from flowrt.protocol import messages as m
from flowrt.protocol.messages import ColumnLengths, LaneTurn, Part, Values
from tests.simulation.core_driver import CoreDriver
from tests.simulation.scenario import LEASE_S, MODEL, leases_of, offer_one, whole


def driver_with_grant() -> tuple[CoreDriver, m.Grant]:
    driver = CoreDriver()
    driver.offer()
    grant = driver.pull("rollout0", "rollout")
    assert grant is not None
    return driver, grant


def test_a_commit_after_the_lease_expired_is_refused() -> None:
    driver, grant = driver_with_grant()
    driver.now += LEASE_S + 1
    driver.event(Tick())
    ((_, answer),) = driver.sent(driver.send("rollout0", driver.generated(grant)), m.Committed)
    assert answer.refused == grant.slots
    assert driver.pull("rollout1", "rollout") is not None


def test_a_commit_under_the_lease_of_another_worker_dismisses_only_the_sender() -> None:
    driver, grant = driver_with_grant()
    reason, _ = driver.dismissed("rollout1", driver.generated(grant))
    assert f"rollout1 uses lease {grant.lease} for stage 'rollout', which is of rollout0" in reason
    ((_, answer),) = driver.sent(driver.send("rollout0", driver.generated(grant)), m.Committed)
    assert answer.refused == ()


def changed(commit: m.Commit, **fields: Any) -> m.Commit:
    return m.Commit(**{name: getattr(commit, name) for name in m.Commit.__struct_fields__} | fields)


SPAN_0 = ((0, 3),)
MALFORMED: dict[str, dict[str, Any]] = {
    "unknown stage": {"stage": "sing"},
    "no columns": {"parts": ()},
    "a missing column": {"parts": (Part("response", (0,), (3,)),)},
    "an extra column": {"inline": (Values("reward", (1.0,)),)},
    "no leases": {"leases": ()},
    "more slots than leases": {"slots": (0, 1)},
    "too few lengths": {"parts": (Part("response", (0,), ()), Part("logprobs", (0,), (3,)))},
    "too many spans": {"spans": ((0, 3), (0, 3))},
    "parts of other slots": {"parts": (Part("response", (9,), (3,)), Part("logprobs", (9,), (3,)))},
    "a column twice": {"parts": tuple(Part(c, (0,), (3,)) for c in ("response", "response", "logprobs"))},
    "a tensor column inline": {"parts": (Part("logprobs", (0,), (3,)),), "inline": (Values("response", (1.0,)),)},
    "a negative length": {"parts": (Part("response", (0,), (-3,)), Part("logprobs", (0,), (3,)))},
    "generated without spans": {"spans": ()},
    "an empty span": {"spans": ((),)},
    "half a span": {"spans": ((0,),)},
    "a span of a version that does not exist": {"spans": ((5, 3),)},
    "a span of a negative version": {"spans": ((-1, 3),)},
}


@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_commit_is_illegal_and_changes_nothing(name: str) -> None:
    driver, grant = driver_with_grant()
    driver.assert_illegal("rollout0", changed(driver.generated(grant), **MALFORMED[name]))
    ((_, answer),) = driver.sent(driver.send("rollout0", driver.generated(grant)), m.Committed)
    assert answer.refused == ()


def test_spans_from_a_stage_that_does_not_generate_are_illegal() -> None:
    driver, grant = driver_with_grant()
    driver.send("rollout0", driver.generated(grant))
    score = driver.pull("reward0", "reward")
    assert score is not None
    values = (Values("reward", (1.0,)),)
    driver.assert_illegal(
        "reward0",
        m.Commit(
            request=3,
            stage="reward",
            slots=score.slots,
            leases=leases_of(score),
            parts=(),
            inline=values,
            spans=((7, 3),),
        ),
    )


def test_a_commit_of_the_train_stage_is_illegal() -> None:
    driver = CoreDriver()
    driver.ready_to_train()
    grant = driver.pull("trainer0", "train", 0)
    assert grant is not None
    driver.assert_illegal(
        "trainer0",
        m.Commit(request=5, stage="train", slots=grant.slots, leases=leases_of(grant), parts=(), inline=(), spans=()),
    )


def test_a_step_ends_once_and_only_when_it_is_full() -> None:
    driver = CoreDriver()
    driver.ready_to_train()
    driver.assert_illegal("trainer0", m.StepCompleted(0, ()))
    assert driver.pull("trainer0", "train", 0) is not None
    driver.assert_illegal("trainer0", m.StepCompleted(1, ()))
    assert [c.step for c in driver.send("trainer0", m.StepCompleted(0, ())) if isinstance(c, StepClosed)] == [0]
    driver.assert_illegal("trainer0", m.StepCompleted(0, ()))


TURN = LaneTurn(sender="trainer0", receiver="rollout1", kind="weights", incarnation=0, sequence=0, transport="gloo")


@pytest.mark.parametrize(
    "message",
    [m.WeightsStaged(MODEL, 1), m.FetchFailed(TURN, whole(1), ""), m.Publish((whole(0),), ()), m.Publish((), ())],
)
@pytest.mark.parametrize("worker", ["reward0"])
def test_unrequested_weight_messages_change_nothing(worker: str, message: m.Message) -> None:
    driver = CoreDriver()
    before = driver.snapshot()
    with contextlib.suppress(RemoteProtocolError):
        assert driver.send(worker, message) == []
    assert driver.snapshot() == before


def test_controller_messages_and_unknown_models_are_illegal_from_a_worker() -> None:
    driver = CoreDriver()
    driver.assert_illegal("rollout0", m.OfferAccepted(1, 1))
    driver.assert_illegal("rollout0", m.WeightsActivated("another model", 1))


@pytest.mark.parametrize(
    ("columns", "lengths"),
    [
        ((), ()),
        (("prompt",), (4,)),
        (("prompt", "answer", "colour"), (4, 1, 1)),
        (("prompt", "response"), (4, 1)),
        (("prompt", "answer"), (-4, 1)),
        (("prompt", "prompt", "answer"), (4, 4, 1)),
    ],
)
def test_an_offer_with_wrong_columns_or_lengths_is_not_opened(
    columns: tuple[str, ...], lengths: tuple[int, ...]
) -> None:
    driver = CoreDriver()
    try:
        offered = tuple(ColumnLengths(column, (length,)) for column, length in zip(columns, lengths, strict=True))
        commands = driver.send(
            "source0",
            m.Offer(request=1, flow="train", prompts=(0,), epoch=0, members=1, at_least=0, lengths=offered, tags=()),
        )
    except RemoteProtocolError:
        commands = []
    assert driver.sent(commands, m.OfferAccepted) == []
    assert driver.core.state.table.groups == {}


def test_a_receiver_becomes_a_sender_only_after_its_transfer_is_confirmed() -> None:
    # rollout0 is to receive the prompt and has not confirmed it: rollout1 must not fetch from it.
    driver = CoreDriver()
    driver.send(
        "source0",
        offer_one(request=0, members=2),
    )
    assert driver.pull("rollout0", "rollout") is not None
    second = driver.pull("rollout1", "rollout")
    assert second is not None
    assert [incoming.turn.sender for incoming in second.incoming] == ["source0"]


def test_tensors_lost_in_a_transfer_are_generated_again() -> None:
    # The only owner dies while it sends; the receiver, which counts as a holder, then reports the failed transfer.
    driver = CoreDriver()
    driver.offer()
    grant = driver.pull("rollout0", "rollout")
    assert grant is not None
    driver.send("rollout0", driver.generated(grant))
    score = driver.pull("reward0", "reward")
    assert score is not None
    driver.event(WorkerDisconnected(WorkerId("rollout0"), ""))
    driver.undelivered("reward0", "reward", score)
    again = driver.pull("rollout1", "rollout")
    assert again is not None
    assert again.slots == grant.slots


def test_a_failed_transfer_counts_after_its_lease_has_expired() -> None:
    driver = CoreDriver()
    driver.offer()
    grant = driver.pull("rollout0", "rollout")
    assert grant is not None
    driver.now += LEASE_S + 1
    driver.event(Tick())
    driver.undelivered("rollout0", "rollout", grant)
    again = driver.pull("rollout0", "rollout")
    assert again is not None
    assert [incoming.turn.sender for incoming in again.incoming] == ["source0"]


def test_a_failed_transfer_counts_for_all_slots_of_a_group() -> None:
    driver = CoreDriver(members=2)
    driver.send(
        "source0",
        offer_one(request=0, members=2),
    )
    for _ in range(2):
        grant = driver.pull("rollout0", "rollout")
        assert grant is not None
        driver.send("rollout0", driver.generated(grant))
    driver.score()
    driver.score()
    first = driver.pull("trainer0", "train", 0)
    assert first is not None
    driver.undelivered("trainer0", "train", first)
    second = driver.pull("trainer0", "train", 0)
    assert second is not None
    coming = {(p.column, item) for incoming in second.incoming for p in incoming.parts for item in p.ids}
    assert {("response", slot) for slot in first.slots} <= coming


def test_a_disconnected_rollout_worker_is_recorded_in_the_ledger() -> None:
    driver = CoreDriver()
    driver.ready_to_train()
    records = [
        c.state for c in driver.event(WorkerDisconnected(WorkerId("rollout0"), "")) if isinstance(c, AppendLedger)
    ]
    assert records[-1:] == ["in_flight"]


def test_a_group_of_a_disconnected_source_is_not_granted() -> None:
    driver = CoreDriver()
    driver.offer()
    driver.event(WorkerDisconnected(WorkerId("source0"), ""))
    assert driver.pull("rollout0", "rollout") is None


def test_an_evaluation_that_waits_for_weights_does_not_block_training() -> None:
    driver = CoreDriver(bound=1)
    driver.offer("eval", at_least=1)
    driver.offer("train", prompt=1)
    grant = driver.pull("rollout0", "rollout")
    assert grant is not None
    assert grant.prompts == (1,)


def test_an_evaluation_is_opened_before_prompts_that_wait_for_admission() -> None:
    driver = CoreDriver(bound=0)
    driver.offer("train", prompt=0)
    driver.offer("train", prompt=1)
    assert len(driver.sent(driver.offer("eval", prompt=2), m.OfferAccepted)) == 1


def test_a_stall_is_detected_on_a_clock_that_starts_at_zero() -> None:
    driver = CoreDriver()
    driver.configure(no_progress_timeout_s=10.0)
    driver.offer()
    driver.now = 11.0
    assert [type(command) for command in driver.event(Tick())] == [EndRun]


def test_an_illegal_message_is_no_progress() -> None:
    driver, grant = driver_with_grant()
    driver.now = 5.0
    driver.assert_illegal("rollout0", changed(driver.generated(grant), parts=()))


def publish(driver: CoreDriver, version: int) -> list[Command]:
    return driver.send("trainer0", m.Publish((whole(version),), ()))


def test_a_version_is_fetched_by_each_receiver_and_the_old_one_is_evicted() -> None:
    driver = CoreDriver()
    fetched = driver.sent(publish(driver, 1), m.ReceiveWeights)
    assert [(worker, fetch.weights.version, fetch.turn.sender) for worker, fetch in fetched] == [
        ("rollout0", 1, "trainer0"),
        ("rollout1", 1, "rollout0"),  # relayed while it arrives
    ]
    assert driver.sent(publish(driver, 2), m.ReceiveWeights) == []
    first = driver.send("rollout0", m.WeightsStaged(MODEL, 1))
    assert driver.sent(first, m.ReceiveWeights)[0][1].weights.version == 2
    # A worker evicts the old version when it has the new one and no other worker fetches the old one from it.
    assert [(worker, eviction.version) for worker, eviction in driver.sent(first, m.EvictVersion)] == [("trainer0", 1)]
    last = driver.send("rollout1", m.WeightsStaged(MODEL, 1))
    assert driver.sent(last, m.ReceiveWeights)[0][1].weights.version == 2
    staged = driver.send("rollout0", m.WeightsStaged(MODEL, 2)) + driver.send("rollout1", m.WeightsStaged(MODEL, 2))
    assert [(worker, eviction.version) for worker, eviction in driver.sent(staged, m.EvictVersion)] == [
        ("rollout0", 1),
        ("rollout1", 1),
    ]


def test_no_worker_fetches_from_a_disconnected_holder() -> None:
    driver = CoreDriver()
    publish(driver, 1)
    driver.send("rollout0", m.WeightsStaged(MODEL, 1))
    driver.event(WorkerDisconnected(WorkerId("rollout0"), ""))
    turn = driver.core.state.models.last_turn(MODEL, WorkerId("rollout1"))
    assert turn is not None
    driver.send("rollout1", m.FetchFailed(turn, whole(1), "its holder has left"))
    assert "rollout0" not in {fetch.holder for fetch in driver.core.state.models.policy.fetching.values()}
    assert {holder for holders in driver.core.state.models.policy.holders.values() for holder in holders} == {
        "trainer0"
    }


def test_a_late_failure_of_an_old_fetch_does_not_end_the_new_one() -> None:
    # The holder dies, and the receiver reports the failure of its fetch, and then of an earlier one once more.
    driver = CoreDriver()
    driver.send("rollout1", m.WeightsActivated(MODEL, 0))
    publish(driver, 1)
    driver.send("rollout0", m.WeightsStaged(MODEL, 1))
    driver.send(
        "rollout1",
        m.FetchFailed(
            LaneTurn(
                sender="trainer0", receiver="rollout1", kind="weights", incarnation=0, sequence=0, transport="gloo"
            ),
            whole(1),
            "lane broke",
        ),
    )
    holder = driver.core.state.models.policy.fetching[WorkerId("rollout1")].holder
    assert holder == "rollout0"
    driver.event(WorkerDisconnected(WorkerId("rollout0"), ""))
    turn = driver.core.state.models.last_turn(MODEL, WorkerId("rollout1"))
    assert turn is not None
    driver.send("rollout1", m.FetchFailed(turn, whole(1), "its holder has left"))
    assert driver.core.state.models.policy.fetching[WorkerId("rollout1")].holder == "trainer0"
    publish(driver, 2)
    again = driver.sent(
        driver.send(
            "rollout1",
            m.FetchFailed(
                LaneTurn(
                    sender="trainer0", receiver="rollout1", kind="weights", incarnation=0, sequence=0, transport="gloo"
                ),
                whole(1),
                "lane broke",
            ),
        ),
        m.ReceiveWeights,
    )
    assert len(again) <= 1
