"""The mind under every interleaving: whole simulated runs with skew, faults and lies.

Every run asserts `Core.check` after each event, and in the workers that what they are told to use, send or receive is
there (see flowrt/testing). A failure is reproduced by its scenario: `Cluster(Scenario(...)).run()`.
"""

import contextlib
import dataclasses
from collections import Counter
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from flowrt.controller.dispatch import GroupCount, TokenBudget
from flowrt.controller.events import Command, End, Event, Gone, Joined, Record, Said, Send, StepClosed, Tick
from flowrt.errors import RemoteProtocolError
from flowrt.ids import WorkerId
from flowrt.testing.scenario import GROUP_COLUMNS, MODEL, Scenario
from flowrt.testing.sim import LEASE_S, Cluster, make_core
from flowrt.wire import messages as m
from flowrt.wire.records import Part, Values

# Not shrunk: a smaller scenario takes another course altogether, and searching for one takes minutes.
RUNS = settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
)


@st.composite
def scenarios(draw: st.DrawFn, **fixed: Any) -> Scenario:
    bound = fixed.pop("bound", None)
    bound = draw(st.integers(0, 3)) if bound is None else bound
    batcher = st.sampled_from([TokenBudget(1), TokenBudget(25), TokenBudget(60), TokenBudget(10**6), GroupCount(2)])
    drawn: dict[str, Any] = {
        "seed": draw(st.integers(0, 2**32)),
        "bound": bound,
        "in_order": draw(st.booleans()),
        "steps": draw(st.integers(1, 5)),
        "groups_per_step": draw(st.integers(1, 4)),
        "members": draw(st.integers(1, 3)),
        "batcher": draw(batcher),
        "rollouts": draw(st.integers(1, 4)),
        "rewards": draw(st.integers(1, 2)),
        "references": draw(st.integers(0, 2)),
        "ranks": draw(st.integers(1, 3)),
        "capacity": draw(st.integers(1, 4)),
        "speeds": draw(st.sampled_from([(), (("rollout0", 0.01),), (("rollout0", 0.1), ("reward0", 0.05))])),
        "fetch_speed": draw(st.sampled_from([1.0, 0.05])),
    }
    return Scenario(**drawn | fixed)


def assert_sound(cluster: Cluster) -> None:
    """What holds at the end of every run, whatever happened in it."""
    scenario = cluster.scenario
    assert [closed.step for closed in cluster.steps] == list(range(scenario.steps))
    assert all(closed.groups == scenario.groups_per_step for closed in cluster.steps)
    assert all(closed.samples == closed.groups * scenario.members == len(closed.lags) for closed in cluster.steps)
    # The bound: as the controller counts, and as the trainer saw the spans.
    assert all(0 <= lag <= scenario.bound for closed in cluster.steps for lag in closed.lags)
    assert all(step - min(row.spans[::2]) <= scenario.bound for step, row in cluster.trained)
    assert all(max(row.spans[::2]) <= step for step, row in cluster.trained)
    # Each prompt once, in whole groups, in one step.
    prompts = Counter((row.epoch, row.prompt) for _, row in cluster.trained)
    assert set(prompts.values()) <= {scenario.members}
    for group in {row.group for _, row in cluster.trained}:
        rows = [(step, row) for step, row in cluster.trained if row.group == group]
        assert sorted(row.member for _, row in rows) == list(range(scenario.members))
        assert len({(step, row.epoch, row.prompt) for step, row in rows}) == 1
    # The ledger agrees: what was opened was trained, nothing is left over.
    assert Counter(cluster.state.values()) == {"trained": scenario.steps * scenario.groups_per_step}
    assert {pair for pair, state in cluster.state.items() if state == "trained"} == set(prompts)
    trainings = Counter((one.epoch, one.prompt) for one in cluster.records if one.state == "trained")
    assert set(trainings.values()) == {1}
    # Nothing stays behind.
    board = cluster.core.samples.board
    assert (board.groups, board.slots, board.leases) == ({}, {}, {})
    for worker in cluster.workers.values():
        assert worker.have == {}, f"{worker.id} still holds {sorted(worker.have)}"
        assert set(worker.coming.values()) <= worker.failed


# ---- runs without faults


@RUNS
@given(scenarios())
def test_every_run_completes_and_keeps_its_promises(scenario: Scenario) -> None:
    assert_sound(Cluster(scenario).run())


@settings(RUNS, max_examples=60)
@given(scenarios(steps=6, in_order=False, groups_per_step=2))
def test_nothing_is_dropped_without_faults(scenario: Scenario) -> None:
    cluster = Cluster(scenario).run()
    assert dict(cluster.core.samples.retreat.dropped) == {}
    assert not [one for one in cluster.records if one.state == "dropped"]


