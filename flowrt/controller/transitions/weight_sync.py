"""Weight synchronization: the versions of each named model move from holders to receivers."""

import math

from flowrt.controller.events import AppendReplay, Command, LogEvent, Send
from flowrt.controller.state.replay import LATEST, CounterSet
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
    # Workers with pulls that wait for newer weights were not ordered to fetch while no newer version was published.
    state.work.add_stages(state.table.flows.generating)
    state.work.add_offers()  # some may wait for this version
    text = f"{worker} has published version {versions.newest} of {versions.model}"
    published = LogEvent("published", state.window.step, text, worker, (("version", versions.newest),))
    return [AppendReplay(CounterSet(LATEST + versions.model, versions.newest)), published]


def weights_staged(
    state: State, env: Environment, worker: WorkerId, message: m.WeightsStaged, now: float
) -> list[Command]:
    """Record that a receiver has a whole version in its staging copy.

    Raises RemoteProtocolError for an unknown model or version, or a worker that has activated no version yet.
    """
    state.models.named(worker, message.model).staged(worker, message.version)
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
        versions.failed(worker, WorkerId(turn.sender), weights)
    state.lanes.abandon(turn)
    return []


def order_fetches(state: State, env: Environment, now: float) -> list[Command]:
    """Order the fetches that are due, and evict versions that no receiver will fetch."""
    commands: list[Command] = []
    models = state.models
    for name, versions in models.of.items():
        if versions.is_changed or ((waiting := models.backing_off[name]) and now >= min(waiting.values())):
            commands += _order(state, env, versions, now)
    return commands


def _order(state: State, env: Environment, versions: VersionTable, now: float) -> list[Command]:
    commands: list[Command] = []
    models = state.models
    waiting = models.update_back_off(versions, now)
    outdated = models.outdated if versions is models.policy else ()
    # What a worker holds that came back from an earlier controller is known from its inventory only.
    resting = waiting.keys() | state.recovery.unconfirmed
    fetches = versions.begin_fetches(env.policies.refresh, outdated, resting)
    for worker, version in versions.take_rewound():
        commands.append(Send(worker, m.EvictVersion(versions.model, version)))
    for fetch in fetches:
        one = fetch.weights
        turn = state.lanes.next_turn(fetch.holder, fetch.receiver, "weights")
        models.note_order(one.model, fetch.receiver, turn, now)
        commands.append(Send(fetch.receiver, m.ReceiveWeights(turn, one, fetch.older)))
        commands.append(Send(fetch.holder, m.SendWeights(turn, one.model, one.version, one.base)))
    for worker, version in versions.retire():
        commands.append(Send(worker, m.EvictVersion(versions.model, version)))
    return commands
