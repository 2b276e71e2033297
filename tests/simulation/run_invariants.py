"""Invariants at the end of every simulated run with any faults, checked from outside the core."""

from collections import Counter, defaultdict

from flowrt.controller.events import AppendLedger, AppendRestartLog, Send
from flowrt.controller.policies.group_filter import DECISION
from flowrt.controller.settings import OnLostSample
from flowrt.controller.state.controller_restart import GroupsOpened, StageCommitted
from flowrt.controller.state.slots import Group, Slot
from flowrt.controller.transitions.evaluations import LOST_VERSION
from flowrt.ids import GroupId, SlotId
from flowrt.protocol import messages as m
from tests.simulation.cluster import SimulatedCluster
from tests.simulation.resumed_runs import ResumedRuns
from tests.simulation.rows import Row
from tests.simulation.scenario import GROUP_COLUMNS, PROMPTS_PER_EPOCH, Scenario, decision


def assert_sound(cluster: SimulatedCluster) -> None:
    """Assert the invariants of every completed run."""
    scenario = cluster.scenario
    assert [closed.step for closed in cluster.steps] == list(range(scenario.steps))
    assert all(closed.groups == scenario.groups_per_step for closed in cluster.steps)
    assert all(closed.samples == len(closed.lags) for closed in cluster.steps)
    # The staleness bound, by the lags of the controller and by the spans that the trainer received.
    assert all(0 <= lag <= scenario.bound for closed in cluster.steps for lag in closed.lags)
    assert all(step - min(row.spans[::2]) <= scenario.bound for step, row in cluster.trained)
    assert all(max(row.spans[::2]) <= step for step, row in cluster.trained)
    assert_whole_groups(cluster)
    # Nothing remains, except prompts of an offer that the last step did not need.
    table = cluster.core.state.table
    live = {(group.epoch, group.prompt) for group in table.groups.values()}
    assert len(live) < scenario.prompts_at_once
    assert_accounts_agree(cluster, live)
    assert_terminated(cluster)
    assert table.leases == {}
    if not live:
        assert (table.groups, table.slots) == ({}, {})
        assert (table.rows.total(), table.bytes.total(), set(table.undone.values())) == (0, 0, {0})
    groups, slots = set(table.groups), set(table.slots)
    for worker in cluster.workers.values():
        left = {key for key in worker.have if key[1] not in (groups if key[0] in GROUP_COLUMNS else slots)}
        assert left == set(), f"{worker.id} still holds {sorted(left)}"
        assert set(worker.coming.values()) <= worker.failed


def assert_terminated(cluster: SimulatedCluster) -> None:
    """Each worker that has asked to leave, or that an operator has drained, has left, or is to leave."""
    membership = cluster.core.state.membership
    staying = [
        member.id for member in membership.members() if cluster.workers[member.id].terminated and not member.is_leaving
    ]
    assert staying == [], f"{staying} are to leave, and the controller does not know it"


def assert_whole_groups(cluster: SimulatedCluster) -> None:
    """Each prompt is trained once, in one step, with all members that its group has not lost."""
    scenario = cluster.scenario
    for closed in cluster.steps:
        assert closed.samples == len([row for at, row in cluster.trained if at == closed.step])
    rows_of: dict[tuple[int, int], list[tuple[int, Row]]] = defaultdict(list)
    for step, row in cluster.trained:
        rows_of[row.epoch, row.prompt].append((step, row))
    for rows in rows_of.values():
        assert len({(step, row.group) for step, row in rows}) == 1
        members = sorted(row.member for _, row in rows)
        if scenario.on_lost_sample is OnLostSample.TRAIN_REMAINING and len(members) < scenario.members:
            assert set(members) < set(range(scenario.members))
            assert len(set(members)) == len(members) >= 2
        else:
            assert members == list(range(scenario.members))


def assert_filtered(cluster: SimulatedCluster) -> None:
    """A step with tries left trained no group that the filter refuses; what was filtered was trained in no step."""
    scenario = cluster.scenario
    tries, group_filter = scenario.filter_tries, scenario.group_filter
    numbers: dict[int, dict[str, float]] = defaultdict(dict)
    for command in cluster.log:
        if isinstance(command, Send) and isinstance(command.message, m.Grant):
            for column in command.message.inline:
                for number, value in zip(command.message.slots, column.values, strict=True):
                    numbers[number][column.column] = value
    filtered = Counter(record.step for record in cluster.records if record.reason.startswith("filtered: "))
    for closed in cluster.steps:
        groups: dict[int, Group] = {}
        for at, row in cluster.trained:
            if at == closed.step:
                group = groups.setdefault(row.group, new_group(row))
                slot = Slot(SlotId(row.slot), group, row.member)
                slot.inline = numbers[row.slot]
                group.slots.append(slot)
        if scenario.filters and scenario.on_lost_sample is not OnLostSample.TRAIN_REMAINING:
            # A regenerated sample has another reward, and its group another decision.
            for group in groups.values():
                decisions = {slot.inline[DECISION] for slot in group.slots}
                assert decisions == {decision(slot.inline["reward"] for slot in group.slots)}
        refused = sum(bool(group_filter.refusal(group)) for group in groups.values())
        counts = dict(closed.counts)
        assert filtered[closed.step] <= tries
        assert not refused or filtered[closed.step] == tries
        assert (counts["filtered_groups"], counts["refused_groups_trained"]) == (filtered[closed.step], refused)
    ends = {pair: state for pair, state in cluster.state.items() if state == "dropped"}
    dropped = {(record.epoch, record.prompt) for record in cluster.records if record.reason.startswith("filtered: ")}
    assert dropped <= ends.keys()