def test_slow_answers_are_not_pushed_out_over_several_steps() -> None:
    # Bound 3: places kept for the next step only are not enough, groups can be pushed out over two or three steps.
    slow = (("rollout0", 0.005), ("rollout1", 0.05))
    scenario = Scenario(seed=242, bound=3, steps=12, members=1, rollouts=3, references=0, capacity=2, speeds=slow)
    assert dict(Cluster(scenario).run().core.samples.retreat.dropped) == {}


@RUNS
@given(scenarios(in_order=True))
def test_in_order_trains_in_the_order_of_issue(scenario: Scenario) -> None:
    cluster = Cluster(scenario).run()
    by_step = [sorted({row.group for at, row in cluster.trained if at == step}) for step in range(scenario.steps)]
    groups = [group for step in by_step for group in step]
    assert groups == sorted(groups)
    if scenario.bound == 0:
        assert [(one.epoch, one.prompt) for one in cluster.records if one.state == "leased"] == sorted(cluster.state)


@RUNS
@given(scenarios(evals=4))
def test_evaluation_flows_beside_training(scenario: Scenario) -> None:
    cluster = Cluster(scenario).run()
    assert_sound(cluster)
    opened = {
        e.message.request: e.message for e in cluster.log if isinstance(e, Said) and isinstance(e.message, m.Offer)
    }
    begun = Counter(offer.flow for offer in opened.values())
    scored = [
        event.message
        for event in cluster.log
        if isinstance(event, Said) and isinstance(event.message, m.Commit) and event.message.stage == "evaluate"
    ]
    assert sum(len(commit.slots) for commit in scored) == begun["eval"]


@RUNS
@given(st.data(), st.integers(1, 3))
def test_skipped_versions_block_nobody(data: st.DataObject, bound: int) -> None:
    scenario = data.draw(scenarios(bound=bound, publish_every=data.draw(st.integers(1, bound + 1)), fetch_speed=0.05))
    assert_sound(Cluster(scenario).run())


@RUNS
@given(scenarios(fetch_speed=0.01, bound=3, steps=6))
def test_receivers_end_at_the_latest_version(scenario: Scenario) -> None:
    cluster = Cluster(scenario).run()
    assert {w.staged for w in cluster.workers.values() if w.role == "rollout"} == {scenario.steps}
    for worker in cluster.workers.values():
        assert worker.weights <= {scenario.steps}, f"{worker.id} keeps old versions {worker.weights}"


# ---- runs with faults


@RUNS
@given(scenarios(kills=3))
def test_killed_workers_lose_nothing(scenario: Scenario) -> None:
    assert_sound(Cluster(scenario).run())


@RUNS
@given(scenarios(broken_lanes=3))
def test_broken_lanes_lose_nothing(scenario: Scenario) -> None:
    assert_sound(Cluster(scenario).run())


@RUNS
@given(scenarios(expiries=2))
def test_expired_leases_lose_nothing(scenario: Scenario) -> None:
    assert_sound(Cluster(scenario).run())


@RUNS
@given(scenarios(kills=2, broken_lanes=2, evals=3))
def test_many_misfortunes_lose_nothing(scenario: Scenario) -> None:
    assert_sound(Cluster(scenario).run())


@RUNS
@given(scenarios(kills=2))
def test_the_ledger_knows_at_all_times_which_prompts_are_ready_and_leased(scenario: Scenario) -> None:
    cluster = Cluster(scenario)
    plain_handle = cluster.handle

    def handle(event: Event) -> list[Command]:
        commands = plain_handle(event)
        samples = cluster.core.samples
        for group in samples.board.groups.values():
            if group.flow == "train":
                ready = "ready" if group.id in samples.board.ready["train"] else "in_flight"
                actual = "leased" if group.id in samples.window.taken else ready
                assert cluster.state[group.epoch, group.prompt] == actual, f"group {group.id} after {event}"
        return commands

    cluster.handle = handle  # type: ignore[method-assign]
    cluster.run()


# ---- one conversation, step by step


