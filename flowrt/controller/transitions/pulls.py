"""Pulls: granted at once, or parked until slots are ready for the stage and admission lets the worker start.

The puller receives a grant with a lease on its slots; for each tensor that the puller lacks, an owner receives an
order to send it.
"""

from collections.abc import Callable, Sequence

from flowrt.controller.events import AppendRestartLog, Command, Send
from flowrt.controller.policies.dispatch.base import Puller, Start
from flowrt.controller.state.controller_restart import SHARE_ENDED, CounterSet
from flowrt.controller.state.kept_samples import TOO_OLD
from flowrt.controller.state.parked_requests import FULL, ParkedRequest
from flowrt.controller.state.slots import NO_LEASE, Lease, Slot
from flowrt.controller.state.state import Environment, State
from flowrt.controller.state.transfers import plan
from flowrt.controller.transitions import commits, failed_transfers, offers, rollback, step_selection
from flowrt.ids import WorkerId
from flowrt.protocol.messages import NO_VERSION, CancelRequest, Grant, Ints, Offer, Pull, Rejected, SendSamples, Values

MAX_AGED = 64
"""Maximum number of groups whose oldest version may have changed since it was last computed."""
STOPPED = "no step is begun any more, what is trained is to be saved"
NEVER_APPLIED = (
    "{} pulls slots of {!r} and has never said which version of {!r} it generates with, so it is sent no newer one; "
    "call session.params.applied(MODEL, VERSION) before the first pull"
)

# ---- messages


def pull(state: State, env: Environment, worker: WorkerId, message: Pull, now: float) -> list[Command]:
    """Complete the leases that a pull reports as done; then grant slots, reject the pull if it is invalid, or park it.

    Raises RemoteProtocolError if the pull reports a lease as done that the worker was not granted for this stage, or
    the worker has a parked request with the same number.
    """
    is_training = message.stage == env.flow.train_stage
    if is_training:
        what = f"trains (stage {message.stage})"
        if fault := state.membership.role_fault(worker, env.settings.checkpointing_roles, what):
            return [Send(worker, Rejected(message.request, fault))]
    if message.done:
        state.table.check_leases(message.done, worker, message.stage)
    state.requests.check_new(worker, message.request, message.stage)
    if fault := _pull_fault(state, worker, message, is_training):
        return [Send(worker, Rejected(message.request, fault))]
    parked = ParkedRequest(worker, message, now)
    commands: list[Command] = []
    if message.done:
        commands, late = commits.complete_leases(state, env, worker, message)
        parked = ParkedRequest(worker, message, now, tuple(late))
    if answer := _serve(state, env, parked, now):
        return commands + answer if commands else answer
    # The slots that are ready did not suffice for the pulls parked earlier, so these need not be tried again.
    state.requests.park_pull(parked)
    return commands


def _pull_fault(state: State, worker: WorkerId, message: Pull, is_training: bool) -> str:
    """Why this pull is rejected; empty if it is valid."""
    window = state.window
    if message.stage not in state.table.stages:
        return f"there is no stage {message.stage[:80]!r} in this dataflow"
    if is_training and window.is_past(message.step):
        return f"step {message.step} is closed, step {window.step} is in training"
    if is_training and window.is_beyond(message.step):
        return STOPPED
    if state.membership.is_leaving(worker):
        return f"{worker} is leaving the run"
    if state.requests.is_full(worker):
        return FULL
    if not is_training and message.slots < 1:
        return f"a pull of {message.slots} slots of {message.stage}"
    return commits.completion_fault(state, message) if message.done else ""


def cancel_request(
    state: State, env: Environment, worker: WorkerId, message: CancelRequest, now: float
) -> list[Command]:
    """Cancel a parked request; a request that has been answered already is ignored."""
    parked = state.requests.take_out(worker, message.request)
    if parked is None:
        return []
    if isinstance(parked.request, Offer):
        state.work.add_offers()  # later offers may fit
    reason = f"withdrawn after {now - parked.since_s:.1f} s of waiting for {wait_reason(state, env, parked)}"
    if parked.refused:
        reason += f"; the leases {parked.refused}, said to be done, had ended before"
    return [Send(worker, Rejected(message.request, reason))]


# ---- parked pulls


def serve_worklist(state: State, env: Environment, now: float) -> list[Command]:
    """Try parked requests until the worklist is empty."""
    commands: list[Command] = []
    work = state.work
    is_strict = bool(env.flow.train_stage) and env.settings.strict_issue_order
    while work.is_due:
        if (ready := work.take_ready()) or is_strict:  # after a drop, later groups may be due
            commands += step_selection.decide(state, env, ready)
        for worker in work.take_workers():
            commands += _serve_worker(state, env, worker, now)
        if work.take_offers() and state.requests.offers:
            commands += offers.serve_offers(state, env)
        for stage in work.take_stages():
            if state.requests.has_pulls(stage):
                commands += _serve_stage(state, env, stage, now)
    return commands


