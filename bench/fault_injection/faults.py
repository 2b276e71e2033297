"""Faults of a trial: victim, kind and time, drawn from a seed."""

import random
from collections.abc import Callable
from dataclasses import dataclass

from fault_injection.damage import DAMAGES

FOR_EVER_S = float("inf")
ROLES = ("rollout-0", "rollout-1", "reward", "reference", "source", "trainer", "controller")
REDUNDANT_ROLES = ("rollout-0", "rollout-1")
"""Roles of which a run has two workers: it continues with the other one."""
LAUNCHER, FORK_SERVER, AGENT, EVERYTHING, DISK = "launcher", "fork server", "agent", "everything", "disk"
RANKS = ("rank-0", "rank-1", AGENT)
PROCESS_FAULT_KINDS = ("kill", "stop", "hang up", "hush")
"""SIGKILL; SIGSTOP; the connection to the controller is closed; all data of that connection is held back."""
SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP")
LINK_KINDS = ("hang up", "hush")
LASTING_KINDS = ("stop", "hush")
MAX_GAP_S = 2.0
MAX_RESUME_DELAY_S = 1.5
MAX_FREE_BYTES = 200_000
"""Largest free space of a full disk: a part of a checkpoint."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault of a victim, ``delay_s`` seconds after ``after`` closed steps (0: while the run starts).

    A stop or a silent link lasts ``duration_s`` seconds; a full disk has ``free_bytes`` bytes left.
    """

    victim: str
    kind: str
    after: int
    delay_s: float
    duration_s: float = FOR_EVER_S
    free_bytes: int = 0

    @property
    def interrupts(self) -> bool:
        """Whether the fault tells the whole run to end, with exit code 130."""
        return self.victim in (LAUNCHER, "controller") and self.kind in SIGNALS

    @property
    def ends_the_launcher(self) -> bool:
        """Whether the launcher dies of the fault, so that the run has to be resumed."""
        return self.victim == EVERYTHING or (self.victim == LAUNCHER and self.kind == "kill")

    @property
    def may_fail_the_run(self) -> bool:
        """Whether the run may end with an error that names the victim, from which it can be resumed.

        A link that stays silent is silent for the replacement worker, too. A trainer that ends on a signal to terminate
        does not count as crashed.
        """
        dead_link = self.kind == "hush" and self.duration_s == FOR_EVER_S and self.victim not in REDUNDANT_ROLES
        return dead_link or self.victim == DISK or (self.victim in ("trainer", *RANKS) and self.kind in SIGNALS)

    def __str__(self) -> str:
        duration = f" for {self.duration_s:.1f} s" if self.kind in LASTING_KINDS else ""
        free_space = f" to {self.free_bytes} bytes" if self.victim == DISK else ""
        return f"{self.kind} {self.victim}{free_space}{duration}, {self.delay_s:.2f} s after step {self.after}"


@dataclass(frozen=True, slots=True)
class Plan:
    """One trial: faults of `flowrt run`, then damage to the files of the run, then faults of `flowrt resume`."""

    seed: int
    group: str
    faults: tuple[Fault, ...]
    damage: str = ""
    resume_faults: tuple[Fault, ...] = ()

    @property
    def row(self) -> str:
        """The row of this plan in the table of results."""
        return self.faults[0].kind if self.group in ("one", "signal") else self.group

    @property
    def ranks(self) -> int:
        return 2 if self.group == "rank" else 1

    @property
    def starts_interpreters(self) -> bool:
        """Whether processes are started by python instead of forked, which takes seconds of a core each."""
        return any(fault.victim in (*RANKS, FORK_SERVER) for fault in (*self.faults, *self.resume_faults))

    def __str__(self) -> str:
        parts = [" and ".join(map(str, self.faults))]
        parts += [self.damage] if self.damage else []
        parts += [f"in the resumed run {fault}" for fault in self.resume_faults]
        return f"[{self.group}] " + ", ".join(parts)


