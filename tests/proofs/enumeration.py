"""The expected gradient of an objective, summed over all responses, against exact expressions.

4 symbols, 3 tokens: 64 responses. A policy is a table of logits for each of the 21 prefixes. The first token is sampled
by version 0, the others by version 1 (an in-flight update), and the gradient is that of version 2. Every response has a
random reward.

- exact: objectives whose expected gradient is, by theory, the gradient of the expected reward or of a divergence;
- biased: the others, each against its own expected gradient in closed form, computed in a different way: by recursion
  over prefixes if each token has its own weight, otherwise from probabilities of whole responses.

Shapes: P = prefixes, S = symbols, Y = responses, T = 3 tokens a response.
"""

import dataclasses
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from flowrt.algorithms.advantages import GroupAdvantages
from flowrt.algorithms.algorithm import Algorithm, Groups, Plan, Tokens
from flowrt.algorithms.losses import (
    Aspo,
    Cispo,
    CrossEntropy,
    Dppo,
    Gmpo,
    Gspo,
    KlEstimator,
    PolicyLoss,
    Ppo,
    Reinforce,
    Sapo,
    Surrogate,
    Topr,
    Vespo,
)
from flowrt.algorithms.objective import Aggregation, Correction, Kl, Level, Objective

Mode = Literal["truncate", "mask"]

SYMBOLS, TOKENS = 4, 3
RESPONSES = list(itertools.product(range(SYMBOLS), repeat=TOKENS))
PREFIXES = [prefix for length in range(TOKENS) for prefix in itertools.product(range(SYMBOLS), repeat=length)]
PREFIX_YT = torch.tensor([[PREFIXES.index(response[:at]) for at in range(TOKENS)] for response in RESPONSES])
SYMBOL_YT = torch.tensor(RESPONSES)
CAP, LOW, HIGH = 1.1, 0.8, 1.25
"""Bounds of truncated and of masked weights, chosen so that some weights are above and some below them."""
INF = float("inf")
PLAIN = GroupAdvantages(baseline="none", scale="none")
STEP_PLAN, ROLLOUT_PLAN = Plan(anchor="step"), Plan(anchor="rollout")
SUM = Aggregation("constant", 1)
SPREADS = (0.05, 0.3, 1.0)
"""Standard deviations of the difference in logits between successive versions."""
ON_POLICY: tuple[PolicyLoss, ...] = (
    Reinforce(),
    CrossEntropy(),
    Ppo(dual_clip=3.0),
    Cispo(),
    Gspo(),
    Gmpo(),
    Sapo(),
    Dppo(),
    Dppo(distance="kl"),
    Vespo(),
    Topr(),
    Topr(level="token"),
    Aspo(),
    Surrogate(),
)
"""Losses whose gradient at ratio 1 is that of REINFORCE."""
ESTIMATORS_OF_REVERSE: tuple[KlEstimator, ...] = ("k2", "k3_with_k2_slope", "unbiased")
"""Estimators whose expected on-policy gradient is that of KL(policy || reference)."""


@dataclass(frozen=True)
class World:
    """Log-probabilities of every symbol after every prefix [P, S] under four policies, and the rewards [Y]."""

    behaviour: Tensor
    anchor: Tensor
    policy: Tensor
    reference: Tensor
    rewards_Y: Tensor

    def on_policy(self) -> "World":
        """A copy in which the policy is also the behaviour and the anchor."""
        return World(self.policy, self.policy, self.policy, self.reference, self.rewards_Y)


def draw_world(seed: int, spread: float) -> World:
    """A random world whose tables differ by noise of standard deviation ``spread`` in their logits.

    The anchor is the policy, as in the first update of a step.
    """
    generator = torch.Generator().manual_seed(seed)

    def noise() -> Tensor:
        return torch.randn(len(PREFIXES), SYMBOLS, generator=generator, dtype=torch.float64)

    first = noise()
    second = first + spread * noise()
    third = second + spread * noise()
    mixed = torch.cat([first[:1], second[1:]])
    behaviour, policy, reference = (logits.log_softmax(-1) for logits in (mixed, third, third + spread * noise()))
    rewards_Y = torch.randn(len(RESPONSES), generator=generator, dtype=torch.float64)
    return World(behaviour, policy, policy, reference, rewards_Y)


