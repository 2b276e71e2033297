"""Assertions of the invariants of the controller's state, for tests, simulations and replays; a run calls none."""

from collections import Counter

from flowrt.controller.state.membership import Membership
from flowrt.controller.state.sample_table import SampleTable
from flowrt.controller.state.slots import Group, Lease, Slot
from flowrt.controller.state.state import Environment, State
from flowrt.controller.state.weights import VersionTable
from flowrt.controller.transitions import rollback
from flowrt.ids import GroupId, LeaseId, WorkerId
from flowrt.protocol.messages import NO_BASE, Pull, Stage


def audit(state: State, env: Environment) -> None:
    """Raises AssertionError, which describes the first invariant that does not hold."""
    table, is_over = state.table, state.ended is not None
    for slot in table.slots.values():
        _check_slot(table, slot)
        # A restarted controller has columns without holders until the workers have sent their inventories.
        held = state.recovery.is_active or all(
            holding.holders for holding in {**slot.tensors, **slot.group.tensors}.values()
        )
        assert held, f"slot {slot.id} has a column without a holder"
    for group in table.groups.values():
        assert group.slots, f"group {group.id} has no slots, but is live"
        for member in group.slots:
            assert table.slots.get(member.id) is member, f"slot {member.id} of group {group.id} is not live"
            assert member.group is group, f"slot {member.id} of group {group.id} refers to group {member.group.id}"
    _check_queues(table)
    _check_holders(table)
    _check_leases(table)
    _check_counters(table)
    for versions in state.models.of.values():
        _check_versions(versions, state.membership, is_over)
    if not is_over:  # after the end, workers leave without being removed from the tables
        _check_members(state)
        if not state.recovery.is_active:
            _check_outdated(state, env)
    if env.flow.train_stage:
        _check_window(state, env)


def _check_slot(table: SampleTable, slot: Slot) -> None:
    assert table.groups.get(slot.group.id) is slot.group, (
        f"slot {slot.id} is of group {slot.group.id}, which is not live"
    )
    assert slot in slot.group.slots, f"slot {slot.id} is not among those of its group {slot.group.id}"
    for name, lease in slot.leases.items():
        assert table.leases.get(lease.id) is lease, f"slot {slot.id} is leased for {name}, but the lease has ended"
        assert lease.slots.get(slot.id) is slot, f"slot {slot.id} is leased for {name}, but not in the lease"
        assert not table.is_done(slot, name), f"slot {slot.id} is leased for {name}, which is done"
    for name, stage in table.stages.items():
        present = [column for column in stage.makes if column in slot.tensors or column in slot.inline]
        done = table.is_done(slot, name)
        assert not present or done, f"slot {slot.id} has {present} although {name} is not done"
        assert not done or present == list(stage.makes), f"slot {slot.id} has only {present} although {name} is done"
        if done and stage.generates:
            assert slot.spans_of == name, f"slot {slot.id} has no spans although {name} is done"
            if slot.group.is_exact:
                wrong = f"slot {slot.id} of version {slot.group.at_most} was generated as {slot.spans}"
                assert set(slot.spans[::2]) == {slot.group.at_most}, wrong
        if done or name in slot.leases:
            missing = [need for need in stage.needs if not slot.has(need)]
            assert not missing, f"slot {slot.id} lacks {missing}, which {name} needs"


def _check_queues(table: SampleTable) -> None:
    """A queue has exactly the slots that have all columns that the stage needs, and are neither done nor leased."""
    for name, queue in table.ready.items():
        stage = table.stages[name]
        ready = [slot for slot in table.slots.values() if _is_ready(table, slot, stage)]
        missing = [slot.id for slot in ready if slot not in queue]
        assert not missing, f"slots {missing} are ready for {name}, but not in its queue"
        assert len(queue) == len(ready), f"the queue of {name} has {len(queue)} slots, {len(ready)} are ready"
    for name, groups in table.ready_groups.items():
        stage = table.stages[name]
        whole = {g.id for g in table.groups.values() if g.slots and all(_is_ready(table, s, stage) for s in g.slots)}
        assert set(groups) == whole, f"groups {sorted(groups)} are queued for {name}, {sorted(whole)} are ready"
        for group in groups.values():
            oldest = group.oldest_version()
            assert groups.version(group.id) == oldest, f"group {group.id} is queued with another version than {oldest}"
        assert [group.id for group in groups.in_order()] == sorted(groups), f"{name} has not its groups in order"


