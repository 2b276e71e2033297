"""The objectives under test, by name: all presets of `flowrt run --algorithm`, and further combinations of its flags.

Rows and tests over all objectives use this list; the objectives are built as a run builds them.
"""

import functools
from collections.abc import Mapping
from types import MappingProxyType

from flowrt.algorithms.algorithm import Algorithm
from flowrt.recipes.algorithms import PRESETS
from flowrt.recipes.config_io import parse
from flowrt.roles.algorithm import algorithm

COMPOSED: dict[str, tuple[str, ...]] = {
    "without_baseline": ("reinforce", "advantage.baseline=none", "advantage.scale=none"),
    "dual_clip": ("grpo", "loss.dual-clip=3.0"),
    "two_sided": ("dapo", "loss.delta=4.0"),
    "dppo_kl": ("dppo", "loss.distance=kl", "loss.limit=0.05"),
    "topr_token": ("topr", "loss.level=token"),
    "icepop": ("reinforce", "correction.mode=mask", "correction.low=0.5", "correction.high=5.0"),
    "sequence_tis": ("reinforce", "correction.level=sequence"),
    "geometric_mask": (
        *("reinforce", "correction.level=geometric", "correction.mode=mask"),
        *("correction.low=0.8", "correction.high=1.25"),
    ),
    "off_policy_mask": ("reinforce", "correction.reject-negative-kl=0.05"),
    "rejection": ("reinforce", "correction.reject-low=0.9", "correction.reject-high=1.1"),
    "unbiased_kl": ("reinforce", "kl.estimator=unbiased", "kl.coef=0.1"),
    "entropy_bonus": ("reinforce", "entropy.coef=0.01"),
    "top_entropy": ("reinforce", "entropy.top-share=0.2"),
    "one_update_from_step": ("decoupled", "plan.updates=1", "plan.epochs=2"),
    "two_epochs": ("decoupled", "plan.updates=2", "plan.epochs=2"),
}
"""By name: a preset, and the fields of the table `algorithm` that differ from it."""


NAMES = (*PRESETS, *COMPOSED)


@functools.cache
def presets(limit: int) -> Mapping[str, Algorithm]:
    """All presets and combinations, by their `NAMES`, for responses of at most ``limit`` tokens."""
    flags = {name: (name,) for name in PRESETS} | COMPOSED
    return MappingProxyType({name: _built(limit, *flags[name]) for name in NAMES})


def _built(limit: int, name: str, *fields: str) -> Algorithm:
    words = ["--rollout.max-new-tokens", str(limit), "--algorithm", name]
    return algorithm(parse([*words, *(f"--algorithm.{field}" for field in fields)]))
