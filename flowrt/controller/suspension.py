"""A run that is told to end and is gone on with later (preemption, a time limit): what it has trained is saved first.

The mind alone decides after which step the trainers leave, so all ranks leave after the same one: each finishes it,
saves, and says that it has finished. Whatever comes in between ends the run as it would have ended without all this.
"""

from collections.abc import Callable

from flowrt.controller.events import Command, Send, Suspend
from flowrt.controller.roster import Member, Roster
from flowrt.controller.samples import Samples
from flowrt.controller.settings import Settings
from flowrt.errors import EXIT_FAILED, EXIT_OK
from flowrt.ids import WorkerId
from flowrt.wire.messages import Drain


class Suspension:
    """Told to end by `ask`; `look` sees whether all is saved, or will not be."""

    def __init__(
        self,
        roster: Roster,
        samples: Samples,
        settings: Settings,
        out: list[Command],
        end: Callable[[str, int], None],
    ) -> None:
        self._roster = roster
        self._samples = samples
        self._settings = settings
        self._out = out
        self._end = end
        self._order: Suspend | None = None
        self._until_s = 0.0
        self._steps: int | None = None  # that the run will have trained; None while nobody was told to leave
        self._saved = False

    @property
    def is_asked(self) -> bool:
        """The run is to end as soon as what it has trained is saved."""
        return self._order is not None

    def ask(self, order: Suspend, now: float) -> None:
        """To be asked again gives no more time: schedulers signal every process, and these pass it on to each other."""
        if self._order is None:
            self._until_s = now + self._settings.drain_s
        self._order = order

    def lose(self, trainer: WorkerId, now: float) -> None:
        """This one has to go, and the run cannot go on without it. Perhaps all of it has to, and hears that later."""
        if self._order is None:
            self.ask(Suspend(f"{trainer} was terminated (SIGTERM)", EXIT_FAILED), now)

    def look(self, now: float) -> None:
        """Begin, once everybody is here; end, when the trainers have saved or their time is over."""
        order = self._order
        if order is None:
            return
        if self._steps is None:
            self._begin(order)
        elif not self._at_work():
            self._saved = True
            self._end(f"{order.reason}; saved after {self._steps} steps", order.code)
        elif now >= self._until_s:
            waits = "; ".join(f"{one.id} has not saved" for one in self._at_work())
            self._end(f"no end of it within {self._settings.drain_s:.0f} s (checkpoint.drain_s): {waits}", order.code)

    def last_word(self, reason: str, code: int) -> tuple[str, int]:
        """The reason and the exit code with which the run ends for this reason, in view of what it was told."""
        if self._order is None or self._saved or code == EXIT_OK:
            return reason, code
        return f"{self._order.reason}, and what was trained since the last checkpoint is not saved: {reason}", (
            self._order.code
        )

    def _begin(self, order: Suspend) -> None:
        self._steps = self._samples.training.stop() + 1
        trainers = self._at_work()
        if self._steps <= order.kept or not trainers:
            # Perhaps some ranks are not even there yet: nobody is waited for that has nothing to save.
            self._saved = True
            self._end(order.reason, order.code)
            return
        for trainer in trainers:
            self._out.append(Send(trainer.id, Drain(0, trainer.id)))
        self._samples.turn_away()

    def _at_work(self) -> list[Member]:
        return [one for one in self._roster.members() if one.role in self._settings.savers and not one.finished]
