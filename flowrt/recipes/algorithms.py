"""RL objectives by name: the presets of the table ``algorithm``, and which of its fields have an effect.

- A preset sets every field of the table; files and flags change single fields of it, and the run stores all of them.
- A field without effect in a combination must have the value of the preset (`flowrt.recipes.acting`).
- A name like FILE.py:NAME stands for a class of the user's; of the table only ``own_reference``, ``filter``,
  ``staleness_weight`` and ``staleness_power`` apply to it.
"""

from collections.abc import Iterator
from dataclasses import replace

from flowrt.errors import ConfigError, suggested
from flowrt.recipes.algorithm_config import (
    AdvantageConfig,
    AlgorithmConfig,
    AspoLoss,
    CispoLoss,
    CorrectionConfig,
    CrossEntropyLoss,
    DpoLoss,
    DppoLoss,
    FilterConfig,
    GmpoLoss,
    GspoLoss,
    KlConfig,
    Loss,
    PlanConfig,
    PpoLoss,
    ReinforceLoss,
    SapoLoss,
    SatLoss,
    SurrogateLoss,
    ToprLoss,
    VespoLoss,
)
from flowrt.recipes.config import RunConfig, key_values

NO_CORRECTION = CorrectionConfig(level="off")
FROM_ROLLOUT = PlanConfig(anchor="rollout")
FOUR_UPDATES = PlanConfig(anchor="step", updates=4)
NO_KL = KlConfig(coef=0.0)


def _from_rollout(loss: Loss, advantage: AdvantageConfig | None = None, kl: KlConfig = NO_KL) -> AlgorithmConfig:
    """A preset whose loss has ratios to the rollout policy, and therefore no importance correction."""
    return AlgorithmConfig(
        advantage=advantage or AdvantageConfig(), loss=loss, plan=FROM_ROLLOUT, correction=NO_CORRECTION, kl=kl
    )


_PRESETS: dict[str, AlgorithmConfig] = {
    "reinforce": AlgorithmConfig(),
    "grpo": _from_rollout(PpoLoss(aggregation="sequence_mean"), kl=KlConfig()),
    "dr_grpo": _from_rollout(PpoLoss(aggregation="constant"), AdvantageConfig(scale="none")),
    "dapo": replace(_from_rollout(PpoLoss(clip_high=0.28)), filter=FilterConfig(zero_variance=True)),
    "rloo": AlgorithmConfig(
        advantage=AdvantageConfig(baseline="leave_one_out", scale="none"),
        loss=ReinforceLoss(aggregation="constant"),
        correction=CorrectionConfig(level="sequence"),
        kl=KlConfig(where="reward"),
    ),
    "opo": AlgorithmConfig(advantage=AdvantageConfig(baseline="length_weighted", scale="none"), kl=NO_KL),
    "max_rl": AlgorithmConfig(advantage=AdvantageConfig(scale="group_mean"), kl=NO_KL),
    "lite_ppo": _from_rollout(PpoLoss(), AdvantageConfig(scale="batch_std")),
    "reinforce++": _from_rollout(
        PpoLoss(), AdvantageConfig(baseline="none", scale="none", whiten=True), KlConfig(where="reward")
    ),
    "reinforce++_baseline": _from_rollout(
        PpoLoss(), AdvantageConfig(scale="none", whiten=True), KlConfig(estimator="k2")
    ),
    "cispo": _from_rollout(CispoLoss()),
    "gspo": AlgorithmConfig(loss=GspoLoss(aggregation="sequence_mean"), plan=FOUR_UPDATES, kl=NO_KL),
    "luspo": AlgorithmConfig(
        loss=GspoLoss(aggregation="sequence_mean", length_weighted=True), plan=FOUR_UPDATES, kl=NO_KL
    ),
    "gmpo": _from_rollout(GmpoLoss(aggregation="sequence_mean")),
    "sapo": _from_rollout(SapoLoss(aggregation="sequence_mean")),
    "dppo": _from_rollout(DppoLoss(), AdvantageConfig(scale="none")),
    "vespo": _from_rollout(VespoLoss()),
    "topr": _from_rollout(ToprLoss(), AdvantageConfig(scale="none")),
    "aspo": _from_rollout(AspoLoss()),
    "decoupled": AlgorithmConfig(loss=PpoLoss(), plan=FOUR_UPDATES, kl=NO_KL),
    "m2po": AlgorithmConfig(
        loss=SurrogateLoss(),
        plan=FROM_ROLLOUT,
        correction=replace(NO_CORRECTION, second_moment=0.04),
        kl=NO_KL,
    ),
    "sat": _from_rollout(SatLoss(aggregation="sequence_mean")),
    "flash_reinforce": AlgorithmConfig(
        advantage=AdvantageConfig(baseline="batch_mean", scale="none"),
        loss=SurrogateLoss(aggregation="sequence_mean"),
        plan=FROM_ROLLOUT,
        correction=replace(NO_CORRECTION, reject_binary_kl=3e-3),
        kl=NO_KL,
    ),
    # With nll_coef 0 the likelihood of both samples falls, and runs with a staleness bound above 0 do not converge.
    "dpo_online": AlgorithmConfig(loss=DpoLoss(nll_coef=1.0), correction=NO_CORRECTION),
    "best_of_n": AlgorithmConfig(
        advantage=AdvantageConfig(keep_best=1),
        loss=CrossEntropyLoss(),
        correction=NO_CORRECTION,
        kl=NO_KL,
    ),
}
PRESETS: dict[str, AlgorithmConfig] = {name: replace(config, name=name) for name, config in _PRESETS.items()}
"""Sources and formulas: docs/objectives.md. Clip ranges are those of the papers."""

