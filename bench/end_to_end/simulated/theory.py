"""Predicted times of the modes: the same costs without processes, network or runtime.

Generation is scheduled exactly (every free row takes the next sample, in order); scores and training follow as queues.

* sync: generation, then the scores, then training, then the weights: a sum.
* streaming: the same generation, with the queues running in parallel; a step still ends with its weights.
* delayed: no worker waits for another, but each empties its rows once a version: the longest of (a worker's own
  makespan and its load, training, scores).
* rolling, tail: weights are swapped between two tokens, so rows can always be full; then it makes no difference which
  worker generates which sample.
"""

import random
from dataclasses import dataclass

import torch
from end_to_end.simulated.modes import RunSpec
from end_to_end.simulated.workloads import Workload

from flowrt.engines.base import sample_seed
from flowrt.engines.simulated.workload import SimulatedDecoder


@dataclass(frozen=True)
class Step:
    """Times of one step, in simulated seconds."""

    makespan_s: float  # generation of the whole step from empty rows to empty rows
    own_makespan_s: float  # the same for a worker's own share, on average
    full_rows_s: float  # generation with every row always full
    reference_s: float
    reward_s: float
    training_s: float  # the optimiser step included
    streamed_s: float  # until the last group is trained when tasks overlap
    weights_s: float  # from the optimiser step until generation can go on

    def cycle_s(self, workload: Workload) -> dict[str, float]:
        """Seconds a step, by mode, when the pipeline is full."""
        load_s, snapshot_s = workload.decode.load_s, workload.train.snapshot_s
        others_s = (self.reference_s, self.reward_s, self.training_s + snapshot_s)
        drained_s = max(self.own_makespan_s + load_s, *others_s)
        return {
            "sync": self.makespan_s + max(self.reference_s, self.reward_s) + self.training_s + self.weights_s,
            "streaming": self.streamed_s + self.weights_s,
            "delayed": drained_s,
            "rolling": max(self.full_rows_s + load_s, *others_s),
            "tail": max(self.full_rows_s + load_s, *others_s),
        }


def predicted_s(spec: RunSpec) -> float:
    """Seconds a step of this run, on the average: the first step fills the pipeline, and the last sends no weights."""
    steps = [step_of(spec, step) for step in range(spec.steps)]
    cycles = [step.cycle_s(spec.workload).get(spec.mode_name, float("nan")) for step in steps]
    if spec.mode.bound == 0:
        return (sum(cycles) - steps[-1].weights_s) / len(steps)
    return (steps[0].streamed_s + sum(cycles[1:])) / len(steps)


def step_of(spec: RunSpec, step: int) -> Step:
    """The step that trains these prompts, in the order in which the source offers them."""
    workload = spec.workload
    lengths = _lengths(spec, step)
    ends = _generate(workload, lengths)
    tokens = [workload.prompt_tokens + length for length in lengths]
    reference = [one * workload.reference.token_s for one in tokens]
    train_s = workload.train.accumulate(sum(tokens))
    token_s = workload.decode.step_s(workload.rows) / workload.rows
    own = [max(end for end, worker in ends if worker == one) for one in range(workload.rollout_workers)]
    return Step(
        makespan_s=max(own),
        own_makespan_s=sum(own) / len(own),
        full_rows_s=sum(lengths) * token_s / workload.rollout_workers,
        reference_s=workload.reference.score(sum(tokens), len(tokens)),
        reward_s=workload.reward.score(sum(lengths), len(lengths)),
        training_s=train_s + workload.train.optimizer_s,
        streamed_s=_streamed(workload, ends, tokens, reference) + workload.train.optimizer_s,
        weights_s=workload.train.snapshot_s + workload.transfer_s + workload.decode.load_s,
    )


def _lengths(spec: RunSpec, step: int) -> list[int]:
    workload, drawn = spec.workload, spec.workload.lengths(spec.seed)
    lengths = []
    for group in range(step * workload.groups, (step + 1) * workload.groups):
        epoch, place = divmod(group, workload.prompts)
        order = list(range(workload.prompts))
        random.Random(f"order {spec.seed} {epoch}").shuffle(order)
        prompt = torch.zeros(workload.prompt_tokens, dtype=torch.int32)
        prompt[0] = order[place]
        key = prompt.numpy().tobytes()
        for member in range(workload.members):
            lengths.append(drawn.draw(key, sample_seed(spec.seed, order[place], epoch, member, 0)))
    return lengths


def _generate(workload: Workload, lengths: list[int]) -> list[tuple[float, int]]:
    """End of each sample in seconds, and the worker that generates it."""
    decoders = [SimulatedDecoder(workload.decode) for _ in range(workload.rollout_workers)]
    ends = [(0.0, 0)] * len(lengths)
    waiting = list(enumerate(lengths))[::-1]
    now_s = 0.0
    while waiting or any(decoder.running for decoder in decoders):
        for decoder in decoders:
            while waiting and decoder.running < workload.rows:
                decoder.add(*waiting.pop())
        now_s = min(decoder.next_finish() for decoder in decoders)
        for worker, decoder in enumerate(decoders):
            for key, at_s in decoder.advance(now_s):
                ends[key] = (at_s, worker)
    return ends


def _streamed(workload: Workload, ends: list[tuple[float, int]], tokens: list[int], reference: list[float]) -> float:
    """Seconds until the last group is trained; samples are scored as they end, groups trained as they are scored."""
    scored = [0.0] * len(ends)
    rewarded_s = referenced_s = 0.0
    for key in sorted(range(len(ends)), key=lambda one: ends[one][0]):
        referenced_s = max(referenced_s, ends[key][0]) + reference[key]
        rewarded_s = max(rewarded_s, ends[key][0]) + workload.reward.sample_s
        scored[key] = max(referenced_s, rewarded_s)
    members = [range(first, first + workload.members) for first in range(0, len(ends), workload.members)]
    trained_s = 0.0
    for ready_s, count in sorted((max(scored[k] for k in keys), sum(tokens[k] for k in keys)) for keys in members):
        trained_s = max(trained_s, ready_s) + workload.train.accumulate(count)
    return trained_s
