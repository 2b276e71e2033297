"""Offers of prompts: bounded by admission in the train flow, and by a budget of rows and bytes in all others."""

from flowrt.controller.events import AppendRestartLog, Command, Send
from flowrt.controller.state.controller_restart import SKIPPED, CounterSet, GroupsOpened, RestoredSamples
from flowrt.controller.state.parked_requests import FULL, ParkedRequest
from flowrt.controller.state.sample_table import SampleTable
from flowrt.controller.state.slots import Group
from flowrt.controller.state.state import Environment, State
from flowrt.controller.transitions import rollback
from flowrt.errors import RemoteProtocolError
from flowrt.ids import GroupId, WorkerId
from flowrt.protocol.messages import (
    ITEM_BYTES,
    NO_LIMIT,
    EndOfData,
    Offer,
    OfferAccepted,
    Rejected,
    ReleaseTensors,
    prompts_fault,
    values_fault,
)

MAX_OFFER_ROWS = 1_000_000
"""Maximum rows of one offer to the train flow; each takes memory in the controller."""
SKIP_REASON = "skipped by the curriculum"


def offer(state: State, env: Environment, worker: WorkerId, message: Offer, now: float) -> list[Command]:
    """Open an offer, reject it if it is invalid, or park it until it can be opened.

    Raises RemoteProtocolError if the worker has a parked request with the same number.
    """
    if fault := state.membership.role_fault(worker, env.settings.source_roles, "offers prompts"):
        return [Send(worker, Rejected(message.request, fault))]
    requests = state.requests
    requests.check_new(worker, message.request)
    restored = state.recovery.restored
    if restored is not None and (answer := confirm(state, worker, message, restored)):
        return answer
    fault = FULL if requests.is_full(worker) else offer_fault(state, env, message)
    if fault := fault or ("" if restored else _repeated_fault(state, env, worker, message)):
        return [Send(worker, Rejected(message.request, fault))]
    requests.offerers[worker] = None
    parked, is_first = ParkedRequest(worker, message, now), not requests.offers
    if is_first and restored is None and (answer := open_offer(state, env, parked)):
        return answer
    requests.park_offer(parked)
    return [] if is_first or restored is not None else serve_offers(state, env)


def serve_offers(state: State, env: Environment) -> list[Command]:
    """Open the parked offers for which there is room."""
    return state.requests.serve_offers(lambda parked: open_offer(state, env, parked))


def open_offer(state: State, env: Environment, parked: ParkedRequest[Offer]) -> list[Command]:
    """Open an offer and answer it; no commands if the offer has to wait.

    An offer that is not needed (the run is complete, or no worker has its exact version) is answered with group -1.
    """
    offer, worker, window = parked.request, parked.worker, state.window
    if wait_reason(state, env, offer):
        return []
    if fault := _repeated_fault(state, env, worker, offer):
        return [Send(worker, Rejected(offer.request, fault))]
    is_training = offer.flow == env.flow.train_flow
    exact = state.exact_version(offer)
    if (is_training and window.over) or (exact is not None and state.models.policy.is_gone(exact)):
        return [Send(worker, OfferAccepted(offer.request, -1))]
    state.membership.note_results(worker)
    commands: list[Command] = []
    if replaced := _same_evaluation(state, offer):  # its source has not received the answer, or is another process
        commands += rollback.close(state, env, replaced)
    groups = state.table.open(
        flow=offer.flow,
        prompts=offer.prompts,
        epoch=offer.epoch,
        members=offer.members,
        at_least=window.step if offer.at_least < 0 else offer.at_least,
        owner=worker,
        lengths={length.column: length.lengths for length in offer.lengths},
        tags={tag.column: tag.values for tag in offer.tags},
        at_most=NO_LIMIT if exact is None else exact,
    )
    first = groups[0].id
    if not is_training and not env.flow.train_stage:  # a stream is recorded neither in the ledger nor for replay
        return [Send(worker, OfferAccepted(offer.request, first))]
    if env.flow.train_stage:
        commands.append(AppendRestartLog(_opened(offer, worker, groups[0])))
    skipped: list[Group] = []
    if is_training:
        state.kept.attach(groups)
        window.enter(groups)
        state.opened.add(offer.epoch, offer.prompts)
        for group in groups:
            if _is_skipped(state, env, group):
                skipped.append(group)
            else:
                commands += rollback.record(state, env, group, "in_flight")
    commands.append(Send(worker, OfferAccepted(offer.request, first)))
    for group in skipped:
        window.skipped += 1
        commands += rollback.drop(state, env, group, SKIP_REASON)
    if skipped:
        commands.append(AppendRestartLog(CounterSet(SKIPPED, window.skipped)))
    return commands


def _is_skipped(state: State, env: Environment, group: Group) -> bool:
    """Whether the curriculum leaves this prompt out of its epoch."""
    curriculum = env.policies.curriculum
    return bool(curriculum.history) and curriculum.skips(group.prompt, group.epoch, state.history.rewards(group.prompt))