def _serve_worker(state: State, env: Environment, worker: WorkerId, now: float) -> list[Command]:
    """Try the parked pulls of a worker whose weights or capacity have changed."""
    commands: list[Command] = []
    for parked in state.requests.of(worker):
        request = parked.request
        if isinstance(request, Pull) and request.stage in state.table.flows.generating:
            again = ParkedRequest(worker, request, parked.since_s, parked.refused)
            if answer := _serve(state, env, again, now):
                state.requests.take_out(worker, request.request)
                commands += answer
    return commands


def _serve_stage(state: State, env: Environment, stage: str, now: float) -> list[Command]:
    """Try the parked pulls of a stage; pulls at a version that may start nothing in the queue are skipped."""
    queue, weights, models = state.table.ready.get(stage), state.models.policy, state.models
    is_over, generates = offers.is_over(state, env, stage), state.table.stages[stage].generates
    refused = -1  # newest version for which nothing in the queue may start

    def serve(parked: ParkedRequest[Pull]) -> list[Command]:
        nonlocal refused
        if state.recovery.is_parked(parked.worker):
            return []
        version = weights.applied_version(parked.worker)
        if version <= refused:
            if generates and parked.worker not in models.outdated:
                weights.mark_outdated(parked.worker)  # it has to fetch newer weights
            return []
        answer = _serve(state, env, parked, now)
        is_like_others = not weights.is_late(parked.worker) and not state.lanes.failed
        if not answer and queue is not None and queue.is_impartial and is_like_others:
            refused = version
        return answer

    def more() -> bool:
        return queue is None or is_over or (len(queue) > 0 and refused < weights.newest)

    return state.requests.serve_pulls(stage, serve, more)


def reject_pulls(state: State, worker: WorkerId, reason: str) -> list[Command]:
    """Reject all parked pulls of a worker."""
    commands: list[Command] = []
    for parked in state.requests.of(worker):
        if isinstance(parked.request, Pull):
            state.requests.take_out(worker, parked.request.request)
            commands.append(Send(worker, Rejected(parked.request.request, reason)))
    return commands


def reject_beyond_end(state: State, env: Environment) -> list[Command]:
    """Reject pulls for steps that will not be begun."""
    commands: list[Command] = []
    for parked in list(state.requests.all()):
        request = parked.request
        if isinstance(request, Pull) and request.stage == env.flow.train_stage and state.window.is_beyond(request.step):
            state.requests.take_out(parked.worker, request.request)
            commands.append(Send(parked.worker, Rejected(request.request, STOPPED)))
    return commands


# ---- one pull


def _serve(state: State, env: Environment, parked: ParkedRequest[Pull], now: float) -> list[Command]:
    """Answer a pull with a grant or a rejection; no commands if it has to wait."""
    if state.recovery.is_parked(parked.worker):
        return []
    if parked.request.stage == env.flow.train_stage:
        return _serve_trainer(state, env, parked)
    if parked.request.stage in state.table.ready_groups:
        return _serve_groups(state, env, parked, now)
    return _serve_slots(state, env, parked, now)


def _serve_trainer(state: State, env: Environment, parked: ParkedRequest[Pull]) -> list[Command]:
    message, worker, window = parked.request, parked.worker, state.window
    groups = step_selection.next_batch(state, env, worker, message.step)
    if groups is None:
        kept: list[Command] = []
        if window.share_ended_step != window.step:
            window.share_ended_step = window.step
            kept.append(AppendRestartLog(CounterSet(SHARE_ENDED, window.step)))
        return [*kept, Send(worker, closing_grant(message))]
    if not groups:
        return []
    window.take(groups)
    slots = [slot for group in groups for slot in group.slots]
    # No deadline: samples cannot be taken out of a gradient. The lease ends with its step or the loss of the trainer.
    lease = state.table.lease(message.stage, slots, worker, float("inf"), 0, window.step)
    commands: list[Command] = []
    for group in groups:
        commands += rollback.record(state, env, group, "leased")
    return commands + grant(state, message, slots, lease, step_selection.kept_tokens(state, env, slots))


