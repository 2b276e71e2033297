"""What is done to a run, to which of its parts, and when: drawn from a seed."""

import random
from collections.abc import Callable
from dataclasses import dataclass

from fault_injection.damage import DAMAGES

FOR_EVER_S = float("inf")
ROLES = ("rollout-0", "rollout-1", "reward", "reference", "source", "trainer", "controller")
PLENTY = ("rollout-0", "rollout-1")
"""The run goes on with the other one."""
LAUNCHER, FORK_SERVER, AGENT, EVERYTHING, DISK = "launcher", "fork server", "agent", "everything", "disk"
RANKS = ("rank-0", "rank-1", AGENT)
ONE_KINDS = ("kill", "stop", "hang up", "hush")
"""SIGKILL; SIGSTOP; its connection to the controller is closed; nothing passes over it any more."""
SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP")
LINK_KINDS = ("hang up", "hush")
LASTING_KINDS = ("stop", "hush")
TWO_WITHIN_S = 2.0
IN_RESUME_WITHIN_S = 1.5
MOST_ROOM_BYTES = 200_000
"""What a full disk may still take: from nothing to a part of a checkpoint."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault; ``after`` is a number of closed steps, 0 is while the run comes up."""

    victim: str
    kind: str
    after: int
    delay_s: float
    for_s: float = FOR_EVER_S
    room_bytes: int = 0

    @property
    def interrupts(self) -> bool:
        """It tells the whole run to end: exit code 130."""
        return self.victim in (LAUNCHER, "controller") and self.kind in ("SIGTERM", "SIGINT")

    @property
    def ends_the_launcher(self) -> bool:
        """Nothing is left that could go on."""
        return self.victim == EVERYTHING or (self.victim == LAUNCHER and self.kind in ("kill", "SIGHUP"))

    @property
    def may_fail_the_run(self) -> bool:
        """The run may end with an error that names the victim, and can be resumed.

        A link that stays dead is dead for the replacement too. A trainer that was told to end has not crashed.
        """
        dead_link = self.kind == "hush" and self.for_s == FOR_EVER_S and self.victim not in PLENTY
        return dead_link or self.victim == DISK or (self.victim in ("trainer", *RANKS) and self.kind in SIGNALS)

    def __str__(self) -> str:
        lasts = f" for {self.for_s:.1f} s" if self.kind in LASTING_KINDS else ""
        requests = f" to {self.room_bytes} bytes" if self.victim == DISK else ""
        return f"{self.kind} {self.victim}{requests}{lasts}, {self.delay_s:.2f} s after step {self.after}"


@dataclass(frozen=True, slots=True)
class Plan:
    """One trial: faults in the first life of a run, then damage to its files, then faults in the second."""

    seed: int
    group: str
    faults: tuple[Fault, ...]
    damage: str = ""
    later: tuple[Fault, ...] = ()

    @property
    def row(self) -> str:
        """Its row in the table of results."""
        return self.faults[0].kind if self.group in ("one", "signal") else self.group

    @property
    def ranks(self) -> int:
        return 2 if self.group == "rank" else 1

    @property
    def starts_pythons(self) -> bool:
        """Processes that are not forked but started take seconds of a core each."""
        return any(one.victim in (*RANKS, FORK_SERVER) for one in (*self.faults, *self.later))

    def __str__(self) -> str:
        parts = [" and ".join(map(str, self.faults))]
        parts += [self.damage] if self.damage else []
        parts += [f"in the resumed run {one}" for one in self.later]
        return f"[{self.group}] " + ", ".join(parts)