def _opened(offer: Offer, worker: WorkerId, first: Group) -> GroupsOpened:
    """The restart entry of an opened offer, by its first group."""
    return GroupsOpened(
        owner=worker,
        request=offer.request,
        flow=offer.flow,
        prompts=offer.prompts,
        epoch=offer.epoch,
        members=offer.members,
        at_least=first.at_least,
        at_most=first.at_most,
        lengths=offer.lengths,
        tags=offer.tags,
        group=first.id,
        slot=first.slots[0].id,
    )


def confirm(state: State, worker: WorkerId, offer: Offer, restored: RestoredSamples) -> list[Command]:
    """Answer an offer again that an earlier controller opened; no commands if no earlier controller opened it."""
    opened = restored.offers.get((worker, offer.request))
    if opened is None or (opened.flow, opened.epoch, opened.prompts) != (offer.flow, offer.epoch, offer.prompts):
        return []
    commands: list[Command] = [Send(worker, OfferAccepted(offer.request, opened.group))]
    gone = []
    for number in range(opened.group, opened.group + len(opened.prompts)):
        group = state.table.groups.get(GroupId(number))
        if group is None:
            gone.append(number)
            continue
        for holding in group.tensors.values():
            holding.owners.add(worker)
        state.table.note_holder(worker, (group,))
    if gone:
        commands.append(Send(worker, ReleaseTensors((), (), tuple(gone))))
    return commands


# ---- offers that are rejected


def offer_fault(state: State, env: Environment, offer: Offer) -> str:
    """Why this offer is rejected; empty if it is valid."""
    flows = state.table.flows
    columns = {length.column for length in offer.lengths}
    tags = {tag.column for tag in offer.tags}
    count, rows = len(offer.prompts), len(offer.prompts) * offer.members
    if not flows.is_known(offer.flow):
        return f"{_name(offer)}: {_unknown(state.table, offer.flow)}"
    if fault := prompts_fault(offer.prompts):
        return f"offer to flow {offer.flow[:80]!r}: {fault}"
    if rows < 1 or columns != flows.group_columns.keys() or tags != env.tags:
        return (
            f"{_name(offer)} has {rows} rows, columns {sorted(columns)} and tags {sorted(tags)}; the dataflow "
            f"wants columns {sorted(flows.group_columns)} and tags {sorted(env.tags)}"
        )
    if len(columns) != len(offer.lengths) or len(tags) != len(offer.tags):
        return f"{_name(offer)} names a column twice"
    fits = [len(length.lengths) == count and min(length.lengths) >= 0 for length in offer.lengths]
    fits += [len(tag.values) == rows for tag in offer.tags]
    if False in fits:
        return f"{_name(offer)} is malformed: its columns and tags have not one number for each of its rows"
    if fault := values_fault(offer.tags):
        return f"{_name(offer)}: {fault}"
    if offer.at_most != NO_LIMIT and (fault := _exact_fault(state, env, offer)):
        return f"{_name(offer)} {fault}"
    if is_exhausted(state, env, offer.flow):
        return f"{_name(offer)} came after the flow was said to be exhausted"
    return _size_fault(state, env, offer)


def _repeated_fault(state: State, env: Environment, worker: WorkerId, offer: Offer) -> str:
    """Why an offer is rejected that brings what was offered before; empty if it brings nothing of it.

    A prompt is trained once in an epoch, whichever worker offers it. An evaluation that is offered again replaces the
    earlier one, unless another source that is in the run waits for that. In other flows prompts may repeat.
    """
    if offer.flow != env.flow.train_flow:
        others = {group.source for group in _same_evaluation(state, offer)} - {worker}
        if waiting := sorted(other for other in others if other in state.membership):
            return f"{_name(offer)} of version {offer.at_most}: {waiting[0]} has offered it and waits for its results"
        return ""
    if state.window.over:
        return ""  # nothing is opened any more
    if passed := sorted(env.passed.get(offer.epoch, frozenset()).intersection(offer.prompts)):
        return f"{_name(offer)} brings prompts {passed[:3]} of epoch {offer.epoch}, which the run is done with"
    if opened := state.opened.among(offer.epoch, offer.prompts):
        return (
            f"{_name(offer)} brings prompts {opened[:3]} of epoch {offer.epoch}, which were offered before and are in "
            "training, trained or dropped; offer each prompt once in an epoch"
        )
    if len(set(offer.prompts)) < len(offer.prompts):
        return f"{_name(offer)} names a prompt twice; offer each prompt once in an epoch"
    return ""


def _same_evaluation(state: State, offer: Offer) -> list[Group]:
    """The live groups of an evaluation of the same prompts by the same version; empty for any other offer."""
    if offer.at_most == NO_LIMIT or (version := state.exact_version(offer)) is None:
        return []
    return state.table.exact_groups.among((version, offer.flow, offer.epoch), offer.prompts)


