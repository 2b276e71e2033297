"""The walk of a version: named models, each with versions of its own, moved from holder to receiver."""

from collections.abc import Collection, Sequence

from flowrt.controller.events import Command, Keep, Send
from flowrt.controller.refresh import Refresh
from flowrt.controller.transfers import Lanes, check_receiver
from flowrt.controller.versions import ModelVersions
from flowrt.controller.walk import LATEST, Reached
from flowrt.errors import RemoteProtocolError
from flowrt.ids import WorkerId
from flowrt.wire import messages as m
from flowrt.wire.records import LaneTurn, Weights

FIRST_REST_S = 0.1
LONGEST_REST_S = 5.0
WeightMessage = m.Publish | m.Staged | m.FetchFailed | m.Applied


class Models:
    """The versions of every named model. The first one named is the policy, whose age admission bounds."""

    def __init__(self, names: Sequence[str], refresh: Refresh, lanes: Lanes, out: list[Command]) -> None:
        self._refresh = refresh
        self._lanes = lanes
        self._out = out
        self._turns: dict[tuple[str, WorkerId], LaneTurn] = {}  # of the last fetch that each receiver was told
        self.began_s: dict[tuple[str, WorkerId], float] = {}  # when that was
        self.resting: dict[str, dict[WorkerId, float]] = {name: {} for name in names}  # and until when each does
        self.of = {name: ModelVersions(name) for name in names}
        self.policy = self.of[names[0]]

    def hear(self, worker: WorkerId, message: WeightMessage) -> None:
        """Raises RemoteProtocolError for a model that this run does not have, or a version out of order."""
        match message:
            case m.Publish(forms, divergence):
                model = forms[0].model if forms else ""
                versions = self._named(worker, model)
                versions.publish(worker, forms, dict(divergence))
                self._out.append(Keep(Reached(LATEST + model, versions.newest)))
            case m.Staged(model, version):
                self._named(worker, model).staged(worker, version)
            case m.Applied(model, version):
                self._named(worker, model).applied(worker, version)
            case m.FetchFailed(turn, weights, reason):
                check_receiver(worker, turn)
                self._lanes.note(f"version {weights.version}", worker, reason)
                versions = self._named(worker, weights.model)
                if self._turns.get((weights.model, worker)) == turn:  # else another was ordered in its place already
                    versions.failed(worker, WorkerId(turn.sender), weights)
                self._lanes.abandon(turn)

    def check_known(self, worker: WorkerId, held: Sequence[Weights]) -> None:
        """Raises RemoteProtocolError when one of these is of a model that this run does not have."""
        for one in held:
            self._named(worker, one.model)

    def regain(self, worker: WorkerId, held: Sequence[Weights]) -> None:
        """The controller came back, and this worker says what it has."""
        for name in {one.model for one in held}:
            versions = self._named(worker, name)
            before = versions.newest
            versions.regain(worker, [one for one in held if one.model == name])
            if versions.newest != before:
                self._out.append(Keep(Reached(LATEST + name, versions.newest)))

    def _named(self, worker: WorkerId, model: str) -> ModelVersions:
        found = self.of.get(model)
        if found is None:
            raise RemoteProtocolError(f"{worker} speaks of model {model!r}; this run has {sorted(self.of)}")
        return found

    def forget(self, worker: WorkerId) -> None:
        """The worker is gone."""
        for name, versions in self.of.items():
            versions.forget(worker)
            self._turns.pop((name, worker), None)
            self.began_s.pop((name, worker), None)

    def move(self, gated: Collection[WorkerId], now: float) -> None:
        """Order what is due, and let go of what nobody will ask for again."""
        for name, versions in self.of.items():
            rests = self.resting[name]
            if not versions.changed and (not rests or now < min(rests.values())):
                continue
            versions.changed, self.resting[name] = False, self._resting(versions, now)
            hurried = gated if versions is self.policy else ()
            for fetch in versions.begin_fetches(self._refresh, hurried, self.resting[name]):
                turn = self._lanes.next_turn(fetch.holder, fetch.receiver, "weights")
                one = fetch.weights
                self._turns[one.model, fetch.receiver] = turn
                self.began_s[one.model, fetch.receiver] = now
                self._out.append(Send(fetch.receiver, m.Fetch(turn, one)))
                self._out.append(Send(fetch.holder, m.ServeWeights(turn, one.model, one.version, one.base)))
            for worker, version in versions.retire():
                self._out.append(Send(worker, m.Retire(versions.model, version)))

    def _resting(self, versions: ModelVersions, now: float) -> dict[WorkerId, float]:
        """Receivers whose fetches fail one after the other, and until when: they try again less and less often."""
        until_s = {
            worker: self.began_s[versions.model, worker] + rest_s(failures)
            for worker, failures in versions.failures.items()
            if worker not in versions.fetching
        }
        return {worker: end_s for worker, end_s in until_s.items() if now < end_s}


def rest_s(failures: int) -> float:
    """Seconds from one order to fetch to the next; the first failure may be its holder's, and another one is asked."""
    return 0.0 if failures < 2 else min(FIRST_REST_S * 2 ** min(failures - 2, 30), LONGEST_REST_S)