class _Draw:
    """The choices that all groups make."""

    def __init__(self, seed: int, steps: int, worker_timeout_s: float) -> None:
        self.rng = random.Random(f"fault {seed}")
        self._steps = steps
        self._silence_s = worker_timeout_s

    def when(self) -> tuple[int, float]:
        after = self.rng.randrange(self._steps - 1)
        return after, self.rng.uniform(0.0, 1.0) if after == 0 else self.rng.uniform(0.0, 0.1)

    def in_training(self) -> tuple[int, float]:
        return self.rng.randrange(1, self._steps - 1), self.rng.uniform(0.0, 0.1)

    def lasts_s(self) -> float:
        short_s, long_s = self.rng.uniform(0.1, 0.6), self.rng.uniform(1.2, 2.5)
        return self.rng.choice([short_s * self._silence_s, long_s * self._silence_s, FOR_EVER_S])

    def ends_s(self) -> float:
        """As `lasts_s`, but never for ever."""
        return self.rng.choice([self.rng.uniform(0.1, 0.6), self.rng.uniform(1.2, 2.5)]) * self._silence_s

    def one(self) -> Fault:
        """Each role as often as each other; a controller has no connection of its own to cut."""
        victim = self.rng.choice(ROLES)
        kind = self.rng.choice(ONE_KINDS[:2] if victim == "controller" else ONE_KINDS)
        return Fault(victim, kind, *self.when(), self.lasts_s())

    def of(self, victims: tuple[str, ...], kinds: tuple[str, ...], when: Callable[[], tuple[int, float]]) -> Fault:
        victim, kind = self.rng.choice(victims), self.rng.choice(kinds)
        # A launcher that stays stopped never ends, as it should: there is nothing to learn from it.
        lasts_s = self.ends_s() if victim == LAUNCHER else self.lasts_s()
        return Fault(victim, kind, *when(), lasts_s)

    def anything(self) -> Fault:
        """A fault of any of the processes of a run with one rank."""
        victims = (*ROLES, LAUNCHER)
        return self.of(victims, ("kill", "stop", *SIGNALS), self.when)


def draw(seed: int, steps: int, worker_timeout_s: float, groups: tuple[str, ...] = ()) -> Plan:
    """The trial of this seed; ``groups`` are those that it may be of, all by default."""
    names = groups or tuple(GROUPS)
    weights = [GROUPS[name] for name in names]
    [group] = random.Random(f"group {seed}").choices(names, weights)
    drawn = _Draw(seed, steps, worker_timeout_s)
    rng = drawn.rng
    everything = Fault(EVERYTHING, "kill", *drawn.when()) if group in ("everything", "resume", "files") else None
    match group:
        case "one":
            return Plan(seed, group, (drawn.one(),))
        case "signal":
            return Plan(seed, group, (drawn.of(ROLES, SIGNALS, drawn.when),))
        case "launcher":
            return Plan(seed, group, (drawn.of((LAUNCHER,), ("kill", "stop", *SIGNALS), drawn.when),))
        case "fork server":
            return Plan(seed, group, (drawn.of((FORK_SERVER,), ("kill", "stop", *SIGNALS), drawn.in_training),))
        case "rank":
            return Plan(seed, group, (drawn.of(RANKS, ("kill", "stop", *SIGNALS), drawn.in_training),))
        case "two":
            first, second = drawn.anything(), drawn.anything()
            gap_s = rng.choice([0.0, rng.uniform(0.0, TWO_WITHIN_S)])
            late = Fault(
                victim=second.victim,
                kind=second.kind,
                after=first.after,
                delay_s=first.delay_s + gap_s,
                for_s=second.for_s,
            )
            return Plan(seed, group, (first, late))
        case "leave":
            # Early, and of roles with one worker: the run needs the replacement.
            victim = rng.choice(("rollout-0", "reward", "reference", "source"))
            return Plan(seed, group, (Fault(victim, "SIGTERM", rng.randrange(1, 3), rng.uniform(0.0, 0.1)),))
        case "disk":
            full = Fault(DISK, "fill", *drawn.when(), room_bytes=rng.choice([0, rng.randrange(MOST_ROOM_BYTES)]))
            return Plan(seed, group, (full,))
    assert everything is not None
    if group == "resume":
        fault = drawn.anything()
        later = Fault(
            victim=fault.victim,
            kind=fault.kind,
            after=0,
            delay_s=rng.uniform(0.0, IN_RESUME_WITHIN_S),
            for_s=fault.for_s,
        )
        return Plan(seed, group, (everything,), later=(later,))
    if group == "files":
        # Late enough for a checkpoint: without one there is little that could be damaged.
        after = rng.randrange(steps // 2, steps - 1)
        late = Fault(EVERYTHING, "kill", after, everything.delay_s if everything.delay_s < 0.1 else 0.1)
        return Plan(seed, group, (late,), damage=rng.choice(list(DAMAGES)))
    return Plan(seed, group, (everything,))


GROUPS = {
    "one": 22,
    "signal": 17,
    "launcher": 8,
    "fork server": 2,
    "rank": 4,
    "two": 10,
    "resume": 8,
    "everything": 5,
    "files": 14,
    "disk": 4,
    "leave": 6,
}
"""Groups of trials, and how many of 100 are of each: what starts many processes is rare, for its time."""
