"""Workloads: the duration of each piece of work in simulated seconds, and the reasons for these durations.

Every pool is scaled down by the same factor, so proportions are what counts: a rollout worker stands for a group of
inference instances, the reference and the trainer for whole pools of which one rank has the connection.

Figures that all workloads share, for a model of 7 billion parameters (weights of 15 GB in bf16):

* *decoding*: 25 ms a step, bound by reading the weights: flat up to 64 rows, then 0.4 ms a row (2 x 7e9 operations a
  token at about 35 TFLOP/s of a device that does little else than wait for memory). With 16 rows a worker it stays
  flat, so a batch that has shrunk to its last sequence is no faster than a full one.
* *prefill*: 10 000 tokens/s, that is 140 TFLOP/s.
* *training*: 3 times the operations of a forward pass (6 against 2 a parameter and token). 2 500 tokens/s are 105
  TFLOP/s, 30 % of what the device could do: usual for RL with ragged batches. Passes of 16 384 tokens cost 50 ms each
  on top (launches, gradient accumulation), the optimiser step 2 s (it reads and writes 16 bytes a parameter).
* *reward*: 50 ms a sample for all CPU cores together: extracting and comparing formulas.
* *weights*: 1 s to copy them from the training devices to their hosts, 4 s on the wire (15 GB over a network of 50
  Gbit/s with some resharding), 2 s from host memory into the inference devices, during which these generate nothing.
* *responses*: two samples of one prompt have correlated lengths (0.6): hard problems need longer answers.
* a step is 32 prompts x 8 samples on 4 x 16 rows: four waves. Real jobs have 16 to 64 times as many of each.
"""

from dataclasses import dataclass, replace

from flowrt.engines.simulated.workload import (
    Distribution,
    GenerationCost,
    Lengths,
    LogNormal,
    ScoreCost,
    TrainCost,
    Uniform,
)

DECODE = GenerationCost(base_s=0.025, per_row_s=0.0004, prefill_token_s=0.0001, load_s=2.0)
REWARD = ScoreCost(sample_s=0.05)


@dataclass(frozen=True)
class Workload:
    """Sizes and costs of a job; times in simulated seconds."""

    name: str
    responses: Distribution
    reference: ScoreCost
    train: TrainCost
    decode: GenerationCost = DECODE
    reward: ScoreCost = REWARD
    transfer_s: float = 4.0
    correlation: float = 0.6
    prompt_tokens: int = 150
    rollout_workers: int = 4
    rows: int = 16
    groups: int = 32
    members: int = 8
    prompts: int = 128  # distinct ones, the same in all epochs
    micro_batch_tokens: int = 8192
    steps: int = 8  # of a measured run
    parameter_bytes: int = 4096  # that are really sent
    lanes: str = "auto"

    @property
    def samples(self) -> int:
        """Samples of one step."""
        return self.groups * self.members

    def lengths(self, seed: int) -> Lengths:
        return Lengths(self.responses, self.correlation, seed)


def _forward(tokens_per_s: float) -> ScoreCost:
    return ScoreCost(token_s=1.0 / tokens_per_s, pass_s=0.05, pass_samples=16)


def _training(tokens_per_s: float) -> TrainCost:
    return TrainCost(1.0 / tokens_per_s, pass_s=0.05, pass_tokens=16384, optimizer_s=2.0, snapshot_s=1.0)


PAPER = Workload("paper", LogNormal(median=600, sigma=0.8, longest=3072), _forward(3000), _training(2500), steps=12)
"""Task-separated, with the devices where they are needed: generation takes longest, then training, then the reference.

AsyncFlow's resource planner divides the devices so that all tasks take about the same time. A forward pass costs a
third of training, so a reference pool of a third of the trainer's devices takes as long as training does; rounded up, a
fifth less: 3 000 tokens/s against 2 500. Answers of an instruction-tuned 7B model to
competition mathematics: half within 600 tokens, on average 800, one in fifty at the limit of 3 072 tokens. A step of
245 000 tokens is about 125 s of generation (81 s if rows were always full), 83 s of reference, 101 s of training.
"""

BALANCED = Workload("balanced", LogNormal(median=700, sigma=0.5, longest=2048), _forward(9000), _training(3000))
"""Generation with full rows takes as long as training; the reference has spare devices and takes a third of that.

Answers with a moderate tail: 700 tokens in the median, one in sixty cut at 2 048. There is less to overlap (two long
stages instead of three) and less tail to hide: 107 s of generation (80 s if rows were always full), 28 s of reference
and 84 s of training become 85 s at best.
"""

TRAINING = Workload("training", LogNormal(median=400, sigma=0.6, longest=1536), _forward(6000), _training(1000))
"""Training is the bottleneck: it takes more than twice as long as generation.

Too few devices for training, or several epochs over each batch as PPO makes them. Whatever the order, no mode can beat
the trainer's own time: 69 s of generation, 28 s of reference and 164 s of training become 164 s at best, a gain of 1.6.
"""

UNIFORM = replace(PAPER, name="uniform", responses=Uniform(shortest=600, longest=1000))
"""As `PAPER`, with as many tokens, but without a tail: every length from 600 to 1 000 tokens is as likely as any other.

What remains is the gain of overlapping; what `PAPER` gains on top of it comes from its long tail.
"""

WORKLOADS = {workload.name: workload for workload in (PAPER, BALANCED, TRAINING, UNIFORM)}