def _exact_fault(state: State, env: Environment, offer: Offer) -> str:
    if offer.flow == env.flow.train_flow:
        return "has a highest version; samples to train on may be of any that admission allows"
    if offer.at_most != offer.at_least:
        return f"has {offer.at_most} as its highest version and {offer.at_least} as its lowest; make them equal"
    if len(state.table.flows.generating) != 1:
        return "is of one version, and this dataflow has not one stage that generates"
    return ""


def _size_fault(state: State, env: Environment, offer: Offer) -> str:
    count = len(offer.prompts)
    rows = count * offer.members
    if offer.flow == env.flow.train_flow:
        if rows > MAX_OFFER_ROWS:
            return f"{_name(offer)} has {rows} rows, over {MAX_OFFER_ROWS}; offer fewer at a time"
        if not env.policies.admission.may_open(count - 1, env.settings.groups_per_step):
            return f"{_name(offer)} has {count} groups, more than admission ever lets live at once; offer fewer"
        return ""
    limit_rows, limit_bytes = env.settings.budget_rows, env.settings.budget_bytes
    if rows > limit_rows or (limit_bytes and _offered_bytes(state.table, offer) > limit_bytes):
        size = _offered_bytes(state.table, offer)
        return (
            f"{_name(offer)} has {rows} rows and {size} bytes, over the whole budget of {limit_rows} rows and "
            f"{limit_bytes or 'any number of'} bytes; offer fewer, or raise budget_rows or budget_bytes"
        )
    return ""


def _offered_bytes(table: SampleTable, offer: Offer) -> int:
    """Bytes of the tensors that come with the offer."""
    columns = table.flows.group_columns
    return sum(sum(length.lengths) * ITEM_BYTES[columns[length.column].dtype] for length in offer.lengths)


def _name(offer: Offer) -> str:
    return f"offer of prompts {offer.prompts[:3]} to flow {offer.flow[:80]!r}"


def _unknown(table: SampleTable, flow: str) -> str:
    return f"no stage is for flow {flow[:80]!r}; there are {table.flows.named or 'those with a name'}"


# ---- offers that wait


def wait_reason(state: State, env: Environment, offer: Offer) -> str:
    """What an offer waits for; empty if it can be opened or answered now."""
    if offer.flow != env.flow.train_flow:
        exact, newest = state.exact_version(offer), state.models.policy.newest
        if exact is not None and exact > newest:
            return f"version {exact}, which is to be published; version {newest} is the newest"
        return _budget_reason(state, env, offer)
    window = state.window
    if window.over:
        return ""
    if window.exhausted:
        return "the end of the last step: the prompts are exhausted"
    if window.enough_opened():
        return "a free place: enough prompts are open to complete the run"
    last, size = window.live + len(offer.prompts) - 1, env.settings.groups_per_step
    # Admission does not delay the groups that are needed to fill the step in training.
    if window.live >= size and not state.admission(env).may_open(last, size):
        return f"admission: {window.live} groups live, step {window.step} in training"
    return ""


def _budget_reason(state: State, env: Environment, offer: Offer) -> str:
    table, train_flow = state.table, env.flow.train_flow
    rows = sum(table.rows.values()) - (table.rows[train_flow] if train_flow else 0)
    if not rows:
        return ""
    limit_rows, limit_bytes = env.settings.budget_rows, env.settings.budget_bytes
    if rows + len(offer.prompts) * offer.members > limit_rows:
        return f"room: {rows} of {limit_rows} rows live"
    if limit_bytes:
        size = sum(table.bytes.values()) - (table.bytes[train_flow] if train_flow else 0)
        if size + _offered_bytes(table, offer) > limit_bytes:
            return f"room: {size} of {limit_bytes} bytes live"
    return ""


# ---- the end of a stream


def end_of_data(state: State, env: Environment, worker: WorkerId, message: EndOfData, now: float) -> list[Command]:
    """Record that a source has opened all its prompts of a flow.

    Raises RemoteProtocolError if the worker is no source or the flow is unknown.
    """
    if fault := state.membership.role_fault(worker, env.settings.source_roles, "says that prompts are exhausted"):
        raise RemoteProtocolError(fault)
    if not state.table.flows.is_known(message.flow):
        raise RemoteProtocolError(
            f"{worker} says that prompts are exhausted, but {_unknown(state.table, message.flow)}"
        )
    if message.flow == env.flow.train_flow:
        state.window.exhaust(worker)
    else:
        state.table.exhaust(message.flow, worker)
    return []


def is_exhausted(state: State, env: Environment, flow: str) -> bool:
    """Whether all sources have reported the end of this flow, which is not the train flow."""
    return len(state.table.exhausted.get(flow, ())) >= env.settings.sources


def is_over(state: State, env: Environment, stage: str) -> bool:
    """Whether no slot will become ready for this stage any more; always False for stages of the train flow."""
    flows, train_flow = state.table.exhausted, env.flow.train_flow
    flow = state.table.stages[stage].flow
    if not flows or state.table.undone[stage] or (train_flow and flow in ("", train_flow)):
        return False
    return all(is_exhausted(state, env, name) for name in ([flow] if flow else flows))