def new_group(row: Row) -> Group:
    """The group of a row, without its slots."""
    return Group(group_id=GroupId(row.group), flow="train", prompt=row.prompt, epoch=row.epoch, at_least=0)


def assert_accounts_agree(cluster: SimulatedCluster, live: set[tuple[int, int]]) -> None:
    """Each opened prompt was trained once or dropped with a reason; each dropped one was replaced."""
    scenario = cluster.scenario
    trained = {(row.epoch, row.prompt) for _, row in cluster.trained}
    assert {pair for pair, state in cluster.state.items() if state == "trained"} == trained
    assert len(trained) == scenario.steps * scenario.groups_per_step
    trainings = Counter((record.epoch, record.prompt) for record in cluster.records if record.state == "trained")
    assert set(trainings.values()) == {1}
    assert all(record.reason for record in cluster.records if record.state == "dropped")
    others = Counter(state for pair, state in cluster.state.items() if pair not in live | trained)
    assert set(others) <= ({"dropped", "unread"} if scenario.source_kills else {"dropped"})
    assert sum(others.values()) <= sum(cluster.core.state.dropped.values())


def assert_evaluated(cluster: SimulatedCluster) -> None:
    """Each group of an evaluation is closed, with all its answers, only by its version, or its source knows why not."""
    dropped: dict[int, str] = {}  # as the source was notified, even if a crash has lost the message
    for sent in cluster.log:
        if isinstance(sent, Send) and isinstance(sent.message, m.GroupsDropped):
            dropped.update(dict.fromkeys(sent.message.groups, sent.message.reason))
    can_fail = cluster.scenario.attempts <= cluster.scenario.losses
    assert all(why == LOST_VERSION or (can_fail and "failed:" in why) for why in dropped.values()), dropped
    for group, evaluation in cluster.shared.evaluations.items():
        rows = cluster.shared.answers[group].values()
        assert evaluation.is_closed, f"the source waits for group {group}, of which there are {len(rows)} answers"
        assert all(set(row.spans[::2]) == {evaluation.version} for row in rows)
        assert len(rows) == evaluation.members or group in dropped, (
            f"{len(rows)} of {evaluation.members} answers to group {group}"
        )
    newest = cluster.core.state.models.policy.newest
    sources = [worker for worker in cluster.workers.values() if worker.role == "source"]
    assert not [offer for source in sources for offer in source.offers.values() if offer.at_most <= newest]
    exact = cluster.core.state.table.exact
    assert (exact.live, exact.to_generate) == ({}, {})
    assert cluster.core.state.models.policy.pin is None


def assert_generated_kept(cluster: SimulatedCluster) -> None:
    """No prompt of which a sample has been generated becomes unread because its source dies; other workers live."""
    prompt_of: dict[int, tuple[int, int]] = {}
    generated: set[tuple[int, int]] = set()
    for command in cluster.log:
        match command:
            case AppendRestartLog(GroupsOpened(flow="train") as opened):
                for index, prompt in enumerate(opened.prompts):
                    first = opened.slot + index * opened.members
                    prompt_of.update(dict.fromkeys(range(first, first + opened.members), (opened.epoch, prompt)))
            case AppendRestartLog(StageCommitted(stage="rollout") as committed):
                generated.update(prompt_of[slot] for slot in committed.slots if slot in prompt_of)
            case AppendLedger(prompt, epoch, "unread"):
                assert (epoch, prompt) not in generated, f"prompt {prompt} of epoch {epoch} is unread with its source"


def assert_exact(runs: ResumedRuns, scenario: Scenario) -> None:
    """All executions of a run together trained what an uninterrupted one would have trained."""
    wanted = scenario.steps * scenario.groups_per_step
    account = runs.ledger.account(live=[])
    assert (account.lost, account.trained_twice) == (0, 0)
    assert account.states.get("trained") == wanted
    # The prompts are those of an uninterrupted run: the first ones in the order of the source.
    trained = {(row.epoch, row.prompt): step for step, row in runs.trained()}
    assert set(trained) == {divmod(number, PROMPTS_PER_EPOCH) for number in range(wanted)}
    assert Counter(trained.values()) == dict.fromkeys(range(scenario.steps), scenario.groups_per_step)
    rows = Counter((row.epoch, row.prompt, row.member) for _, row in runs.trained())
    assert set(rows.values()) == {1}
    assert rows.total() == wanted * scenario.members
    assert all(0 <= step - min(row.spans[::2]) <= scenario.bound for step, row in runs.trained())