def _serve_slots(state: State, env: Environment, parked: ParkedRequest[Pull], now: float) -> list[Command]:
    message, worker, table, weights = parked.request, parked.worker, state.table, state.models.policy
    stage, queue, generates = message.stage, table.ready[message.stage], table.stages[message.stage].generates
    version = weights.applied_version(worker)
    may_start: Callable[[Slot], Start] | None = None
    if generates:
        if len(table.regenerated) > MAX_AGED:  # not all at once, at the next pull of a trainer
            state.window.note_versions(table.aged())
        may_start = _start_check(state, env, worker, stage, version)
    elif state.lanes.failed:
        may_start = _reachable_check(state, worker, stage)
    if generates:
        is_pinned = weights.is_pinned(worker)
        chosen = queue.take(Puller(worker, message.slots, may_start, version, is_pinned))
        if not chosen and not is_pinned and table.generating[stage].is_waiting_for_newer(version):
            state.models.policy.mark_outdated(worker)
        else:
            state.models.policy.clear_outdated(worker)
    else:
        chosen = queue.take(Puller(worker, message.slots, may_start))
    if not chosen:
        if worker in state.models.outdated and worker not in weights.receivers and weights.newest:
            state.models.policy.clear_outdated(worker)
            return [Send(worker, Rejected(message.request, NEVER_APPLIED.format(worker, stage, weights.model)))]
        if offers.is_over(state, env, stage):
            return [Send(worker, closing_grant(message, parked.refused))]
        return []
    return _lease(state, env, parked, chosen, version, now)


def _serve_groups(state: State, env: Environment, parked: ParkedRequest[Pull], now: float) -> list[Command]:
    """Grant ready groups in order of issue, up to the number of slots in the pull, and at least one group."""
    message = parked.request
    chosen: list[Slot] = []
    for group in state.table.ready_groups[message.stage].in_order():
        if chosen and len(chosen) + len(group.slots) > message.slots:
            break
        chosen += group.slots
    if not chosen:
        is_over = offers.is_over(state, env, message.stage)
        return [Send(parked.worker, closing_grant(message, parked.refused))] if is_over else []
    return _lease(state, env, parked, chosen, 0, now)


def _lease(
    state: State, env: Environment, parked: ParkedRequest[Pull], chosen: Sequence[Slot], version: int, now: float
) -> list[Command]:
    """Lease these slots and grant them.

    The lease duration doubles with each lease that has expired on a slot, so work that takes longer is completed.
    """
    if env.settings.journals and state.table.stages[parked.request.stage].generates:
        _discard_over_age(state, env, chosen)
    overdue = chosen[0].overdue if len(chosen) == 1 else max([slot.overdue for slot in chosen])
    deadline_s = now + env.settings.lease_s * 2**overdue
    lease = state.table.lease(parked.request.stage, chosen, parked.worker, deadline_s, version, longer=overdue > 0)
    return grant(state, parked.request, chosen, lease, refused=parked.refused)


def _discard_over_age(state: State, env: Environment, chosen: Sequence[Slot]) -> None:
    """Discard what journals have of these samples if it is too old for the step that is expected to train them."""
    for slot in chosen:
        kept = slot.group.kept.get(slot.member)
        if kept is None:
            continue
        step = state.window.expected_step(slot.group)
        if not state.admission(env).may_train(step, kept.oldest):
            state.table.note_kept(slot, None)
            state.kept.discarded[TOO_OLD] += 1


def _reachable_check(state: State, worker: WorkerId, stage: str) -> Callable[[Slot], Start]:
    """A function that returns whether the worker can be sent what it needs for a stage of a slot; if no worker can,
    each may try.
    """
    columns, pullers = state.table.flows.fetched[stage], state.requests.pullers[stage]

    def may_start(slot: Slot) -> Start:
        if not failed_transfers.is_unreachable(state, slot, columns, worker):
            return Start.NOW
        others = (failed_transfers.is_unreachable(state, slot, columns, other) for other in pullers)
        return Start.NOW if all(others) else Start.ELSEWHERE

    return may_start


def _start_check(state: State, env: Environment, worker: WorkerId, stage: str, version: int) -> Callable[[Slot], Start]:
    """A function that returns whether the worker may start a slot with this version of the policy."""
    is_late = state.models.policy.is_late(worker)
    may_generate = not state.lanes.failed or failed_transfers.may_generate(state, env, worker, stage)

    def may_start(slot: Slot) -> Start:
        if is_late:
            return Start.NOT_YET
        if version < slot.group.at_least:
            return Start.ELSEWHERE
        if slot.group.flow != env.flow.train_flow:
            return Start.NOW
        if not may_generate:
            return Start.ELSEWHERE
        is_admitted = state.admission(env).may_start(state.window.expected_step(slot.group), version)
        return Start.NOW if is_admitted else Start.NOT_YET

    return may_start


# ---- grants


