"""The names of the metrics that a step of a run can have in metrics.jsonl, derived from its configuration.

`flowrt.controller.transitions.step_metrics` names and computes those of the controller. The metrics of training engines
are listed here, because code that checks a configuration imports no torch; a test compares the names with those of a
step of every preset.
"""

from flowrt.controller.policies.group_filter import DECISION
from flowrt.controller.transitions.step_metrics import (
    FILTERED_GROUPS,
    GROUPS_OF,
    OF_ALL_STEPS,
    REFUSED_TRAINED,
    REWARD_OF,
    SKIPPED_PROMPTS,
)
from flowrt.recipes.algorithm_config import DpoLoss, FilterConfig, PpoLoss
from flowrt.recipes.algorithms import is_own, rejects_samples
from flowrt.recipes.config import RunConfig, UniformCurriculum
from flowrt.rewards.scoring import reward_columns

CLOCK = ("step", "wall_s", "samples_per_s")
"""Fields that only count steps or read the clock."""
MAX_AGE = 7
"""Tokens of this staleness or more share one metric of divergence."""
OF_ALL_OBJECTIVES = (
    *("reward", "truncated", "response_length", "loss", "nll", "mismatch_kl_k1", "mismatch_kl_k3"),
    *("effective_sample_fraction", "invalid_samples", "grad_norm", "lr"),
)
"""Means of the columns of a sample, and metrics of the trainer, that every step has."""
OF_LOSS: dict[str, tuple[str, ...]] = {
    "reinforce": (),
    "ppo": ("ratio", "clipped_low", "clipped_high"),
    "cispo": ("ratio", "clipped_low", "clipped_high"),
    "gspo": ("ratio", "clipped_low", "clipped_high"),
    "gmpo": ("ratio", "clipped_low", "clipped_high"),
    "sapo": ("ratio",),
    "dppo": ("ratio", "masked"),
    "vespo": ("ratio",),
    "topr": ("ratio", "clipped_high"),
    "aspo": ("ratio", "clipped_low", "clipped_high", "clipped_dual"),
    "surrogate": ("ratio",),
    "sat": ("ratio", "clip_range_factor", "clipped_low", "clipped_high"),
    "cross_entropy": (),
    "dpo": ("margin", "kl"),
}
"""By the type of the policy loss."""


def pass_ks(answers: int) -> list[int]:
    """The values of k for which an evaluation has pass@k, ascending.

    Args:
        answers: answers to each prompt.

    Returns:
        The powers of 2 below ``answers``, and ``answers`` itself.
    """
    return sorted({2**power for power in range(answers.bit_length()) if 2**power < answers} | {answers})


def metric_names(config: RunConfig) -> frozenset[str]:
    """Names of all metrics of a step; for an algorithm class of the user's, without those of its own terms."""
    names = {*OF_ALL_STEPS, *OF_ALL_OBJECTIVES}
    names |= {f"divergence_{age}" for age in range(min(config.max_staleness, MAX_AGE) + 1)}
    if config.algorithm.filter != FilterConfig():
        names |= {FILTERED_GROUPS, REFUSED_TRAINED}
    if config.algorithm.filter.function:
        names.add(DECISION)
    if not isinstance(config.curriculum, UniformCurriculum):
        names.add(SKIPPED_PROMPTS)
    if config.rollout.truncation.is_active:
        names.add("support_size")
    if len(config.data.sets) > 1:
        names |= {f"{of}{set_.name}" for set_ in config.data.sets for of in (REWARD_OF, GROUPS_OF)}
    names |= {*reward_columns(config.reward)}
    return frozenset(names if is_own(config.algorithm.name) else names | _of_objective(config))


def _of_objective(config: RunConfig) -> set[str]:
    """Names of the metrics of a preset's terms."""
    algorithm = config.algorithm
    loss, correction, kl = algorithm.loss, algorithm.correction, algorithm.kl
    names = set(OF_LOSS[loss.type])
    if isinstance(loss, DpoLoss):
        return names
    names |= {"importance_truncated", "importance_masked"}
    if isinstance(loss, PpoLoss) and loss.dual_clip is not None:
        names.add("clipped_dual")
    if kl.coef > 0 and kl.where == "loss":
        names |= {"kl", "kl_coef"} if kl.target else {"kl"}
    if rejects_samples(correction):
        names.add("rejected")
    if correction.second_moment:
        names.add("second_moment_masked")
    if algorithm.entropy.top_share < 1:
        names.add("low_entropy_masked")
    if algorithm.entropy.coef or algorithm.entropy.top_share < 1:
        names |= {"entropy", "policy_loss", "entropy_loss"}
    return names