def _check_holders(table: SampleTable) -> None:
    """Each holder of a tensor is among the holders of its group, which are in the index of holders."""
    held: dict[WorkerId, set[GroupId]] = {}
    for group in table.groups.values():
        of_slots = [holding for slot in group.slots for holding in slot.tensors.values()]
        for holding in [*group.tensors.values(), *of_slots]:
            unknown = holding.holders - group.holders.keys()
            assert not unknown, f"{unknown} hold a column of group {group.id}, and are not among its holders"
        for worker in group.holders:
            held.setdefault(worker, set()).add(group.id)
    indexed = {worker: set(groups) for worker, groups in table.held.items()}
    assert indexed == held, "the groups by holder are not those of the table"
    exact = {group.id for group in table.groups.values() if group.is_exact}
    listed = {group.id for version in table.exact.live for group in table.exact_groups.of_version(version)}
    assert listed == exact, f"groups {sorted(listed)} are those of evaluations, not {sorted(exact)}"


def _is_ready(table: SampleTable, slot: Slot, stage: Stage) -> bool:
    if stage.flow not in ("", slot.group.flow) or table.is_done(slot, stage.name) or stage.name in slot.leases:
        return False
    return all(slot.has(need) for need in stage.needs)


def _check_leases(table: SampleTable) -> None:
    working: dict[str, dict[WorkerId, dict[LeaseId, Lease]]] = {stage: {} for stage in table.stages}
    for lease in table.leases.values():
        working[lease.stage].setdefault(lease.worker, {})[lease.id] = lease
    assert table.working == working, "the leases by stage and worker are not those of the table"
    for lease in table.leases.values():
        assert lease.slots, f"lease {lease.id} of {lease.worker} on {lease.stage} has no slots"
        for slot in lease.slots.values():
            assert table.slots.get(slot.id) is slot, f"lease {lease.id} has slot {slot.id}, which is not live"
            assert slot.leases.get(lease.stage) is lease, f"lease {lease.id} has slot {slot.id}, which is not leased"
            if lease.stage in table.flows.generating:
                assert (lease.version or 0) >= slot.group.at_least, f"slot {slot.id} is generated with too old weights"
                is_exact = lease.version == slot.group.at_most or not slot.group.is_exact
                assert is_exact, f"slot {slot.id} of {slot.group.at_most} is generated with version {lease.version}"


def _check_counters(table: SampleTable) -> None:
    """Counters that are updated with each change equal a new count."""
    rows, tensor_bytes, undone = Counter[str](), Counter[str](), Counter[str]()
    live, to_generate = Counter[int](), Counter[int]()
    for group in table.groups.values():
        rows[group.flow] += len(group.slots)
        if group.is_exact:
            live[group.at_most] += len(group.slots)
            open_slots = sum(not table.is_done(slot, name) for slot in group.slots for name in table.flows.generating)
            to_generate.update({group.at_most: open_slots} if open_slots else {})
        for column, holding in [*group.tensors.items(), *(item for s in group.slots for item in s.tensors.items())]:
            tensor_bytes[group.flow] += holding.length * table.flows.item_bytes[column]
        for stage in table.flows.of(group.flow):
            undone[stage.name] += sum(not table.is_done(slot, stage.name) for slot in group.slots)
    exact = (table.exact.live, table.exact.to_generate)
    assert exact == (live, to_generate), f"{exact} slots of evaluations are counted, there are {(live, to_generate)}"
    assert table.rows == rows, f"the row counter is {dict(table.rows)}, there are {dict(rows)}"
    assert table.bytes == tensor_bytes, f"the byte counter is {dict(table.bytes)}, there are {dict(tensor_bytes)}"
    assert Counter(table.undone) == undone, f"the counter of undone slots is {table.undone}, there are {dict(undone)}"


