"""The fixed point of training with a divergence term, through the rollout and the training engine.

A response is one token, one of 8 arms with fixed rewards. With coefficient b and reference pi_ref:

- k3 in the loss: pi = b pi_ref / (b + V - r), with V such that pi sums to 1: the optimum of E[r] - b KL(pi_ref || pi);
- k2 in the loss, k1 in the reward, unbiased k3: pi = pi_ref exp(r / b) / Z, the optimum of E[r] - b KL(pi || pi_ref).

Each method is trained at staleness 0 and with samples of the policy four steps earlier, at temperature 0.7;
`TorchRollout` generates with published snapshots, and `TorchTrainer` trains. Measured is the total variation distance
to the fixed point.

On-policy, k2 and unbiased k3 have the same gradient for each sample; at the fixed point of k1 in the reward every
advantage is 0, so it is reached without noise.

The optimiser has no momentum: samples of an earlier policy already have the effect of momentum (arXiv 1605.09774), and
with both the policy oscillates around the fixed point. The learning rate falls to 0, so that the noise of single steps
averages out.
"""

import threading
from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

from flowrt.algorithms.advantages import GroupAdvantages
from flowrt.algorithms.algorithm import Groups
from flowrt.algorithms.objective import Correction, Kl, Objective
from flowrt.engines.base import Prompt, Response, TrainingBatch, sample_seed
from flowrt.engines.hf import set_training_mode
from flowrt.engines.options import TrainOptions
from flowrt.engines.stopping import StopConditions
from flowrt.engines.torch.rollout import TorchRollout
from flowrt.engines.torch.trainer import TorchTrainer
from flowrt.transport.weights.snapshot import Snapshot

ARMS, COEFFICIENT, TEMPERATURE = 8, 0.5, 0.7
STEPS, SAMPLES, LR = 200, 512, 0.01
STALENESS = (0, 4)
REWARDS = torch.tensor([0.1, 0.9, 0.4, 0.0, 0.7, 1.0, 0.3, 0.6], dtype=torch.float64)
PROMPT = torch.zeros(1, dtype=torch.int32)


def boltzmann(reference: Tensor) -> Tensor:
    """The fixed point pi_ref exp(r / b) / Z [arms], of the reference's probabilities [arms]."""
    return (reference.log() + REWARDS / COEFFICIENT).softmax(-1)


def forward_point(reference: Tensor) -> Tensor:
    """The fixed point b pi_ref / (b + V - r) [arms], V by bisection, of the reference's probabilities [arms]."""
    low, high = float(REWARDS.max()) - COEFFICIENT, float(REWARDS.max())
    for _ in range(200):
        middle = (low + high) / 2
        weights = COEFFICIENT * reference / (COEFFICIENT + middle - REWARDS)
        low, high = (middle, high) if float(weights.sum()) > 1 or float(weights.min()) < 0 else (low, middle)
    return COEFFICIENT * reference / (COEFFICIENT + high - REWARDS)


def objective(kl: Kl | None, in_reward: float = 0.0) -> Objective:
    """An objective with leave-one-out advantages and token importance weights without a cap.

    Args:
        kl: divergence term in the loss.
        in_reward: coefficient of the divergence in the reward.
    """
    credit = GroupAdvantages(baseline="leave_one_out", scale="none", kl_coef=in_reward)
    return Objective(credit, correction=Correction("token", "truncate", 0.0, float("inf")), kl=kl)


METHODS: dict[str, tuple[Objective, Callable[[Tensor], Tensor]]] = {
    "k3 in the loss": (objective(Kl(COEFFICIENT, "k3")), forward_point),
    "k2 in the loss": (objective(Kl(COEFFICIENT, "k2")), boltzmann),
    "k1 in the reward": (objective(None, COEFFICIENT), boltzmann),
    "unbiased k3": (objective(Kl(COEFFICIENT, "unbiased")), boltzmann),
}