def of_responses(table_PS: Tensor) -> Tensor:
    """Log-probabilities [Y, T] of the tokens of every response."""
    return table_PS[PREFIX_YT, SYMBOL_YT]


def probabilities(table_PS: Tensor) -> Tensor:
    """The probability of every response, [Y]."""
    return of_responses(table_PS).sum(-1).exp()


def gradient_by_logits(weights_YT: Tensor, table_PS: Tensor) -> Tensor:
    """sum over tokens of weight x d log policy / d logits [P, S], without autograd: one-hot minus probabilities.

    Args:
        weights_YT: weight of each token of each response.
        table_PS: log-probabilities of the policy.
    """
    slope_PS = torch.zeros_like(table_PS)
    slope_PS.index_put_((PREFIX_YT, SYMBOL_YT), weights_YT, accumulate=True)
    total_P = torch.zeros(len(PREFIXES), dtype=table_PS.dtype).index_put_((PREFIX_YT,), weights_YT, accumulate=True)
    return slope_PS - total_P.unsqueeze(-1) * table_PS.exp()


def true_gradient(world: World) -> Tensor:
    """The gradient of the policy's expected reward by its logits [P, S]."""
    value_Y = probabilities(world.policy) * world.rewards_Y
    return gradient_by_logits(value_Y.unsqueeze(-1).expand(-1, TOKENS), world.policy)


def expected_gradient(algorithm: Algorithm, world: World) -> Tensor:
    """Minus the expectation over the behaviour policy of the gradient of the algorithm's loss, by the logits [P, S]."""
    logits_PS = world.policy.clone().requires_grad_()
    logprobs_YT = of_responses(logits_PS.log_softmax(-1))
    tables = [of_responses(table) for table in (world.anchor, world.behaviour, world.reference)]
    chance_Y = probabilities(world.behaviour)
    sampled_kl_Y = tables[1].sum(-1) - tables[2].sum(-1)
    total = logits_PS.sum() * 0.0
    for response in range(len(RESPONSES)):
        groups = Groups(
            rewards_N=world.rewards_Y[response : response + 1],
            group_N=torch.zeros(1, dtype=torch.int64),
            lengths_N=torch.tensor([TOKENS]),
            truncated_N=torch.zeros(1, dtype=torch.bool),
            staleness_N=torch.zeros(1, dtype=torch.int64),
            kl_N=sampled_kl_Y[response : response + 1],
        )
        tokens = Tokens(
            logprobs_T=logprobs_YT[response],
            anchor_T=tables[0][response],
            rollout_T=tables[1][response],
            sample_T=torch.zeros(TOKENS, dtype=torch.int64),
            advantages_N=algorithm.credit(groups).advantages_N,
            weights_N=torch.ones(1, dtype=torch.float64),
            group_N=groups.group_N,
            valid_T=torch.ones(TOKENS, dtype=torch.float64),
            reference_T=tables[2][response],
        )
        for term in algorithm.terms(tokens):
            total = total + chance_Y[response] * term.loss_sum
    (gradient_PS,) = torch.autograd.grad(-total, logits_PS)
    return gradient_PS


def prefix_chances(table_PS: Tensor) -> Tensor:
    """The probability of reaching each prefix [P], by recursion."""
    chance_P = torch.ones(len(PREFIXES), dtype=table_PS.dtype)
    for index, prefix in enumerate(PREFIXES):
        if prefix:
            parent = PREFIXES.index(prefix[:-1])
            chance_P[index] = chance_P[parent] * table_PS[parent, prefix[-1]].exp()
    return chance_P


