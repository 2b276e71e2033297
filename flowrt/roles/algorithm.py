"""The objective of a configuration, as an object that the training engines take.

A user's class (FILE.py:NAME) is loaded in each trainer rank. Before a run starts, a separate process loads it too and
reports what it needs (`flowrt.runtime.file_process`), because the controller does not import torch.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import NoReturn

import torch

from flowrt.algorithms.advantages import BestOfGroup, CreditRule, GroupAdvantages, OverlongPenalty
from flowrt.algorithms.algorithm import Algorithm, Groups, Needs, Plan
from flowrt.algorithms.losses import (
    AdaptiveKl,
    Aspo,
    Cispo,
    CrossEntropy,
    Dppo,
    Gmpo,
    Gspo,
    PolicyLoss,
    Ppo,
    Reinforce,
    Sapo,
    Sat,
    Surrogate,
    Topr,
    Vespo,
)
from flowrt.algorithms.objective import (
    Aggregation,
    Correction,
    Entropy,
    Kl,
    Objective,
    OnlineDpo,
    Rejection,
    SecondMoment,
)
from flowrt.engines.training.loss_passes import LossPasses, example_tokens
from flowrt.errors import ConfigError
from flowrt.recipes.algorithm_config import AlgorithmConfig, DpoLoss, KlConfig, Loss
from flowrt.recipes.algorithms import is_own
from flowrt.recipes.config import RunConfig
from flowrt.runtime.file_process import answer
from flowrt.runtime.user_module import called, load_module

METHODS = ("credit", "measure", "terms")
POLICY_LOSSES: dict[str, Callable[..., PolicyLoss]] = {
    "reinforce": Reinforce,
    "ppo": Ppo,
    "cispo": Cispo,
    "gspo": Gspo,
    "gmpo": Gmpo,
    "sapo": Sapo,
    "dppo": Dppo,
    "vespo": Vespo,
    "topr": Topr,
    "aspo": Aspo,
    "surrogate": Surrogate,
    "sat": Sat,
    "cross_entropy": CrossEntropy,
}
"""By the type of the policy loss; their parameters have the names of its keys."""


def algorithm(config: RunConfig) -> Algorithm:
    """The objective of a run. Raises ConfigError if a user's class cannot be loaded or is not an `Algorithm`."""
    table = config.algorithm
    if is_own(table.name):
        return own_algorithm(table.name)
    plan = Plan(table.plan.anchor, table.plan.updates, table.plan.epochs)
    if isinstance(table.loss, DpoLoss):
        return OnlineDpo(table.loss.beta, plan, table.loss.nll_coef)
    correction = table.correction
    return Objective(
        credit_rule=_credit(table, config.rollout.max_new_tokens),
        policy=_policy_loss(table.loss),
        plan=plan,
        correction=Correction(correction.level, correction.mode, correction.low, correction.high),
        rejection=Rejection(
            low=correction.reject_low,
            high=correction.reject_high or float("inf"),
            negative_kl=correction.reject_negative_kl or float("inf"),
            binary_kl=correction.reject_binary_kl or float("inf"),
        ),
        second_moment=SecondMoment(correction.second_moment) if correction.second_moment else None,
        kl=_kl(table.kl) if table.kl.coef > 0 and table.kl.where == "loss" else None,
        entropy=Entropy(table.entropy.coef, table.entropy.top_share),
        aggregation=Aggregation(table.loss.aggregation, config.rollout.max_new_tokens),
    )


def _credit(table: AlgorithmConfig, max_new_tokens: int) -> CreditRule:
    advantage = table.advantage
    if advantage.keep_best:
        above = float("-inf") if advantage.keep_above is None else advantage.keep_above
        return BestOfGroup(advantage.keep_best, above)
    return GroupAdvantages(
        baseline=advantage.baseline,
        scale=advantage.scale,
        eps=advantage.eps,
        whiten=advantage.whiten,
        kl_coef=table.kl.coef if table.kl.where == "reward" else 0.0,
        overlong=OverlongPenalty(max_new_tokens, advantage.overlong_tokens) if advantage.overlong_tokens else None,
        mask_truncated=advantage.mask_truncated,
    )


def _kl(kl: KlConfig) -> Kl:
    return Kl(kl.coef, kl.estimator, AdaptiveKl(kl.target, kl.horizon) if kl.target else None)


def _policy_loss(loss: Loss) -> PolicyLoss:
    of_step = ("type", "aggregation")
    options = {field.name: getattr(loss, field.name) for field in fields(loss) if field.name not in of_step}
    return POLICY_LOSSES[loss.type](**options)


# ---- user's classes


def own_algorithm(name: str) -> Algorithm:
    """Load ``FILE.py:NAME`` and create an instance. Raises ConfigError if that fails or it is not an `Algorithm`."""
    path, _, attribute = name.rpartition(":")

    def load() -> Algorithm:
        objective: Algorithm = getattr(load_module(path, "flowrt_own_algorithm"), attribute)()
        return objective

    objective = called("algorithm", path, f"while {attribute} was made", load)
    _check_own(name, objective)
    return objective


def _check_own(name: str, objective: Algorithm) -> None:
    """Call the methods on two samples of a group, so that mistakes are found before the run starts."""
    if missing := [method for method in (*METHODS, "needs", "plan") if not hasattr(objective, method)]:
        raise ConfigError(f"algorithm {name} has no {missing[0]}; see flowrt.algorithms.algorithm.Algorithm")
    try:
        needs, plan = objective.needs, objective.plan
        if not isinstance(needs, Needs) or not isinstance(plan, Plan):
            raise TypeError(f"needs is {type(needs).__name__} and plan {type(plan).__name__}; return Needs and Plan")
        two = torch.tensor([0, 0])
        credit = objective.credit(
            Groups(
                rewards_N=torch.tensor([0.0, 1.0], dtype=torch.float64),
                group_N=two,
                lengths_N=torch.tensor([1, 1]),
                truncated_N=torch.tensor([False, False]),
                staleness_N=two,
                kl_N=torch.zeros(2, dtype=torch.float64) if needs.reference else None,
            )
        )
        if credit.advantages_N.shape != (2,) or credit.trained_N.shape != (2,):
            raise ValueError(f"credit gives {list(credit.advantages_N.shape)} advantages for 2 samples")
        terms = objective.terms(example_tokens(objective))
        if not terms or any(term.loss_sum.shape != () for term in terms):
            raise ValueError("terms returns no term, or one whose loss_sum is no scalar")
        for term in terms:
            for metric, value in term.metrics.items():
                if value.shape != ():
                    raise ValueError(
                        f"metric {metric!r} of term {term.name!r} is no scalar; return its sum over tokens"
                    )
    except Exception as error:
        raise ConfigError(f"algorithm {name} fails on two samples: {type(error).__name__}: {error}") from error


def main(arguments: Sequence[str]) -> NoReturn:
    """Report what ``FILE.py:NAME`` needs, or why it cannot be used, to the process that started this one."""
    torch.set_num_threads(1)
    described: dict[str, object]
    try:
        objective = own_algorithm(arguments[0])
        needs = objective.needs
        described = {
            "reference": needs.reference,
            "whole_groups": needs.whole_groups,
            "metrics": list(LossPasses(objective, temperature=1.0, forward_tokens=1).metric_names),
        }
    except ConfigError as error:
        described = {"error": str(error)}
    answer(described)


if __name__ == "__main__":
    main(sys.argv[1:])