class Talk:
    """A core and helpers to speak to it directly; all workers are in."""

    def __init__(self, **scenario: Any) -> None:
        self.core = make_core(Scenario(**{"members": 1, "groups_per_step": 1, "references": 0} | scenario))
        self.now = 0.0
        for worker in ("source0", "rollout0", "rollout1", "reward0", "evaluate0", "trainer0"):
            self.event(Joined(WorkerId(worker), worker[:-1], "host"))
            if worker.startswith("rollout"):
                self.say(worker, m.Applied(MODEL, 0))

    def event(self, event: Event) -> list[Command]:
        commands = self.core.handle(event, self.now)
        self.core.check()
        return commands

    def say(self, worker: str, message: m.Message) -> list[Command]:
        return self.event(Said(WorkerId(worker), message))

    def heard(self, commands: list[Command], kind: type[Any]) -> list[tuple[str, Any]]:
        return [(c.worker, c.message) for c in commands if isinstance(c, Send) and isinstance(c.message, kind)]

    def offer(self, flow: str = "train", at_least: int = 0, prompt: int = 0) -> list[Command]:
        return self.say("source0", m.Offer(prompt, flow, prompt, 0, 1, at_least, GROUP_COLUMNS, (4, 1)))

    def pull(self, worker: str, stage: str, step: int = -1) -> m.Grant | None:
        granted = self.heard(self.say(worker, m.Pull(1, stage, 1, 0, step)), m.Grant)
        return next((grant for who, grant in granted if who == worker), None)

    def generated(self, grant: m.Grant, request: int = 2) -> m.Commit:
        parts = tuple(Part(column, grant.slots, (3,)) for column in ("response", "logprobs"))
        return m.Commit(request, "rollout", grant.slots, grant.leases, parts, (), ((0, 3),))

    def ready_to_train(self) -> None:
        """One group, generated by rollout0 and scored."""
        self.offer()
        grant = self.pull("rollout0", "rollout")
        assert grant is not None
        self.say("rollout0", self.generated(grant))
        self.score()

    def score(self) -> list[Command]:
        grant = self.pull("reward0", "reward")
        assert grant is not None
        commit = m.Commit(3, "reward", grant.slots, grant.leases, (), (Values("reward", (1.0,)),), ())
        return self.say("reward0", commit)

    def snapshot(self) -> str:
        """The whole state but the time at which a worker was heard."""
        core = self.core
        members = [(one.id, one.role, one.finished) for one in core.roster.members()]
        samples, weights = core.samples, core.weights
        board = {name: value for name, value in samples.board.__dict__.items() if name != "ready"}
        queues = {name: (queue._heap, queue._ticket_of) for name, queue in samples.board.ready.items()}
        parts = (members, board, queues, samples.window, samples.room.__dict__, samples.lanes._state)
        return repr((parts, dict(samples.retreat.dropped), weights, core._progress_s, core.ended))

    def assert_illegal(self, worker: str, message: m.Message) -> None:
        before = self.snapshot()
        with pytest.raises(RemoteProtocolError):
            self.say(worker, message)
        assert self.snapshot() == before


def granted_talk() -> tuple[Talk, m.Grant]:
    talk = Talk()
    talk.offer()
    grant = talk.pull("rollout0", "rollout")
    assert grant is not None
    return talk, grant


def test_a_late_commit_is_refused() -> None:
    talk, grant = granted_talk()
    talk.now += LEASE_S + 1
    talk.event(Tick())
    ((_, answer),) = talk.heard(talk.say("rollout0", talk.generated(grant)), m.Committed)
    assert answer.refused == grant.slots
    assert talk.pull("rollout1", "rollout") is not None


def test_a_commit_of_another_workers_lease_is_refused() -> None:
    talk, grant = granted_talk()
    ((_, answer),) = talk.heard(talk.say("rollout1", talk.generated(grant)), m.Committed)
    assert answer.refused == grant.slots
    ((_, answer),) = talk.heard(talk.say("rollout0", talk.generated(grant)), m.Committed)
    assert answer.refused == ()


def changed(commit: m.Commit, **fields: Any) -> m.Commit:
    return m.Commit(**{name: getattr(commit, name) for name in m.Commit.__slots__} | fields)


