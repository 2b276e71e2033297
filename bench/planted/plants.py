"""Planted causes of waiting, and the attribution that is expected of each. Times are real seconds."""

from dataclasses import dataclass, replace

from end_to_end.simulated.workloads import WORKLOADS, Workload

from flowrt.engines.simulated.workload import GenerationCost, LogNormal, ScoreCost, TrainCost

STEPS = 10
LINK_MBIT_S = 16.0
SLOW_RANK = "trainer-1"
TRAIN_S, SCORE_S, SWAP_S, SAVE_S, READ_S, STOP_S = 0.6, 0.05, 1.0, 0.6, 0.15, 5.0
TOKEN_S = 0.005
BASE = Workload(
    "planted",
    responses=LogNormal(median=40, sigma=0.1, longest=80),
    reference=ScoreCost(sample_s=0.001, pass_samples=16),
    train=TrainCost(token_s=0.0, optimizer_s=0.05),
    decode=GenerationCost(base_s=TOKEN_S, load_s=0.005),
    reward=ScoreCost(sample_s=0.001, pass_samples=16),
    transfer_s=0.0,
    rollout_workers=2,
    rows=8,
    groups=4,
    members=4,
    prompts=64,
    micro_batch_tokens=100_000,
    steps=STEPS,
)
"""A step is 16 samples, of which two workers generate eight each in about 0.2 s."""
SAMPLES = STEPS * BASE.samples


@dataclass(frozen=True)
class Planted:
    """Planted seconds of a role and a kind of time, over the whole run."""

    role: str
    kind: str
    seconds: float


@dataclass(frozen=True)
class Plant:
    """A planted cause.

    Attributes:
        workload: the costs of the run.
        role: the role that has to wait.
        kind: its expected largest kind of time, except ``busy``, ``other`` and ``away``; empty: not checked.
        root: beginning of the name of the worker that is the expected root of the wait; empty: any.
        mode: name of the mode, which gives the staleness bound and the policies.
        link_mbit_s: speed of the network between the processes; 0: not limited.
        planted: the seconds that the attribution has to find.
    """

    workload: Workload
    role: str
    kind: str
    root: str
    mode: str = "delayed"
    planted: Planted | None = None
    link_mbit_s: float = 0.0


PLANTS = {
    "trainer": Plant(
        replace(BASE, train=TrainCost(token_s=0.0, optimizer_s=TRAIN_S)),
        *("rollout", "gate", "trainer"),
        planted=Planted("trainer", "busy", STEPS * TRAIN_S),
    ),
    "bound 0": Plant(
        replace(BASE, train=TrainCost(token_s=0.0, optimizer_s=0.3)), "trainer", "samples", "", mode="streaming"
    ),
    "reference": Plant(
        replace(BASE, reference=ScoreCost(sample_s=SCORE_S, pass_samples=16)),
        *("trainer", "samples", "reference"),
        planted=Planted("reference", "busy", SAMPLES * SCORE_S),
    ),
    "reward": Plant(
        replace(BASE, reward=ScoreCost(sample_s=SCORE_S, pass_samples=16)),
        *("trainer", "samples", "reward"),
        planted=Planted("reward", "busy", SAMPLES * SCORE_S),
    ),
    "straggler": Plant(BASE, "trainer", "samples", "rollout-1"),
    "swap": Plant(
        replace(BASE, decode=GenerationCost(base_s=TOKEN_S, load_s=SWAP_S)),
        *("rollout", "update", ""),
    ),
    "save": Plant(BASE, "trainer", "save", "", planted=Planted("trainer", "save", STEPS * SAVE_S)),
    "source": Plant(BASE, "rollout", "samples", "source"),
    "stop": Plant(BASE, "rollout", "", "", planted=Planted("rollout", "away", STOP_S)),
    "late": Plant(replace(BASE, steps=3 * STEPS), "rollout", "", ""),
    "rank": Plant(
        replace(BASE, train=TrainCost(token_s=0.0, pass_s=0.02, optimizer_s=0.02), micro_batch_tokens=100),
        *("trainer", "samples", SLOW_RANK),
    ),
    "link": Plant(
        replace(BASE, parameter_bytes=1_000_000, lanes="gloo"),
        *("rollout", "weights", "trainer"),
        link_mbit_s=LINK_MBIT_S,
    ),
}
"""By name. In "rank" one of two ranks is slow; in "link" sending a version of the weights takes half a second."""
WORKLOADS.update({f"planted {name}": plant.workload for name, plant in PLANTS.items()})
SLOW_TRAIN = TrainCost(token_s=0.0, pass_s=0.5, optimizer_s=0.02)
SLOW_DECODE = replace(BASE, decode=GenerationCost(base_s=4 * TOKEN_S, load_s=0.005))
WORKLOADS["planted slow"] = SLOW_DECODE