WITHOUT_RATIO = (ReinforceLoss, CrossEntropyLoss, DpoLoss)
OF_SEQUENCES = (GspoLoss, GmpoLoss, VespoLoss, DpoLoss)
"""Losses with one ratio or likelihood for a whole sample."""
OF_OWN = ("name", "own_reference", "staleness_weight", "staleness_power")
"""Fields that apply to a class of the user's, with those of ``filter``."""


def is_own(name: str) -> bool:
    """Whether an algorithm is a class of the user's, FILE.py:NAME."""
    return ":" in name


def preset(name: str) -> AlgorithmConfig:
    """The table of a preset; for a class of the user's, FILE.py:NAME, the default table with this name.

    Raises ConfigError for unknown names.
    """
    if is_own(name):
        return AlgorithmConfig(name=name)
    if name not in PRESETS:
        raise ConfigError(
            f"there is no algorithm {name!r} (a class of your own is FILE.py:NAME){suggested(name, PRESETS)}"
        )
    return PRESETS[name]


def needs_reference(algorithm: AlgorithmConfig) -> bool:
    """Whether samples need their log-probabilities under the reference model."""
    if is_own(algorithm.name):
        return algorithm.own_reference
    if isinstance(algorithm.loss, DpoLoss):
        return True
    return algorithm.kl.coef > 0 and not (algorithm.advantage.keep_best and algorithm.kl.where == "reward")


def has_step_scope(algorithm: AlgorithmConfig) -> bool:
    """Whether a preset depends on statistics of a whole step, so that training waits for its last sample."""
    return (
        _compares_step(algorithm.advantage)
        or isinstance(algorithm.loss, SatLoss)
        or algorithm.correction.second_moment > 0
        or algorithm.entropy.top_share < 1
    )


def _compares_step(advantage: AdvantageConfig) -> bool:
    """Whether advantages depend on the rewards of all samples of a step."""
    return advantage.whiten or advantage.scale == "batch_std" or advantage.baseline == "batch_mean"


def algorithm_mistakes(config: RunConfig) -> Iterator[str]:
    """Fields that contradict each other, and those that a class of the user's does not have.

    Raises ConfigError for an unknown name.
    """
    algorithm = config.algorithm
    if is_own(algorithm.name):
        yield from _own_mistakes(algorithm)
        return
    if algorithm.own_reference:
        yield f"algorithm.own_reference is for a class of your own, and algorithm is {algorithm.name}; leave it out"
    yield from _plan_mistakes(algorithm)
    yield from _range_mistakes(config)
    yield from _group_mistakes(config)
    if config.trainer.tokens_per_step:
        yield from _token_mistakes(algorithm)


def _own_mistakes(algorithm: AlgorithmConfig) -> Iterator[str]:
    usual = {name: value for name, _, value in key_values(preset(algorithm.name))}
    for name, _, value in key_values(algorithm):
        if value != usual.get(name, value) and name not in OF_OWN and not name.startswith("filter."):
            yield (
                f"algorithm.{name} is {value}, which changes nothing: algorithm {algorithm.name} has no such parameter "
                "of flowrt's; leave it out"
            )


def _token_mistakes(algorithm: AlgorithmConfig) -> Iterator[str]:
    """What cannot be computed from a part of the tokens of a step (``trainer.tokens_per_step``)."""
    if has_step_scope(algorithm):
        yield (
            f"algorithm {algorithm.name} uses statistics of all samples of a step, of which trainer.tokens_per_step "
            "trains a part; leave one of them out"
        )
    for name in ("keep_best", "mask_truncated"):
        if getattr(algorithm.advantage, name):
            yield (
                f"algorithm.advantage.{name} leaves samples out of training whose tokens trainer.tokens_per_step "
                "counts; leave one of them out"
            )
    if _weighs_samples(algorithm):
        yield (
            f"algorithm {algorithm.name} weighs whole samples, which trainer.tokens_per_step cuts; leave one of them "
            "out"
        )


def rejects_samples(correction: CorrectionConfig) -> bool:
    """Whether samples may be masked as a whole."""
    limits = (correction.reject_low, correction.reject_high, correction.reject_negative_kl, correction.reject_binary_kl)
    return any(limits)


