"""Members of the run: workers, their roles, and whether each of them works, drains or may leave.

- A worker is a member from its admission to its departure; other tables keep nothing of a worker that is no member.
- Only a draining member may depart before the run ends without counting as a failure.
- A role is vacant when it has lost a worker and has no other worker that is not leaving.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import NamedTuple

from flowrt.controller.state.worklist import Worklist
from flowrt.ids import OBSERVER, WorkerId

MAX_WAITS = 8
"""Reported waits that are kept for one worker."""
MAX_WAIT_CHARS = 160
MAX_DEPARTED = 10_000
"""Maximum number of names kept of workers that have left."""


class Standing(Enum):
    """What is expected of a member."""

    ACTIVE = "active"
    DRAINING = "draining"
    """It gets no new work, and stays until nothing would be lost with it."""
    RELEASED = "released"
    """It drained, and was told to leave."""


_ACTIVE = Standing.ACTIVE  # the access to a member of an enumeration costs as much as a call


class OpenWait(NamedTuple):
    """A wait that a worker reports, for something other than the controller."""

    what: str
    blocked_on: str
    """The name of a worker, or of something else."""
    age_s: float
    limit_s: float
    """Infinite if another wait bounds it."""


@dataclass(slots=True)
class Member:
    """A worker of the run. It may complete its role while it drains, so completion is a separate fact."""

    id: WorkerId
    role: str
    host: str
    seen_s: float
    """Time of the last sign of life."""
    advanced_s: float = float("-inf")
    """Time of the last report that its work advances."""
    standing: Standing = Standing.ACTIVE
    finished: bool = False
    """Whether it has completed its role."""
    has_results: bool = False
    """Whether it has committed a sample, or one of its offers was opened."""
    waits: tuple[OpenWait, ...] = ()
    """Waits in its last report."""
    reported_s: float = 0.0
    """Time of that report."""

    @property
    def is_leaving(self) -> bool:
        """Whether it gets no new work."""
        return self.standing is not Standing.ACTIVE


NO_MEMBERS: Mapping[WorkerId, Member] = MappingProxyType({})


class Membership:
    """The members by id, and the roles that lack a worker."""

    def __init__(self, worker_timeout_s: float, work: Worklist | None = None) -> None:
        self._work = Worklist() if work is None else work
        self._timeout_s = worker_timeout_s
        self._members: dict[WorkerId, Member] = {}
        self._of_role: dict[str, dict[WorkerId, Member]] = {}
        self.leaving: dict[WorkerId, None] = {}
        """Members that get no new work: they drain, or were told to leave."""
        self._silence_s = float("-inf")  # no member is silent before this time
        self._finished: set[WorkerId] = set()
        self._vacant: dict[str, tuple[float, str]] = {}  # since when, and why
        self.joined_roles: set[str] = set()
        """Roles that have had a worker since the run began."""
        self.drained: set[WorkerId] = set()
        """Workers that an operator drained, departed or not: they are not to be replaced."""
        self._to_drain: set[WorkerId] = set()
        """Workers that an earlier controller told to drain, and that have not rejoined."""
        self._departed: dict[WorkerId, None] = {}

    def __contains__(self, worker: str) -> bool:
        return worker in self._members

    def join(self, worker: WorkerId, role: str, host: str, now: float, *, rejoins: bool = False) -> bool:
        """Add a worker; returns whether this ends the drain of an earlier worker of its name.

        A worker that ``rejoins`` from an earlier controller, which told it to drain, drains.
        """
        self._remove(worker)
        is_draining = rejoins and worker in self._to_drain
        ends_drain = not is_draining and (worker in self._to_drain or worker in self.drained)
        self._to_drain.discard(worker)
        member = self._members[worker] = self._of_role.setdefault(role, {})[worker] = Member(worker, role, host, now)
        if is_draining:
            member.standing = Standing.DRAINING
            self.leaving[worker] = None
        self._vacant.pop(role, None)
        self.joined_roles.add(role)
        if ends_drain:
            self.drained.discard(worker)
        self._work.add_members()
        return ends_drain

    def restore_drain(self, worker: WorkerId, *, by_operator: bool) -> None:
        """Add a drain that an earlier controller ordered; a worker that has left already does not rejoin."""
        self._to_drain.add(worker)
        if by_operator:
            self.drained.add(worker)

    def take_undrained(self) -> list[WorkerId]:
        """Remove and return, by name, the workers that were to drain, have not rejoined, and may be replaced."""
        missing = sorted(self._to_drain - self.drained)
        self._to_drain.clear()
        return missing

    def note_alive(self, worker: WorkerId, now: float) -> bool:
        """Record a sign of life; returns False if the worker is no member."""
        member = self._members.get(worker)
        if member is not None:
            member.seen_s = max(member.seen_s, now)  # a sign of life may be reported late
        return member is not None

    def note_advance(self, worker: WorkerId, now: float) -> None:
        """Record that the work of a member advances."""
        self._members[worker].advanced_s = now

    def advanced_s(self, worker: WorkerId) -> float:
        """When the work of a member last advanced; minus infinity if it never reported that, or is no member."""
        member = self._members.get(worker)
        return float("-inf") if member is None else member.advanced_s

    def extend_deadlines(self, seconds: float) -> None:
        """Extend the timeouts of silent workers, of work without progress, and of vacant roles."""
        for member in self._members.values():
            member.seen_s += seconds
            member.advanced_s += seconds
        self._vacant = {role: (since_s + seconds, why) for role, (since_s, why) in self._vacant.items()}

    def role(self, worker: WorkerId) -> str:
        """The role of a member. Raises KeyError for a worker that is no member."""
        return self._members[worker].role

    def role_fault(self, worker: WorkerId, roles: Collection[str], what: str) -> str:
        """Why the worker may not do ``what``, which only these roles may; empty if it may.

        Without ``roles`` all roles but the observer's may.
        """
        role = self._members[worker].role
        if role in roles or (not roles and role != OBSERVER):
            return ""
        allowed = f"only {' and '.join(sorted(roles))} may" if roles else "an observer may not"
        return f"{worker} {what}, but its role is {role}; {allowed} do that"

    def report(self, worker: WorkerId, waits: tuple[tuple[str, str, float, float], ...], now: float) -> None:
        """Store the first `MAX_WAITS` waits that a worker reports: (what, blocked on, age, limit), times in seconds.

        Waits with a negative or infinite age or a negative limit are ignored.
        """
        member = self._members[worker]
        member.waits = tuple(
            OpenWait(what[:MAX_WAIT_CHARS], blocked_on[:MAX_WAIT_CHARS], age_s, limit_s)
            for what, blocked_on, age_s, limit_s in waits[:MAX_WAITS]
            if 0 <= age_s < float("inf") and limit_s >= 0
        )
        member.reported_s = now

    def finish(self, worker: WorkerId) -> None:
        """Record that the worker has completed its role."""
        self._members[worker].finished = True
        self._finished.add(worker)
        self._work.add_members()

    def is_finished(self, worker: WorkerId) -> bool:
        return self._members[worker].finished

    def note_results(self, worker: WorkerId) -> None:
        """Record that the worker has committed a sample, or that one of its offers was opened."""
        self._members[worker].has_results = True

    def with_results(self) -> set[WorkerId]:
        """Members that have committed a sample, or whose offers were opened."""
        return {member.id for member in self._members.values() if member.has_results}

    def drain(self, worker: WorkerId, by_operator: bool) -> None:
        """Give the worker no new work: it is to leave before the run ends, and that does not count as a failure."""
        self._members[worker].standing = Standing.DRAINING
        self.leaving[worker] = None
        if by_operator:
            self.drained.add(worker)

    def release(self, worker: WorkerId) -> None:
        """Record that the draining worker was told to leave."""
        self._members[worker].standing = Standing.RELEASED

    def is_leaving(self, worker: WorkerId) -> bool:
        return self._members[worker].standing is not _ACTIVE

    def draining(self) -> list[WorkerId]:
        """Workers that drain and may not leave yet, by name."""
        return sorted(member for member in self.leaving if self._members[member].standing is Standing.DRAINING)

    def leave(self, worker: WorkerId) -> Member | None:
        """Remove a worker; returns its last state, or None if it was no member."""
        self._work.add_members()
        if worker in self._members:
            if len(self._departed) >= MAX_DEPARTED:
                del self._departed[next(iter(self._departed))]
            self._departed[worker] = None
        return self._remove(worker)

    def _remove(self, worker: WorkerId) -> Member | None:
        member = self._members.pop(worker, None)
        if member is not None:
            del self._of_role[member.role][worker]
            self.leaving.pop(worker, None)
            self._finished.discard(worker)
        return member

    def has_departed(self, worker: WorkerId) -> bool:
        """Whether a worker of this name is among the last `MAX_DEPARTED` that have left."""
        return worker in self._departed

    def miss(self, role: str, why: str, now: float) -> bool:
        """Record the loss of a worker of this role: the role is vacant if no other worker of it stays.

        Returns whether the role is vacant since this call.
        """
        if role in self._vacant or self._stays_one_of(role):
            return False
        self._vacant[role] = (now, why)
        return True

    def _stays_one_of(self, role: str) -> bool:
        return any(not member.is_leaving for member in self._of_role.get(role, NO_MEMBERS).values())

    def vacancy_fault(self, now: float, role_vacancy_timeout_s: float) -> str:
        """The first role that has been vacant for longer than this, and why; empty if there is none."""
        for role, (since_s, why) in self._vacant.items():
            if now - since_s > role_vacancy_timeout_s:
                return f"no {role} worker for {now - since_s:.0f} s: {why}"
        return ""

    def vacancies(self, now: float) -> dict[str, tuple[float, str]]:
        """Vacant roles: for how many seconds, and why."""
        return {role: (now - since_s, why) for role, (since_s, why) in self._vacant.items()}

    def is_vacant(self, role: str) -> bool:
        """Whether the role is vacant."""
        return role in self._vacant

    def members(self) -> list[Member]:
        return list(self._members.values())

    def of_roles(self, roles: Iterable[str]) -> list[Member]:
        """The members of these roles."""
        return [member for role in roles for member in self._of_role.get(role, NO_MEMBERS).values()]

    def has_role(self, role: str) -> bool:
        """Whether a member has the role."""
        return bool(self._of_role.get(role))

    def of_role(self) -> dict[str, set[WorkerId]]:
        """The members of each role that has some."""
        return {role: set(members) for role, members in self._of_role.items() if members}

    def finished(self) -> set[WorkerId]:
        """The members that have completed their role."""
        return set(self._finished)

    def find(self, worker: str) -> Member | None:
        """The member of this name; None if there is none."""
        return self._members.get(WorkerId(worker))

    def quiet(self, now: float) -> list[tuple[WorkerId, float]]:
        """Workers silent for more than half of the worker timeout, and the time of the last sign of life of each."""
        return [
            (member.id, member.seen_s) for member in self._members.values() if now - member.seen_s > self._timeout_s / 2
        ]

    def silent(self, now: float) -> list[Member]:
        """Workers silent for longer than the worker timeout.

        All members are examined only when the one that was silent longest then may have become so.
        """
        if now < self._silence_s:
            return []
        self._silence_s = min((member.seen_s for member in self._members.values()), default=now) + self._timeout_s
        return [member for member in self._members.values() if now - member.seen_s > self._timeout_s]