def _check_members(state: State) -> None:
    """Only members have leases, tensors and parked requests."""
    table, membership, requests = state.table, state.membership, state.requests
    of_role: dict[str, set[WorkerId]] = {}
    for member in membership.members():
        of_role.setdefault(member.role, set()).add(member.id)
    assert membership.of_role() == of_role, "the members by role are not those of the run"
    finished = {member.id for member in membership.members() if member.finished}
    assert membership.finished() == finished, f"{sorted(membership.finished())} count as finished, not {finished}"
    for lease in table.leases.values():
        assert lease.worker in membership, f"lease {lease.id} on {lease.stage} is of {lease.worker}, which is no member"
    for group in table.groups.values():
        for holding in [*group.tensors.values(), *(tensor for slot in group.slots for tensor in slot.tensors.values())]:
            gone = [worker for worker in holding.holders if worker not in membership]
            assert not gone, f"{gone} hold a column of group {group.id}, but are no members"
        is_kept = state.recovery.is_active or not group.is_exact or group.source in membership
        assert is_kept, f"group {group.id} of an evaluation is live, but its source {group.source} is no member"
    for worker in [*state.models.outdated, *(parked.worker for parked in requests.all())]:
        assert worker in membership, f"{worker} waits, but is no member"
    pulls, offers = requests.parked()
    known = {(parked.worker, parked.request.request) for parked in requests.all()}
    assert known == pulls | offers, f"requests {sorted(known ^ (pulls | offers))} are in one of two indices"


def _check_outdated(state: State, env: Environment) -> None:
    """A worker that could start ready slots only with the latest weights is fetching them, or backs off."""
    versions, table = state.models.policy, state.table
    if versions.latest not in versions.published:
        return

    def open_to(version: int, stage: str) -> list[Slot]:
        slots = [slot for slot in table.slots.values() if slot in table.ready[stage]]
        return [slot for slot in slots if _may_start(state, env, slot.group, version)]

    for worker in versions.behind.keys() - state.models.backing_off[versions.model]:
        if versions.is_pinned(worker) or worker in state.recovery.unconfirmed:
            continue
        own = -1 if versions.is_late(worker) else versions.applied_version(worker)
        for parked in state.requests.of(worker):
            stage = parked.request.stage if isinstance(parked.request, Pull) else ""
            if stage in table.flows.generating and not open_to(own, stage):
                helped = [slot.id for slot in open_to(versions.latest, stage)]
                assert not helped, f"{worker} does not fetch version {versions.latest}, which may start {helped}"


def _may_start(state: State, env: Environment, group: Group, version: int) -> bool:
    if version < group.at_least or (group.is_exact and version != group.at_most):
        return False
    step = state.window.expected_step(group)
    return group.flow != env.flow.train_flow or state.admission(env).may_start(step, version)


def _check_versions(versions: VersionTable, membership: Membership, over: bool) -> None:
    """A member holds the complete latest version; exactly the receivers without it that do not fetch are behind."""
    whole = {version for version, base in versions.holders if base == NO_BASE}
    latest, newest, model = versions.latest, versions.newest, versions.model
    assert latest == max(whole, default=0), f"latest of {model} is {latest}, but {sorted(whole)} are held whole"
    assert latest <= newest, f"latest of {model} is {latest}, but {newest} is the newest that was published"
    assert not latest or latest in versions.published, f"version {latest} of {model} was not published"
    behind = {who for who, receiver in versions.receivers.items() if receiver.staged < latest} - set(versions.fetching)
    assert set(versions.behind) == behind, f"{sorted(versions.behind)} count as behind, {sorted(behind)} are"
    applying = Counter(receiver.applied for receiver in versions.receivers.values())
    assert versions.applying == applying, f"receivers by version of {model} are {applying}, not {versions.applying}"
    staging = Counter(receiver.staged for receiver in versions.receivers.values())
    assert versions.staging == staging, f"receivers by received version of {model} are not {versions.staging}"
    idle = versions.receivers.keys() - versions.fetching.keys() - versions.resting.keys()
    assert {receiver.worker for receiver in versions.idle} == idle, f"the idle receivers of {model} are {sorted(idle)}"
    for receiver in versions.idle:
        known = versions.receivers[receiver.worker]
        assert (receiver.applied, receiver.staged) == (known.applied, known.staged), f"{receiver} is not {known}"
    _check_sources(versions)
    for fetch in versions.fetching.values():
        served = versions.serving[fetch.holder, fetch.weights.version]
        assert served, f"{fetch.holder} serves {fetch.receiver}, but is not counted as serving"
    gone = [] if over else [worker for worker in {*versions.held, *versions.receivers} if worker not in membership]
    assert not gone, f"{gone} hold or use versions of {model}, but are no members"