def make_model(seed: int) -> GPT2LMHeadModel:
    """A GPT-2 of one layer with one token for each arm, without dropout."""
    config = GPT2Config(vocab_size=ARMS, n_embd=16, n_layer=1, n_head=2, n_positions=64, bos_token_id=0, eos_token_id=0)
    torch.manual_seed(seed)
    model: GPT2LMHeadModel = set_training_mode(GPT2LMHeadModel(config))
    with torch.no_grad():
        model.transformer.wte.weight.mul_(4.0)  # a reference that is not uniform
    return model


@torch.no_grad()
def policy(model: GPT2LMHeadModel) -> Tensor:
    """Probability of each arm, in float64."""
    logits: Tensor = model(input_ids=PROMPT.long().unsqueeze(0)).logits[0, -1]
    return (logits.double() / TEMPERATURE).softmax(-1)


def total_variation(name: str, staleness: int, steps: int = STEPS, seed: int = 0) -> float:
    """Total variation distance from the fixed point after training.

    Args:
        name: a key of `METHODS`.
        staleness: age of the generating weights, in steps.
        steps: optimiser steps.
        seed: of the model and the sampling.
    """
    algorithm, point = METHODS[name]
    model = make_model(seed)
    reference = policy(model)
    options = TrainOptions(
        lr=LR,
        schedule="cosine",
        decay_steps=steps,
        warmup_steps=0,
        beta1=0.0,
        max_grad_norm=1e9,
        share_prompts=False,
    )
    trainer = TorchTrainer(model, options, algorithm, temperature=TEMPERATURE)
    rollout = TorchRollout(
        make_model(seed), stop=StopConditions(), rows=SAMPLES, max_new_tokens=1, temperature=TEMPERATURE
    )
    published = deque([Snapshot.take(0, trainer.parameters())], maxlen=staleness + 1)
    for step in range(steps):
        rollout.swap(published[0])
        responses = generate(rollout, seed, step)
        trainer.accumulate(to_batch(algorithm, responses, reference.log()))
        trainer.step()
        published.append(Snapshot.take(step + 1, trainer.parameters()))
    return float((policy(model) - point(reference)).abs().sum() / 2)


def generate(rollout: TorchRollout, seed: int, step: int) -> list[Response]:
    """The responses of a step, of one token each."""
    rollout.add([Prompt(row, PROMPT, sample_seed(seed, step, 0, row, 0)) for row in range(SAMPLES)])
    responses: list[Response] = []
    while rollout.running:
        responses += rollout.run(threading.Event())
    return responses


def to_batch(algorithm: Objective, responses: list[Response], reference: Tensor) -> TrainingBatch:
    """The samples as one group, with log-probabilities of the arms under the reference [arms]."""
    arms_N = torch.cat([response.tokens for response in responses]).long()
    group_N = torch.zeros(len(arms_N), dtype=torch.int64)
    reference_N = reference[arms_N].float()
    credit = algorithm.credit(
        Groups(
            rewards_N=REWARDS[arms_N],
            group_N=group_N,
            lengths_N=torch.ones_like(group_N),
            truncated_N=group_N.bool(),
            staleness_N=group_N,
            kl_N=torch.cat([response.logprobs for response in responses]).double() - reference[arms_N],
        )
    )
    return TrainingBatch(
        prompts=[PROMPT] * len(arms_N),
        responses=[response.tokens for response in responses],
        rollout_logprobs=[response.logprobs for response in responses],
        reference_logprobs=list(reference_N.split(1)) if algorithm.needs.reference else None,
        advantages_N=credit.advantages_N.float(),
        weights_N=torch.ones(len(arms_N)),
        groups_N=group_N,
    )


def measure(quick: bool) -> dict[str, float]:
    """The largest distance over methods and staleness, the number of runs, and the distance of the two fixed points."""
    torch.set_num_threads(1)
    names = ["k3 in the loss", "k2 in the loss"] if quick else list(METHODS)
    lags = STALENESS[:1] if quick else STALENESS
    variations = {(name, lag): total_variation(name, lag) for name in names for lag in lags}
    reference = policy(make_model(0))
    apart = float((forward_point(reference) - boltzmann(reference)).abs().sum() / 2)
    return {
        "bandit_tv_max": max(variations.values()),
        "bandit_runs": float(len(variations)),
        "bandit_points_apart": apart,
    }