SPAN_0 = ((0, 3),)
MALFORMED: dict[str, dict[str, Any]] = {
    "unknown stage": {"stage": "sing"},
    "no columns": {"parts": ()},
    "a column less": {"parts": (Part("response", (0,), (3,)),)},
    "a column more": {"inline": (Values("reward", (1.0,)),)},
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
    talk, grant = granted_talk()
    talk.assert_illegal("rollout0", changed(talk.generated(grant), **MALFORMED[name]))
    ((_, answer),) = talk.heard(talk.say("rollout0", talk.generated(grant)), m.Committed)
    assert answer.refused == ()


def test_spans_come_from_the_stage_that_generates_only() -> None:
    talk, grant = granted_talk()
    talk.say("rollout0", talk.generated(grant))
    score = talk.pull("reward0", "reward")
    assert score is not None
    values = (Values("reward", (1.0,)),)
    talk.assert_illegal("reward0", m.Commit(3, "reward", score.slots, score.leases, (), values, ((7, 3),)))


def test_training_is_ended_by_the_step_not_by_a_commit() -> None:
    talk = Talk()
    talk.ready_to_train()
    grant = talk.pull("trainer0", "train", 0)
    assert grant is not None
    talk.assert_illegal("trainer0", m.Commit(5, "train", grant.slots, grant.leases, (), (), ()))


def test_a_step_ends_once_and_only_when_it_is_full() -> None:
    talk = Talk()
    talk.ready_to_train()
    talk.assert_illegal("trainer0", m.StepDone(0, ()))
    assert talk.pull("trainer0", "train", 0) is not None
    talk.assert_illegal("trainer0", m.StepDone(1, ()))
    assert [c.step for c in talk.say("trainer0", m.StepDone(0, ())) if isinstance(c, StepClosed)] == [0]
    talk.assert_illegal("trainer0", m.StepDone(0, ()))


@pytest.mark.parametrize("message", [m.Staged(MODEL, 1), m.FetchFailed(MODEL, 1, ""), m.Publish(MODEL, 0, (), 0)])
@pytest.mark.parametrize("worker", ["reward0"])
def test_weights_that_nobody_asked_for_are_illegal_or_nothing(worker: str, message: m.Message) -> None:
    talk = Talk()
    before = talk.snapshot()
    with contextlib.suppress(RemoteProtocolError):
        assert talk.say(worker, message) == []
    assert talk.snapshot() == before


def test_what_only_the_controller_says_is_illegal() -> None:
    talk = Talk()
    talk.assert_illegal("rollout0", m.Opened(1, 1))
    talk.assert_illegal("rollout0", m.Applied("another model", 1))


@pytest.mark.parametrize(
    ("columns", "lengths"),
    [
        ((), ()),
        (("prompt",), (4,)),
        (("prompt", "answer", "colour"), (4, 1, 1)),
        (("prompt", "response"), (4, 1)),
        (GROUP_COLUMNS, (-4, 1)),
        (("prompt", "prompt", "answer"), (4, 4, 1)),
    ],
)
def test_an_offer_that_can_never_be_worked_on_is_not_opened(columns: tuple[str, ...], lengths: tuple[int, ...]) -> None:
    talk = Talk()
    try:
        commands = talk.say("source0", m.Offer(1, "train", 0, 0, 1, 0, columns, lengths))
    except RemoteProtocolError:
        commands = []
    assert talk.heard(commands, m.Opened) == []
    assert talk.core.samples.board.groups == {}


def test_an_owner_is_only_asked_for_what_has_reached_it() -> None:
    # rollout0 is to receive the prompt but has not said anything since: rollout1 must not be sent to it.
    talk = Talk()
    talk.say("source0", m.Offer(0, "train", 0, 0, 2, 0, GROUP_COLUMNS, (4, 1)))
    assert talk.pull("rollout0", "rollout") is not None
    second = talk.pull("rollout1", "rollout")
    assert second is not None
    assert [one.turn.sender for one in second.incoming] == ["source0"]


def test_tensors_that_died_on_their_way_are_made_again() -> None:
    # The only owner dies while it sends; the receiver, who counts as a holder, then says that nothing came.
    talk = Talk()
    talk.offer()
    grant = talk.pull("rollout0", "rollout")
    assert grant is not None
    talk.say("rollout0", talk.generated(grant))
    score = talk.pull("reward0", "reward")
    assert score is not None
    talk.event(Gone(WorkerId("rollout0"), ""))
    talk.say("reward0", m.Abandon("reward", score.slots, score.leases, "rollout0", "did not come"))
    again = talk.pull("rollout1", "rollout")
    assert again is not None
    assert again.slots == grant.slots


def test_a_failed_transfer_is_believed_even_when_its_lease_has_ended() -> None:
    talk = Talk()
    talk.offer()
    grant = talk.pull("rollout0", "rollout")
    assert grant is not None
    talk.now += LEASE_S + 1
    talk.event(Tick())
    talk.say("rollout0", m.Abandon("rollout", grant.slots, grant.leases, "source0", "did not come"))
    again = talk.pull("rollout0", "rollout")
    assert again is not None
    assert [one.turn.sender for one in again.incoming] == ["source0"]


def test_a_failed_transfer_counts_for_all_slots_of_a_group() -> None:
    talk = Talk(members=2)
    talk.say("source0", m.Offer(0, "train", 0, 0, 2, 0, GROUP_COLUMNS, (4, 1)))
    for _ in range(2):
        grant = talk.pull("rollout0", "rollout")
        assert grant is not None
        talk.say("rollout0", talk.generated(grant))
    talk.score()
    talk.score()
    first = talk.pull("trainer0", "train", 0)
    assert first is not None
    for peer in {one.turn.sender for one in first.incoming}:
        talk.say("trainer0", m.Abandon("train", first.slots, first.leases, peer, "did not come"))
    second = talk.pull("trainer0", "train", 0)
    assert second is not None
    coming = {(p.column, item) for one in second.incoming for p in one.parts for item in p.ids}
    assert {("response", slot) for slot in first.slots} <= coming


def test_a_dead_rollout_shows_in_the_ledger() -> None:
    talk = Talk()
    talk.ready_to_train()
    records = [c.state for c in talk.event(Gone(WorkerId("rollout0"), "")) if isinstance(c, Record)]
    assert records[-1:] == ["in_flight"]


def test_a_source_that_leaves_takes_its_prompts_along_without_a_crash() -> None:
    talk = Talk()
    talk.offer()
    talk.event(Gone(WorkerId("source0"), ""))
    talk.pull("rollout0", "rollout")


def test_an_evaluation_that_waits_for_new_weights_holds_up_nobody() -> None:
    talk = Talk(bound=1)
    talk.offer("eval", at_least=1)
    talk.offer("train", prompt=1)
    grant = talk.pull("rollout0", "rollout")
    assert grant is not None
    assert grant.prompts == (1,)


def test_an_evaluation_is_opened_past_training_prompts_that_wait_for_admission() -> None:
    talk = Talk(bound=0)
    talk.offer("train", prompt=0)
    talk.offer("train", prompt=1)
    assert len(talk.heard(talk.offer("eval", prompt=2), m.Opened)) == 1


def test_a_stall_is_seen_on_a_clock_that_starts_at_zero() -> None:
    talk = Talk()
    talk.core._settings = dataclasses.replace(talk.core._settings, stall_s=10.0)
    talk.offer()
    talk.now = 11.0
    assert [type(command) for command in talk.event(Tick())] == [End]


def test_illegal_talk_is_no_progress() -> None:
    talk, grant = granted_talk()
    talk.now = 5.0
    talk.assert_illegal("rollout0", changed(talk.generated(grant), parts=()))


def publish(talk: Talk, version: int) -> list[Command]:
    return talk.say("trainer0", m.Publish(MODEL, version, (8,), 0))


def test_a_version_is_fetched_by_each_receiver_and_the_old_one_retired() -> None:
    talk = Talk()
    fetched = talk.heard(publish(talk, 1), m.Fetch)
    assert [(who, fetch.version, fetch.turn.sender) for who, fetch in fetched] == [
        ("rollout0", 1, "trainer0"),
        ("rollout1", 1, "trainer0"),
    ]
    assert talk.heard(publish(talk, 2), m.Fetch) == []
    assert talk.heard(talk.say("rollout0", m.Staged(MODEL, 1)), m.Fetch)[0][1].version == 2
    last = talk.say("rollout1", m.Staged(MODEL, 1))
    assert talk.heard(last, m.Fetch)[0][1].version == 2
    assert {who for who, retire in talk.heard(last, m.Retire) if retire.version == 1} == {
        "rollout0",
        "rollout1",
        "trainer0",
    }


def test_nobody_fetches_from_a_holder_that_is_gone() -> None:
    talk = Talk()
    publish(talk, 1)
    talk.say("rollout0", m.Staged(MODEL, 1))
    talk.event(Gone(WorkerId("rollout0"), ""))
    assert "rollout0" not in {fetch.holder for fetch in talk.core.weights.fetching.values()}
    assert {holder for holders in talk.core.weights.holders.values() for holder in holders} == {"trainer0"}


def test_word_of_an_old_fetch_does_not_end_the_new_one() -> None:
    # The holder dies, the controller orders another fetch, and only then the receiver says that the first one failed.
    talk = Talk()
    talk.say("rollout1", m.Applied(MODEL, 0))
    publish(talk, 1)
    talk.say("rollout0", m.Staged(MODEL, 1))
    talk.say("rollout1", m.FetchFailed(MODEL, 1, "lane broke"))
    holder = talk.core.weights.fetching[WorkerId("rollout1")].holder
    assert holder == "rollout0"
    talk.event(Gone(WorkerId("rollout0"), ""))
    assert talk.core.weights.fetching[WorkerId("rollout1")].holder == "trainer0"
    publish(talk, 2)
    again = talk.heard(talk.say("rollout1", m.FetchFailed(MODEL, 1, "lane broke")), m.Fetch)
    assert len(again) <= 1