def _check_sources(versions: VersionTable) -> None:
    """A version is fetched from its holders, and from receivers that an unbroken chain of fetches joins to one."""
    served: dict[WorkerId, set[WorkerId]] = {}
    for fetch in versions.fetching.values():
        served.setdefault(fetch.holder, set()).add(fetch.receiver)
    assert {holder: set(below) for holder, below in versions.served.items()} == served, "receivers by holder differ"
    both = versions.resumable.keys() & versions.fetching.keys()
    assert not both, f"{both} fetch, and have parts of fetches that failed"
    interrupted = {*versions.broken, *versions.stalled, *versions.resumable}
    waiting = [receiver for receiver in versions.stalled if versions.fetching[receiver].holder not in interrupted]
    assert not waiting, f"{waiting} are below no interrupted fetch"
    for (version, base), sources in versions.sources.items():
        joined = set(versions.holders.get((version, base), ()))
        pending = list(joined)
        while pending:
            for receiver in served.get(pending.pop(), ()):
                fetch = versions.fetching[receiver]
                fits = (fetch.weights.version, fetch.weights.base) == (version, base)
                if fits and receiver not in versions.orphaned and receiver not in joined:
                    joined.add(receiver)
                    pending.append(receiver)
        wrong = [
            receiver
            for receiver in {*joined, *versions.receivers, *versions.held}
            if (receiver in sources) != (receiver in joined)
        ]
        assert not wrong, f"whether {sorted(wrong)} are sources of version {version} is wrong"


def _check_filter(state: State, env: Environment) -> None:
    """While the filter may drop groups in this step, it refuses no group that a trainer may get next."""
    window, tries = state.window, env.settings.filter_tries
    assert window.filtered <= tries, f"{window.filtered} groups were filtered in step {window.step}, {tries} may be"
    if state.ended is not None or state.recovery.is_active or window.filtered == tries:
        return
    for group in state.table.ready_groups[env.flow.train_stage].values():
        is_due = not window.strict_issue_order or group.id <= window.decided
        why = env.policies.group_filter.refusal(group) if is_due else ""
        assert not why, f"group {group.id} may be trained in step {window.step}, and the filter refuses it: {why}"


def _check_window(state: State, env: Environment) -> None:
    """Every live group of the train flow waits or is in training, and no sample in training is too old."""
    table, window, train_stage = state.table, state.window, env.flow.train_stage
    flow = table.stages[train_stage].flow
    live = {group.id for group in table.groups.values() if group.flow == flow}
    taken, waiting = set(window.taken), set(window.waiting)
    assert live == taken | waiting, f"groups {sorted(live ^ (taken | waiting))} are live or in the window, but not both"
    assert not taken & waiting, f"groups {sorted(taken & waiting)} are taken and waiting"
    assert window.waiting == sorted(waiting), f"groups wait as {window.waiting}, not once each in order of issue"
    _check_filter(state, env)
    assert len(taken) <= window.groups_per_step, f"{len(taken)} groups taken of {window.groups_per_step}"
    leases = [lease for lease in table.leases.values() if lease.stage == train_stage]
    leased = {slot.group.id for lease in leases for slot in lease.slots.values()}
    assert leased == taken, f"groups {sorted(leased ^ taken)} are leased to trainers or taken, but not both"
    for group_id, oldest in window.oldest_versions.items():
        group = table.groups[group_id]
        assert group_id in table.regenerated or oldest == group.oldest_version(), (
            f"group {group_id} has another oldest version"
        )
    assert window.oldest_versions.keys() == waiting, "not every waiting group has a version in the window, or another"
    for group in window.taken.values():
        assert all(train_stage in slot.leases for slot in group.slots), f"group {group.id} is leased in part"
        for slot in group.slots:
            assert not rollback.is_over_age(state, env, slot), f"slot {slot.id} is over age in step {window.step}"