def grant(
    state: State,
    message: Pull,
    slots: Sequence[Slot],
    lease: Lease,
    more: tuple[Values, ...] = (),
    refused: Ints = (),
) -> list[Command]:
    """The grant for the puller, and the orders to send the tensors that the puller lacks.

    Args:
        state: the controller's state.
        message: the pull that is answered.
        slots: the leased slots, at least one, in the order of the grant.
        lease: the lease on them; its worker is the puller.
        more: inline columns besides those that the stage needs.
        refused: leases that the pull reported as done and that had ended before.
    """
    table = state.table
    fetched, columns = table.flows.fetched[message.stage], table.flows.inline[message.stage]
    if len(slots) == 1:  # fast path: one slot
        (slot,) = slots
        group = slot.group
        ids: Ints = (slot.id,)
        inline = more + tuple([Values(column, (slot.inline[column],)) for column in columns]) if columns else more
        flows: tuple[str, ...] = (group.flow,)
        groups: Ints = (group.id,)
        members: Ints = (slot.member,)
        prompts: Ints = (group.prompt,)
        epochs: Ints = (group.epoch,)
        attempts: Ints = (slot.attempt,)
        spans: tuple[Ints, ...] = (slot.spans,) if slot.spans else ()
    else:
        of_slots = [slot.group for slot in slots]
        ids = tuple([slot.id for slot in slots])
        inline = more + tuple([Values(column, tuple([slot.inline[column] for slot in slots])) for column in columns])
        flows = tuple([group.flow for group in of_slots])
        flows = flows if len(set(flows)) > 1 else flows[:1]
        groups = tuple([group.id for group in of_slots])
        members = tuple([slot.member for slot in slots])
        prompts = tuple([group.prompt for group in of_slots])
        epochs = tuple([group.epoch for group in of_slots])
        attempts = tuple([slot.attempt for slot in slots])
        spans = tuple([slot.spans for slot in slots])
        spans = spans if any(spans) else ()
    parts, incoming = plan(table, state.lanes, lease.worker, fetched, slots, ids) if fetched else ((), ())
    exact = _exact(slots) if table.exact.live else ()
    journals: tuple[str, ...] = ()
    if lease.version is not None and any(slot.group.kept for slot in slots):
        kept_samples = [slot.group.kept.get(slot.member) for slot in slots]
        journals = tuple(["" if kept is None else "\n".join(kept.journals) for kept in kept_samples])
    answer = Grant(  # hot path: with keywords for all fields it takes twice as long
        message.request, lease.id, ids, flows, groups, members, prompts, epochs, attempts, spans, inline, parts,
        incoming, False, refused, exact, journals,
    )  # fmt: skip
    commands: list[Command] = [Send(lease.worker, answer)]
    for transfer in incoming:
        commands.append(Send(WorkerId(transfer.turn.sender), SendSamples(transfer.turn, transfer.parts)))
    return commands


def _exact(slots: Sequence[Slot]) -> Ints:
    """The version that has to generate each slot, or `NO_VERSION`; empty if no slot is exact."""
    if not any(slot.group.is_exact for slot in slots):
        return ()
    return tuple([slot.group.at_most if slot.group.is_exact else NO_VERSION for slot in slots])


def closing_grant(message: Pull, refused: Ints = ()) -> Grant:
    """The grant without slots that closes a stream or a step: the stage has no more slots for this puller."""
    return Grant(
        request=message.request,
        lease=NO_LEASE,
        slots=(),
        flows=(),
        groups=(),
        members=(),
        prompts=(),
        epochs=(),
        attempts=(),
        spans=(),
        inline=(),
        parts=(),
        incoming=(),
        closed=True,
        refused=refused,
    )


# ---- what parked requests wait for


def waiting(state: State, env: Environment) -> list[tuple[WorkerId, str, float]]:
    """(worker, what it waits for, since when in seconds on the controller's clock) of each parked request."""
    return [(parked.worker, wait_reason(state, env, parked), parked.since_s) for parked in state.requests.all()]


def wait_reason(state: State, env: Environment, parked: ParkedRequest[Pull] | ParkedRequest[Offer]) -> str:
    """What a parked request waits for."""
    request = parked.request
    if isinstance(request, Offer):
        return offers.wait_reason(state, env, request) or "the offers before it"
    if parked.worker in state.recovery.unconfirmed:
        return f"the inventory of {parked.worker}, which came back from an earlier controller"
    if request.stage == env.flow.train_stage:
        return state.window.wait_reason(request.step, len(state.table.ready_groups[request.stage]))
    count, weights = state.table.count_ready(request.stage), state.models.policy
    if not count or request.stage in state.table.ready_groups:
        return f"slots ready for {request.stage}"
    if not state.table.stages[request.stage].generates:
        return f"slots ready for {request.stage} whose tensors it can be sent: its links to owners of {count} fail"
    version = weights.applied_version(parked.worker)
    if weights.is_pinned(parked.worker) and weights.pin is not None and weights.pin.version != version:
        return f"version {weights.pin.version}, which it has to evaluate; it generates with version {version}"
    why = f"newer weights: {count} slots ready for {request.stage}, but version {version} would be too old"
    if version >= weights.latest < weights.newest:
        why += f", and version {weights.newest} is gone with who published it: the next one has to be published"
    return why
