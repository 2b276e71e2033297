"""Who is here: workers, their roles, when they were last heard."""

from dataclasses import dataclass
from typing import NamedTuple

from flowrt.ids import WorkerId

MOST_WAITS = 8
"""Of one worker that are remembered."""
LONGEST_WORDS = 160


class OpenWait(NamedTuple):
    """Something that a worker waits for from somebody else than the controller, as it says itself."""

    what: str
    turn: str  # who has to act: a worker's name, where it is one
    age_s: float
    limit_s: float  # infinite where another wait ends this one


@dataclass(slots=True)
class Member:
    """A worker that is in."""

    id: WorkerId
    role: str
    host: str
    heard_s: float
    finished: bool = False
    let_go: bool = False
    waits: tuple[OpenWait, ...] = ()  # for others than the controller, as it last said
    told_s: float = 0.0  # when that was


class Roster:
    """The workers that are in, by id."""

    def __init__(self, silence_s: float) -> None:
        self._silence_s = silence_s
        self._members: dict[WorkerId, Member] = {}
        self.changed = False  # somebody has come, gone or finished
        self._empty: dict[str, tuple[float, str]] = {}  # roles that somebody is missed in: since when, and why

    def __contains__(self, worker: str) -> bool:
        return worker in self._members

    def join(self, worker: WorkerId, role: str, host: str, now: float) -> None:
        self._members[worker] = Member(worker, role, host, now)
        self._empty.pop(role, None)
        self.changed = True

    def heard(self, worker: WorkerId, now: float) -> bool:
        """Note that the worker is alive; False when it is not in."""
        member = self._members.get(worker)
        if member is not None:
            member.heard_s = now
        return member is not None

    def role(self, worker: WorkerId) -> str:
        return self._members[worker].role

    def told(self, worker: WorkerId, waits: tuple[tuple[str, str, float, float], ...], now: float) -> None:
        """Note what the worker says that it waits for."""
        member = self._members[worker]
        member.waits = tuple(
            OpenWait(what[:LONGEST_WORDS], turn[:LONGEST_WORDS], age_s, limit_s)
            for what, turn, age_s, limit_s in waits[:MOST_WAITS]
            if 0 <= age_s < float("inf") and limit_s >= 0
        )
        member.told_s = now

    def finish(self, worker: WorkerId) -> None:
        self._members[worker].finished = self.changed = True

    def let_go(self, worker: WorkerId) -> None:
        """It is to leave before the run ends: that will not be a loss."""
        if worker in self._members:
            self._members[worker].let_go = True

    def leave(self, worker: WorkerId) -> Member | None:
        self.changed = True
        return self._members.pop(worker, None)

    def miss(self, role: str, why: str, now: float) -> None:
        """Somebody of this role has gone whose part was not complete: the role must not stay empty for long.

        Those who are leaving do none of its work.
        """
        if all(member.role != role or member.let_go for member in self._members.values()):
            self._empty.setdefault(role, (now, why))

    def empty(self, now: float, absence_s: float) -> str:
        """What has had nobody for longer than that, and why; empty when there is no such role."""
        for role, (since_s, why) in self._empty.items():
            if now - since_s > absence_s:
                return f"no {role} worker for {now - since_s:.0f} s: {why}"
        return ""

    def members(self) -> list[Member]:
        return list(self._members.values())

    def quiet(self, now: float) -> list[tuple[WorkerId, float]]:
        """Those who have said nothing for half of the limit, and when they were last heard."""
        return [(one.id, one.heard_s) for one in self._members.values() if now - one.heard_s > self._silence_s / 2]

    def silent(self, now: float) -> list[Member]:
        """Those not heard of for longer than the limit."""
        return [member for member in self._members.values() if now - member.heard_s > self._silence_s]
