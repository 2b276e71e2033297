"""Weight synchronization: the versions of each named model move from holders to receivers."""

import math

from flowrt.controller.events import AppendRestartLog, Command, LogEvent, Send
from flowrt.controller.state.controller_restart import LATEST, CounterSet
from flowrt.controller.state.state import Environment, State
from flowrt.controller.state.transfers import check_receiver
from flowrt.controller.state.weights import VersionTable
from flowrt.errors import RemoteProtocolError
from flowrt.ids import WorkerId
from flowrt.protocol import messages as m


def publish(state: State, env: Environment, worker: WorkerId, message: m.Publish, now: float) -> list[Command]:
    """Record that a trainer has published a version; workers may fetch it from the trainer.

    Raises RemoteProtocolError if the worker is no trainer, the model is unknown, the version is not newer than all
    published ones, or a divergence is negative or not finite.
    """
    fault = state.membership.role_fault(worker, env.settings.checkpointing_roles, "publishes weights")
    if not fault and not all(math.isfinite(kl) and kl >= 0 for _, kl in message.divergence):
        fault = f"{worker} publishes weights with a divergence that is no number of at least 0"
    if fault:
        raise RemoteProtocolError(fault)
    versions = state.models.named(worker, message.forms[0].model if message.forms else "")
    versions.publish(worker, message.forms, dict(message.divergence))
    state.models.arrivals[versions.model].begin_version()
    # Workers with pulls that wait for newer weights were not ordered to fetch while no newer version was published.
    state.work.add_stages(state.table.flows.generating)
    state.work.add_offers()  # some may wait for this version
    text = f"{worker} has published version {versions.newest} of {versions.model}"
    published = LogEvent("published", state.window.step, text, worker, (("version", versions.newest),))
    return [AppendRestartLog(CounterSet(LATEST + versions.model, versions.newest)), published]


def weights_staged(
    state: State, env: Environment, worker: WorkerId, message: m.WeightsStaged, now: float
) -> list[Command]:
    """Record that a receiver has a whole version in its staging copy.

    Raises RemoteProtocolError for an unknown model or version, or a worker that has activated no version yet.
    """
    state.models.staged(state.models.named(worker, message.model), worker, message.version)
    return []


def weights_arriving(
    state: State, env: Environment, worker: WorkerId, message: m.WeightsArriving, now: float
) -> list[Command]:
    """Record that an eighth of a version has arrived; a report of an earlier fetch is ignored.

    Raises RemoteProtocolError if the worker is not the receiver, or the model is unknown.
    """
    check_receiver(worker, message.turn)
    model = state.models.named(worker, message.model).model
    if state.models.last_turn(model, worker) == message.turn:
        state.models.arrivals[model].arriving(worker, now)
    return []


def weights_activated(
    state: State, env: Environment, worker: WorkerId, message: m.WeightsActivated, now: float
) -> list[Command]:
    """Record that a receiver generates with a version; its parked pulls are tried again.

    Raises RemoteProtocolError for an unknown model or version.
    """
    state.models.named(worker, message.model).applied(worker, message.version)
    state.work.add_worker(worker)
    return []


def fetch_failed(state: State, env: Environment, worker: WorkerId, message: m.FetchFailed, now: float) -> list[Command]:
    """Record that a fetch failed: the receiver is ordered to fetch again, from another holder if there is one.

    Raises RemoteProtocolError if the worker is not the receiver, or the model is unknown.
    """
    turn, weights = message.turn, message.weights
    check_receiver(worker, turn)
    versions = state.models.named(worker, weights.model)
    state.lanes.note_failure(f"version {weights.version}", worker, message.reason)
    if state.models.last_turn(weights.model, worker) == turn:  # otherwise another fetch has replaced it
        if versions.failed(worker, WorkerId(turn.sender), weights, max(message.received, 0)):
            state.models.back_off(versions, worker, now)
        state.models.arrivals[weights.model].end(worker)
    state.lanes.abandon(turn)
    return []


def order_fetches(state: State, env: Environment, now: float) -> list[Command]:
    """Order the fetches that are due, and evict versions that no receiver will fetch."""
    commands: list[Command] = []
    models = state.models
    if models.back_offs:
        models.end_back_offs(now)
    for name, versions in models.of.items():
        if versions.is_changed:
            commands += _order(state, env, versions, now)
        if (arrivals := models.arrivals[name]).waiting and now >= arrivals.late_s:
            commands += _stop_late(state, versions, now)
    return commands


def _stop_late(state: State, versions: VersionTable, now: float) -> list[Command]:
    """Tell receivers that fetch much more slowly than the others to go on with another source.

    A receiver below one that is late waits for it.
    """

    def holder_of(worker: WorkerId) -> WorkerId | None:
        fetch = versions.fetching.get(worker)
        return None if fetch is None else fetch.holder

    commands: list[Command] = []
    for worker in state.models.arrivals[versions.model].take_late(now, holder_of):
        turn = state.models.last_turn(versions.model, worker)
        if turn is not None:
            commands.append(Send(worker, m.StopFetch(turn)))
    return commands


def _order(state: State, env: Environment, versions: VersionTable, now: float) -> list[Command]:
    commands: list[Command] = []
    models = state.models
    fetches = versions.begin_fetches(env.policies.weight_sync)
    for worker, version in versions.take_rewound():
        commands.append(Send(worker, m.EvictVersion(versions.model, version)))
    for fetch in fetches:
        weights = fetch.weights
        turn = state.lanes.next_turn(fetch.holder, fetch.receiver, "weights")
        models.note_order(fetch, turn, now)
        commands.append(Send(fetch.receiver, m.ReceiveWeights(turn, weights, fetch.older, fetch.first)))
        commands.append(
            Send(fetch.holder, m.SendWeights(turn, weights.model, weights.version, weights.base, fetch.first))
        )
    for worker, version in versions.retire():
        commands.append(Send(worker, m.EvictVersion(versions.model, version)))
    return commands
