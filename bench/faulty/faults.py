"""What is done to whom, and when: drawn from a seed."""

import random
from dataclasses import dataclass

FOR_EVER_S = float("inf")
VICTIMS = ("rollout-0", "rollout-1", "reward", "reference", "source", "trainer", "controller")
KINDS = ("kill", "stop", "hang up", "hush")
"""SIGKILL; SIGSTOP; its connection to the controller is closed; nothing passes over it any more."""
PLENTY = ("rollout-0", "rollout-1")
"""Others like it go on with the run."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One misfortune; ``after`` is a number of closed steps, 0 is while everybody comes up."""

    victim: str
    kind: str
    after: int
    delay_s: float
    for_s: float = FOR_EVER_S

    @property
    def may_end_the_run(self) -> bool:
        """Its link stays dead, to whoever takes its place too: the run has to end, saying so, and can be resumed."""
        return self.kind == "hush" and self.for_s == FOR_EVER_S and self.victim not in PLENTY

    def __str__(self) -> str:
        lasts = "" if self.kind in ("kill", "hang up") else f" for {self.for_s:.1f} s"
        return f"{self.kind} {self.victim}{lasts}, {self.delay_s:.2f} s after step {self.after}"


def draw(seed: int, steps: int, silence_s: float) -> Fault:
    """Everybody is struck as often as everybody else; a controller has no connection of its own to cut."""
    rng = random.Random(f"fault {seed}")
    victim = rng.choice(VICTIMS)
    kind = rng.choice(KINDS[:2] if victim == "controller" else KINDS)
    after = rng.randrange(steps - 1)
    delay_s = rng.uniform(0.0, 1.0) if after == 0 else rng.uniform(0.0, 0.1)
    lasts_s = rng.choice([rng.uniform(0.1, 0.6) * silence_s, rng.uniform(1.2, 2.5) * silence_s, FOR_EVER_S])
    return Fault(victim, kind, after, delay_s, lasts_s)