def continuation_values(world: World) -> Tensor:
    """Q: the expected reward after each prefix and symbol [P, S] if the behaviour policy continues, by recursion."""
    value_PS = torch.zeros_like(world.behaviour)
    for index in reversed(range(len(PREFIXES))):
        for symbol in range(SYMBOLS):
            extended = (*PREFIXES[index], symbol)
            if len(extended) == TOKENS:
                value_PS[index, symbol] = world.rewards_Y[RESPONSES.index(extended)]
            else:
                child = PREFIXES.index(extended)
                value_PS[index, symbol] = (world.behaviour[child].exp() * value_PS[child]).sum()
    return value_PS


def token_limit(world: World, weight: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """The expected gradient [P, S] of a loss that weights each token by w(policy, behaviour).

    sum over prefixes s of behaviour(s) sum_a w(a | s) behaviour(a | s) Q(s, a) d log policy(a | s): prefixes and
    continuations are distributed as the behaviour policy's, whatever the weight.
    """
    policy_PS, behaviour_PS = world.policy.exp(), world.behaviour.exp()
    mass_PS = prefix_chances(world.behaviour).unsqueeze(-1) * behaviour_PS * weight(policy_PS, behaviour_PS)
    mass_PS = mass_PS * continuation_values(world)
    return mass_PS - mass_PS.sum(-1, keepdim=True) * policy_PS


def response_limit(world: World, mass_Y: Tensor) -> Tensor:
    """sum over responses of mass [Y] x reward x d log policy, by the logits [P, S]."""
    return gradient_by_logits((mass_Y * world.rewards_Y).unsqueeze(-1).expand(-1, TOKENS), world.policy)


def divergence_gradient(world: World, *, forward: bool) -> Tensor:
    """Minus the gradient [P, S] of KL(policy || reference), or, ``forward``, of KL(reference || policy).

    The divergence is the expectation of that of single tokens over the behaviour policy's prefixes.
    """
    chance_P1 = prefix_chances(world.behaviour).unsqueeze(-1)
    policy_PS, reference_PS = world.policy.exp(), world.reference.exp()
    if forward:
        return chance_P1 * (reference_PS - policy_PS)
    log_PS = world.policy - world.reference
    return -chance_P1 * policy_PS * (log_PS - (policy_PS * log_PS).sum(-1, keepdim=True))


def importance(level: Level, mode: Mode = "truncate", low: float = 0.0, high: float = INF) -> Objective:
    """REINFORCE with this importance correction, summed over tokens."""
    return Objective(PLAIN, correction=Correction(level, mode, low, high), aggregation=SUM)


def from_rollout(policy: PolicyLoss, credit: GroupAdvantages = PLAIN, kl: Kl | None = None) -> Objective:
    """A loss whose ratios are measured from the policy that sampled, summed over tokens."""
    return Objective(credit, policy, ROLLOUT_PLAN, Correction("off"), kl=kl, aggregation=SUM)


def at_rollout(world: World) -> World:
    """A copy in which the behaviour policy is the anchor."""
    return dataclasses.replace(world, anchor=world.behaviour)


def without_rewards(world: World) -> World:
    """A copy with rewards of 0, so that only a divergence term has a gradient."""
    return dataclasses.replace(world, rewards_Y=torch.zeros_like(world.rewards_Y))


def pair_gradient(algorithm: Algorithm, world: World) -> Tensor:
    """As `expected_gradient`, of the mean over the samples of a group of two, over all pairs of responses."""
    logits_PS = world.policy.clone().requires_grad_()
    first_N, second_N = torch.cartesian_prod(*[torch.arange(len(RESPONSES))] * 2).unbind(-1)
    response_M = torch.stack([first_N, second_N], -1).flatten()
    group_M = torch.arange(len(first_N)).repeat_interleave(2)
    chance_Y = probabilities(world.behaviour)
    groups = Groups(
        rewards_N=world.rewards_Y[response_M],
        group_N=group_M,
        lengths_N=torch.full_like(group_M, TOKENS),
        truncated_N=torch.zeros(len(group_M), dtype=torch.bool),
        staleness_N=torch.zeros_like(group_M),
    )
    tokens = Tokens(
        logprobs_T=of_responses(logits_PS.log_softmax(-1))[response_M].flatten(),
        anchor_T=of_responses(world.anchor)[response_M].flatten(),
        rollout_T=of_responses(world.behaviour)[response_M].flatten(),
        sample_T=torch.arange(len(group_M)).repeat_interleave(TOKENS),
        advantages_N=algorithm.credit(groups).advantages_N,
        weights_N=(chance_Y[first_N] * chance_Y[second_N]).repeat_interleave(2) / 2,
        group_N=group_M,
        valid_T=torch.ones(TOKENS * len(group_M), dtype=torch.float64),
    )
    (gradient_PS,) = torch.autograd.grad(-algorithm.terms(tokens)[0].loss_sum, logits_PS)
    return gradient_PS


def penalised_gradient(world: World, coef: float) -> Tensor:
    """The gradient [P, S] of expected reward - coef x KL(policy || reference) of whole responses, by autograd."""
    logits_PS = world.policy.clone().requires_grad_()
    logprobs_Y = of_responses(logits_PS.log_softmax(-1)).sum(-1)
    objective_Y = world.rewards_Y - coef * (logprobs_Y - of_responses(world.reference).sum(-1))
    (gradient_PS,) = torch.autograd.grad((logprobs_Y.exp() * objective_Y).sum(), logits_PS)
    return gradient_PS


def exact_cases(world: World) -> dict[str, tuple[Tensor, Tensor]]:
    """Expected gradients of unbiased objectives, each with the exact gradient that it must equal, by name."""
    true_PS, on = true_gradient(world), world.on_policy()
    sequence = importance("sequence")
    decoupled = dataclasses.replace(sequence, policy=Ppo(), plan=STEP_PLAN)
    pairs = dataclasses.replace(sequence, credit_rule=GroupAdvantages(baseline="leave_one_out", scale="none"))
    centred = dataclasses.replace(sequence, credit_rule=GroupAdvantages(scale="none"))
    penalised = from_rollout(Reinforce(), GroupAdvantages(baseline="none", scale="none", kl_coef=0.3))
    cases = {
        "sequence importance": (expected_gradient(sequence, world), true_PS),
        "decoupled PPO, sequence weight without a cap": (expected_gradient(decoupled, world), true_PS),
        "leave one out, groups of two, sequence importance": (pair_gradient(pairs, world), true_PS),
        "group mean, groups of two: half of it": (pair_gradient(centred, world), true_PS / 2),
        "KL in the reward, on-policy": (expected_gradient(penalised, on), penalised_gradient(on, 0.3)),
    }
    for loss in ON_POLICY:
        cases[f"{loss}, on-policy"] = expected_gradient(from_rollout(loss), on), true_gradient(on)
    no_reward, on_policy_no_reward = without_rewards(world), without_rewards(on)
    for estimator in ESTIMATORS_OF_REVERSE:
        kl = from_rollout(Reinforce(), kl=Kl(1.0, estimator))
        wanted = divergence_gradient(on_policy_no_reward, forward=False)
        cases[f"{estimator}, on-policy"] = expected_gradient(kl, on_policy_no_reward), wanted
    unbiased = from_rollout(Reinforce(), kl=Kl(1.0, "unbiased"))
    cases["unbiased k3, off-policy"] = (
        expected_gradient(unbiased, no_reward),
        divergence_gradient(no_reward, forward=False),
    )
    return cases


def biased_cases(world: World) -> dict[str, tuple[Tensor, Tensor]]:
    """Expected gradients of biased objectives, each with its own closed form, by name."""
    behaviour_Y, policy_Y = probabilities(world.behaviour), probabilities(world.policy)
    ratio_Y = policy_Y / behaviour_Y
    anchored = at_rollout(world)
    on_policy_no_reward = without_rewards(world.on_policy())

    def token_case(objective: Objective, weight: Callable[[Tensor, Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        return expected_gradient(objective, anchored), token_limit(world, weight)

    def response_case(objective: Objective, mass_Y: Tensor) -> tuple[Tensor, Tensor]:
        return expected_gradient(objective, world), response_limit(world, mass_Y)

    topr_Y = torch.where(world.rewards_Y > 0, behaviour_Y, torch.minimum(behaviour_Y, policy_Y))
    token_YT = (of_responses(world.policy) - of_responses(world.behaviour)).exp()
    rewards_YT = world.rewards_Y.unsqueeze(-1).expand(-1, TOKENS)
    clipped_YT = ((rewards_YT > 0) & (token_YT > 1.2)) | ((rewards_YT < 0) & (token_YT < 0.8))
    ppo_YT = behaviour_Y.unsqueeze(-1) * rewards_YT * token_YT * ~clipped_YT
    return {
        "no correction": (
            expected_gradient(importance("off"), world),
            token_limit(world, lambda policy, _: torch.ones_like(policy)),
        ),
        "token importance": (
            expected_gradient(importance("token"), world),
            token_limit(world, lambda policy, behaviour: policy / behaviour),
        ),
        "token TIS": (
            expected_gradient(importance("token", high=CAP), world),
            token_limit(world, lambda policy, behaviour: (policy / behaviour).clamp(max=CAP)),
        ),
        "IcePop": (
            expected_gradient(importance("token", "mask", LOW, HIGH), world),
            token_limit(world, lambda policy, behaviour: banded(policy / behaviour)),
        ),
        "sequence TIS": response_case(importance("sequence", high=CAP), torch.minimum(policy_Y, CAP * behaviour_Y)),
        "sequence mask": response_case(importance("sequence", "mask", LOW, HIGH), behaviour_Y * banded(ratio_Y)),
        "geometric": response_case(importance("geometric"), behaviour_Y ** (1 - 1 / TOKENS) * policy_Y ** (1 / TOKENS)),
        "TOPR": (expected_gradient(from_rollout(Topr()), anchored), response_limit(world, topr_Y)),
        "CISPO": token_case(
            from_rollout(Cispo(clip_high=CAP - 1)), lambda policy, behaviour: (policy / behaviour).clamp(max=CAP)
        ),
        "PPO": (expected_gradient(from_rollout(Ppo()), anchored), gradient_by_logits(ppo_YT, world.policy)),
        "k3, on-policy": (
            expected_gradient(from_rollout(Reinforce(), kl=Kl(1.0, "k3")), on_policy_no_reward),
            divergence_gradient(on_policy_no_reward, forward=True),
        ),
        "k1, on-policy": (
            expected_gradient(from_rollout(Reinforce(), kl=Kl(1.0, "k1")), on_policy_no_reward),
            torch.zeros_like(world.policy),
        ),
    }


def banded(ratio: Tensor) -> Tensor:
    """The ratios within [LOW, HIGH]; 0 for the others."""
    return torch.where((ratio >= LOW) & (ratio <= HIGH), ratio, 0.0)


def distance(got_PS: Tensor, wanted_PS: Tensor) -> float:
    """Norm of the difference, relative to the norm of ``wanted_PS``, or to 1 if that norm is 0."""
    return float((got_PS - wanted_PS).norm() / (wanted_PS.norm() or 1.0))


def bias(gradient_PS: Tensor, world: World) -> float:
    """Distance of an expected gradient from that of the expected reward."""
    return distance(gradient_PS, true_gradient(world))


def measure(quick: bool) -> dict[str, float]:
    """The largest relative error of the exact and of the biased expected gradients, over drawn worlds."""
    worlds = [draw_world(seed, spread) for seed in range(1 if quick else 5) for spread in SPREADS]
    exact = max(distance(*case) for world in worlds for case in exact_cases(world).values())
    biased = max(distance(*case) for world in worlds for case in biased_cases(world).values())
    return {
        "enumeration_max": max(exact, biased),
        "enumeration_exact_max": exact,
        "enumeration_biased_max": biased,
    }