class _Draw:
    """Random choices that several groups of trials make."""

    def __init__(self, seed: int, steps: int, worker_timeout_s: float) -> None:
        self.rng = random.Random(f"fault {seed}")
        self._steps = steps
        self._silence_s = worker_timeout_s

    def when(self) -> tuple[int, float]:
        after = self.rng.randrange(self._steps - 1)
        return after, self.rng.uniform(0.0, 1.0) if after == 0 else self.rng.uniform(0.0, 0.1)

    def in_training(self) -> tuple[int, float]:
        return self.rng.randrange(1, self._steps - 1), self.rng.uniform(0.0, 0.1)

    def drawn_duration_s(self) -> float:
        short_s, long_s = self.rng.uniform(0.1, 0.6), self.rng.uniform(1.2, 2.5)
        return self.rng.choice([short_s * self._silence_s, long_s * self._silence_s, FOR_EVER_S])

    def finite_duration_s(self) -> float:
        """As `drawn_duration_s`, but always finite."""
        return self.rng.choice([self.rng.uniform(0.1, 0.6), self.rng.uniform(1.2, 2.5)]) * self._silence_s

    def one(self) -> Fault:
        """A fault of a role, all equally likely; of the controller only signals, because it has no proxy."""
        victim = self.rng.choice(ROLES)
        kind = self.rng.choice(PROCESS_FAULT_KINDS[:2] if victim == "controller" else PROCESS_FAULT_KINDS)
        return Fault(victim, kind, *self.when(), self.drawn_duration_s())

    def of(self, victims: tuple[str, ...], kinds: tuple[str, ...], when: Callable[[], tuple[int, float]]) -> Fault:
        victim, kind = self.rng.choice(victims), self.rng.choice(kinds)
        # A launcher that stays stopped never ends, which is correct: such a trial would test nothing.
        drawn_duration_s = self.finite_duration_s() if victim == LAUNCHER else self.drawn_duration_s()
        return Fault(victim, kind, *when(), drawn_duration_s)

    def anything(self) -> Fault:
        """A fault of any of the processes of a run with one rank."""
        victims = (*ROLES, LAUNCHER)
        return self.of(victims, ("kill", "stop", *SIGNALS), self.when)


def draw(seed: int, steps: int, worker_timeout_s: float, groups: tuple[str, ...] = ()) -> Plan:
    """The plan of this seed, of one of ``groups`` (empty: all). Lasting faults scale with ``worker_timeout_s``."""
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
            gap_s = rng.choice([0.0, rng.uniform(0.0, MAX_GAP_S)])
            late = Fault(
                victim=second.victim,
                kind=second.kind,
                after=first.after,
                delay_s=first.delay_s + gap_s,
                duration_s=second.duration_s,
            )
            return Plan(seed, group, (first, late))
        case "leave":
            # Early, and of roles with one worker, so that the run needs the replacement.
            victim = rng.choice(("rollout-0", "reward", "reference", "source"))
            return Plan(seed, group, (Fault(victim, "SIGTERM", rng.randrange(1, 3), rng.uniform(0.0, 0.1)),))
        case "disk":
            full = Fault(DISK, "fill", *drawn.when(), free_bytes=rng.choice([0, rng.randrange(MAX_FREE_BYTES)]))
            return Plan(seed, group, (full,))
    assert everything is not None
    if group == "resume":
        fault = drawn.anything()
        resume_faults = Fault(
            victim=fault.victim,
            kind=fault.kind,
            after=0,
            delay_s=rng.uniform(0.0, MAX_RESUME_DELAY_S),
            duration_s=fault.duration_s,
        )
        return Plan(seed, group, (everything,), resume_faults=(resume_faults,))
    if group == "files":
        # Late enough for a checkpoint, which most damages need.
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
"""Groups of trials and their shares in percent; those that start many processes are rare, because they are slow."""