def _weighs_samples(algorithm: AlgorithmConfig) -> bool:
    """Whether the weight of a token depends on all tokens of its sample."""
    return (
        isinstance(algorithm.loss, OF_SEQUENCES)
        or algorithm.correction.level in ("sequence", "geometric")
        or rejects_samples(algorithm.correction)
    )


def name_and_changes(algorithm: AlgorithmConfig) -> str:
    """The name of the algorithm, and its fields that differ from the preset: ``grpo, with loss.clip_high 0.3``."""
    usual = {name: value for name, _, value in key_values(preset(algorithm.name))}
    changes = ", ".join(f"{name} {value}" for name, _, value in key_values(algorithm) if value != usual.get(name))
    return f"{algorithm.name}, with {changes}" if changes else algorithm.name


def _plan_mistakes(algorithm: AlgorithmConfig) -> Iterator[str]:
    plan, loss = algorithm.plan, algorithm.loss
    several = plan.updates * plan.epochs > 1
    if several and plan.anchor == "present":
        yield (
            f"algorithm.plan makes {plan.updates * plan.epochs} updates a step with anchor present, so that every "
            "ratio is 1; use algorithm.plan.anchor step or rollout"
        )
    if not several and plan.anchor == "step":
        yield (
            "algorithm.plan.anchor is step, which with one update a step is the trained policy itself; use present or "
            "rollout, or several algorithm.plan.updates"
        )
    if isinstance(loss, WITHOUT_RATIO):
        if plan.anchor == "rollout" or (plan.anchor == "step" and algorithm.correction.level == "off"):
            yield (
                f"algorithm.plan.anchor is {plan.anchor}, and loss {loss.type} has no ratio to it; use "
                + ("a loss with one" if several else "anchor present, or a loss with one, like ppo")
            )
    elif plan.anchor == "present":
        yield (
            f"algorithm.loss.type is {loss.type} with algorithm.plan.anchor present: every ratio is 1, so its bounds "
            "change nothing; use anchor rollout, several updates with anchor step, or loss reinforce"
        )
    if plan.anchor == "rollout" and algorithm.correction.level != "off":
        yield (
            "algorithm.plan.anchor is rollout, so the loss has the ratio to the policy that sampled, which "
            f"algorithm.correction.level {algorithm.correction.level} would count twice; use level off, or anchor step"
        )


def _range_mistakes(config: RunConfig) -> Iterator[str]:
    """Values outside of bounds that depend on other fields."""
    loss, correction = config.algorithm.loss, config.algorithm.correction
    if isinstance(loss, PpoLoss) and loss.delta is not None and loss.delta <= 1 + loss.clip_high:
        yield f"algorithm.loss.delta is {loss.delta}, within the clip range; use more than {1 + loss.clip_high:g}"
    if 0 < correction.reject_high < 1:
        yield f"algorithm.correction.reject_high is {correction.reject_high}; use 1 or more, or 0 for none"
    kl, samples = config.algorithm.kl, config.prompts_per_step * config.group_size
    if kl.target and kl.horizon < samples:
        yield (
            f"algorithm.kl.horizon is {kl.horizon}, fewer than the {samples} samples of a step (prompts_per_step x "
            "group_size): the coefficient would jump; use several times as many"
        )
    if (overlong := config.algorithm.advantage.overlong_tokens) > config.rollout.max_new_tokens:
        yield (
            f"algorithm.advantage.overlong_tokens is {overlong}, more than a response can have "
            f"(rollout.max_new_tokens {config.rollout.max_new_tokens})"
        )


def _group_mistakes(config: RunConfig) -> Iterator[str]:
    """Numbers of samples and a baseline that the advantages cannot be computed with."""
    advantage, size = config.algorithm.advantage, config.group_size
    if isinstance(config.algorithm.loss, DpoLoss):
        if size < 2:
            yield "group_size is 1, and loss dpo compares two samples of a group; use 2 or more"
        return
    if advantage.keep_best:
        if advantage.keep_best > size:
            yield f"algorithm.advantage.keep_best is {advantage.keep_best}, of groups of {size}; keep fewer"
        return
    if advantage.scale == "group_mean" and advantage.baseline != "group_mean":
        yield (
            f"algorithm.advantage.scale group_mean divides by the baseline, which is {advantage.baseline}; use "
            "baseline group_mean"
        )
    if config.prompts_per_step * size == 1 and _compares_step(advantage):
        yield (
            f"prompts_per_step and group_size are 1, and algorithm {config.algorithm.name} compares the samples of a "
            "step: nothing would be learned; use more prompts a step"
        )
    if size == 1 and advantage.baseline not in ("batch_mean", "none"):
        yield (
            f"group_size is 1, and advantage baseline {advantage.baseline} compares the samples of a group: nothing "
            "would be learned; use 2 or more, or --algorithm flash_reinforce"
        )
    elif size == 1 and advantage.scale == "group_std":
        yield (
            "group_size is 1: advantage scale group_std divides by the group's standard deviation, which one sample "
            "does not have; use 2 or more, or --algorithm.advantage.scale none"
        )
