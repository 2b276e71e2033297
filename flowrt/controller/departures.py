"""Workers that are to leave in order: they get nothing new, and go when nothing is lost with them."""

from flowrt.controller.events import Command, Send
from flowrt.controller.roster import Roster
from flowrt.controller.samples import Samples
from flowrt.controller.settings import Settings
from flowrt.errors import EXIT_OK
from flowrt.ids import WorkerId
from flowrt.wire.messages import Drain, Refused, Stop

RELEASED = "it has left in order: nothing here needs it any more"


class Departures:
    """Who is leaving; `look` lets those go that can."""

    def __init__(self, roster: Roster, samples: Samples, settings: Settings, out: list[Command]) -> None:
        self._roster = roster
        self._samples = samples
        self._settings = settings
        self._out = out
        self._released: set[WorkerId] = set()

    def drain(self, asker: WorkerId, order: Drain) -> None:
        """Somebody wants this worker to leave: it is told, or the asker why not. Whoever wants to go itself goes."""
        worker = WorkerId(order.worker)
        if fault := "" if worker == asker else self._fault(worker):
            self._out.append(Send(asker, Refused(order.request, fault)))
        elif worker not in self._samples.leaving:
            self._roster.let_go(worker)
            self._out.append(Send(worker, order))
            self._samples.leave(worker)

    def _fault(self, worker: WorkerId) -> str:
        role = next((member.role for member in self._roster.members() if member.id == worker), None)
        if role is None:
            names = ", ".join(sorted(member.id for member in self._roster.members()))
            return f"there is no worker {worker!r} in this run; there are {names}"
        if role in self._settings.vital_roles or role in self._settings.finishers:
            return f"{worker} cannot leave before the run ends: the work of a {role} cannot be passed on"
        others = [one for one in self._roster.members() if one.role == role and one.id not in self._samples.leaving]
        if role in self._settings.needed_roles and len(others) < 2:
            return f"{worker} is the only {role} worker; start another one first (flowrt worker {role})"
        return ""

    def look(self) -> None:
        """Let those go that hold and do nothing that is still needed."""
        for worker in self._samples.leaving - self._released:
            if not self._samples.retreat.needs(worker):
                self._released.add(worker)
                self._out.append(Send(worker, Stop(RELEASED, EXIT_OK)))

    def forget(self, worker: WorkerId) -> None:
        """The worker is gone."""
        self._released.discard(worker)
