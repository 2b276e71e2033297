"""The table ``algorithm`` of a configuration: the RL objective (sources and formulas: docs/objectives.md)."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from annotated_types import Interval

from flowrt.runtime.bounds import RewardLimit, Seconds, limits
from flowrt.runtime.conditions import OnlyIf

MAX_LIVE_SAMPLES = 1_000_000
"""Maximum number of samples in all steps in progress: the controller keeps a row in memory for each."""
WITH_TOKEN_LOSS = OnlyIf("algorithm.loss.type", but=("dpo",))
WITH_ADVANTAGES = OnlyIf("algorithm.advantage.keep_best", have=(0,))
WITH_SCALE = OnlyIf("algorithm.advantage.scale", but=("none", False), or_keys=("algorithm.advantage.whiten",))
WITH_CORRECTION = OnlyIf("algorithm.correction.level", but=("off",))
WITH_KL = OnlyIf("algorithm.kl.coef", but=(0,))
KL_IN_LOSS = OnlyIf("algorithm.kl.where", have=("loss",))
KL_OR_ADVANTAGES = OnlyIf("algorithm.advantage.keep_best", have=(0, "loss"), or_keys=("algorithm.kl.where",))
ClipRange = Annotated[float, Interval(ge=0, le=1_000)]


@dataclass(frozen=True)
class FilterConfig:
    """Group filter (dynamic sampling): groups that are not trained; other prompts are opened in their place."""

    zero_variance: bool = False
    """Filter groups whose rewards are all equal (DAPO, arXiv 2503.14476): they have no policy gradient."""
    min_reward: RewardLimit = None
    """Filter groups whose mean reward is below this."""
    max_reward: RewardLimit = None
    """Filter groups whose mean reward is above this."""
    function: str = ""
    """FILE.py:FUNCTION, called with the list of a group's rewards, and by name with what it takes of prompt, epoch,
    lengths and version; it returns True to keep the group, and a group on which it fails is filtered too."""
    function_timeout_s: Annotated[Seconds, OnlyIf("algorithm.filter.function", but=("",))] = 10.0
    """Deadline for loading the file of the function and for each call, in seconds."""
    tries: Annotated[int, Interval(ge=1, le=MAX_LIVE_SAMPLES)] = 128
    """Maximum number of groups filtered in a step; after that, groups are trained whatever their rewards are."""

    @property
    def rewards(self) -> tuple[float, float]:
        """The lowest and the highest mean reward of groups that are not filtered."""
        return limits(self.min_reward, self.max_reward)


@dataclass(frozen=True)
class AdvantageConfig:
    """From the rewards of a group to one advantage a sample: (reward - baseline) / scale."""

    baseline: Annotated[
        Literal["group_mean", "leave_one_out", "length_weighted", "batch_mean", "none"], WITH_ADVANTAGES
    ] = "group_mean"
    """What is subtracted from a reward: group_mean (GRPO), leave_one_out, the mean of the others (RLOO, arXiv
    2402.14740), length_weighted (OPO, arXiv 2505.23585), batch_mean, of all rewards of the step (FlashREINFORCE), or
    none."""
    scale: Annotated[Literal["group_std", "batch_std", "group_mean", "none"], WITH_ADVANTAGES] = "group_std"
    """What is divided by: the standard deviation of the group (GRPO) or of the step (Lite-PPO, arXiv 2508.08221), the
    group's mean (MaxRL, arXiv 2602.02710), or none (arXiv 2503.20783)."""
    eps: Annotated[float, Interval(gt=0, le=1), WITH_ADVANTAGES, WITH_SCALE] = 1e-6
    """Added to standard deviations; with scale group_mean: a group whose mean reward is not above it has no
    advantages."""
    whiten: Annotated[bool, WITH_ADVANTAGES] = False
    """Normalise the advantages of a step to mean 0 and standard deviation 1 (REINFORCE++, arXiv 2501.03262)."""
    keep_best: Annotated[int, Interval(ge=0, le=65_536)] = 0
    """Train on this many best samples of each group, with advantage 1, and on no others (RAFT, arXiv 2304.06767);
    0: off."""
    keep_above: Annotated[RewardLimit, OnlyIf("algorithm.advantage.keep_best", but=(0,))] = None
    """Samples with rewards up to this are not trained."""
    overlong_tokens: Annotated[int, Interval(ge=0, le=16_777_216), WITH_ADVANTAGES] = 0
    """Soft length penalty (DAPO, arXiv 2503.14476, equation 13): over the last this many tokens before
    rollout.max_new_tokens the reward falls by up to 1; 0: off."""
    mask_truncated: Annotated[bool, WITH_ADVANTAGES] = False
    """Do not train on responses that were cut at the length limit."""


@dataclass(frozen=True)
class TokenLoss:
    """A policy loss of tokens, and how it becomes the loss of a step."""

    type: str
    aggregation: Literal["token_mean", "sequence_mean", "constant"] = "token_mean"
    """Mean over the tokens of a step (DAPO), mean over samples of the mean over tokens (GRPO), or sum over
    rollout.max_new_tokens a sample (arXiv 2503.20783)."""


@dataclass(frozen=True)
class ClippedLoss(TokenLoss):
    """A policy loss with a clip range."""

    clip_low: Annotated[float, Interval(ge=0, le=1)] = 0.2
    """Lower clip range: ratios are clipped at 1 - clip_low."""
    clip_high: ClipRange = 0.2
    """Upper clip range: ratios are clipped at 1 + clip_high."""


@dataclass(frozen=True)
class ReinforceLoss(TokenLoss):
    """Log-probability times advantage."""

    type: Literal["reinforce"] = "reinforce"


@dataclass(frozen=True)
class PpoLoss(ClippedLoss):
    """Clipped ratio times advantage, also for GRPO and DAPO (arXiv 1707.06347)."""

    type: Literal["ppo"] = "ppo"
    dual_clip: Annotated[float | None, Interval(gt=1, le=1_000)] = None
    """Bound of the loss of tokens with negative advantage, in multiples of it (arXiv 1912.09729); not given: none."""
    delta: Annotated[float | None, Interval(gt=1, le=1_000)] = None
    """Bound of the unclipped ratio (INTELLECT-2, arXiv 2505.07291); not given: none."""


@dataclass(frozen=True)
class CispoLoss(ClippedLoss):
    """Log-probability weighted by the clipped ratio (arXiv 2506.13585)."""

    type: Literal["cispo"] = "cispo"
    clip_low: Annotated[float, Interval(ge=0, le=1)] = 1.0
    clip_high: ClipRange = 4.0


@dataclass(frozen=True)
class GspoLoss(ClippedLoss):
    """Clipped ratio of the whole sample (arXiv 2507.18071)."""

    type: Literal["gspo"] = "gspo"
    clip_low: Annotated[float, Interval(ge=0, le=1)] = 3e-4
    clip_high: ClipRange = 4e-4
    length_weighted: bool = False
    """Times the length of the sample (LUSPO, arXiv 2602.05261)."""


@dataclass(frozen=True)
class GmpoLoss(TokenLoss):
    """Geometric mean of a sample's clipped ratios (arXiv 2507.20673)."""

    type: Literal["gmpo"] = "gmpo"
    clip_low: ClipRange = 0.4
    """Lower clip range: log ratios are clipped at -clip_low."""
    clip_high: ClipRange = 0.4
    """Upper clip range: log ratios are clipped at clip_high."""


@dataclass(frozen=True)
class SapoLoss(TokenLoss):
    """Soft gate in place of a clip range (arXiv 2511.20347)."""

    type: Literal["sapo"] = "sapo"
    tau_positive: Annotated[float, Interval(gt=0, le=1_000)] = 1.0
    """Temperature of the gate for positive advantages."""
    tau_negative: Annotated[float, Interval(gt=0, le=1_000)] = 1.05
    """Temperature of the gate for negative advantages."""


@dataclass(frozen=True)
class DppoLoss(TokenLoss):
    """Masked where the probability of a token is far from the anchor's (arXiv 2602.04879)."""

    type: Literal["dppo"] = "dppo"
    distance: Literal["tv", "kl"] = "tv"
    """Distance of a token's probability from the anchor's."""
    limit: Annotated[float, Interval(gt=0, le=1_000)] = 0.2
    """Distance beyond which a token is masked."""
    max_ratio: Annotated[float, Interval(ge=1, le=1_000_000)] = 20.0
    """Bound of the ratio."""


@dataclass(frozen=True)
class VespoLoss(TokenLoss):
    """Log-probability weighted by a smooth function of the sample's ratio (arXiv 2602.10693)."""

    type: Literal["vespo"] = "vespo"
    k_positive: Annotated[float, Interval(gt=0, le=1_000)] = 2.0
    """Exponent of the sample's ratio for positive advantages."""
    lambda_positive: Annotated[float, Interval(gt=0, le=1_000)] = 3.0
    """Rate of the sample's ratio for positive advantages."""
    k_negative: Annotated[float, Interval(gt=0, le=1_000)] = 3.0
    """Exponent for negative advantages."""
    lambda_negative: Annotated[float, Interval(gt=0, le=1_000)] = 2.0
    """Rate for negative advantages."""


@dataclass(frozen=True)
class ToprLoss(TokenLoss):
    """Bounded ratio for negative advantages alone (arXiv 2503.14286)."""

    type: Literal["topr"] = "topr"
    cap: Annotated[float, Interval(gt=0, le=1_000_000)] = 1.0
    """Bound of the ratio of samples with negative advantage."""
    level: Literal["sequence", "token"] = "sequence"
    """Ratios of whole samples or of tokens."""


@dataclass(frozen=True)
class AspoLoss(ClippedLoss):
    """Inverted ratio for positive advantages (arXiv 2510.06062)."""

    type: Literal["aspo"] = "aspo"
    dual_clip: Annotated[float, Interval(gt=1, le=1_000)] = 3.0
    """Bound of the inverted ratio, and of the ratio of tokens with negative advantage."""


@dataclass(frozen=True)
class SurrogateLoss(TokenLoss):
    """Ratio times advantage, without a bound (arXiv 1707.06347, equation 6)."""

    type: Literal["surrogate"] = "surrogate"


@dataclass(frozen=True)
class SatLoss(ClippedLoss):
    """As ppo, with a clip range that shrinks for tokens far from the rollout policy (after arXiv 2607.18722)."""

    type: Literal["sat"] = "sat"
    quantile: Annotated[float, Interval(ge=0, le=1)] = 0.9
    """Share of the step's tokens, those nearest to the rollout policy, whose clip range is not contracted; 1: all, as
    loss ppo."""


@dataclass(frozen=True)
class CrossEntropyLoss(TokenLoss):
    """Supervised training on the samples, weighted by the advantage (RAFT, arXiv 2304.06767)."""

    type: Literal["cross_entropy"] = "cross_entropy"


@dataclass(frozen=True)
class DpoLoss:
    """Preference of the best over the worst sample of a group (online DPO, arXiv 2402.04792)."""

    type: Literal["dpo"] = "dpo"
    beta: Annotated[float, Interval(gt=0, le=1_000)] = 0.1
    """Inverse temperature of the preference."""
    nll_coef: Annotated[float, Interval(ge=0, le=1_000)] = 0.0
    """Weight of the mean negative log-likelihood of the best sample (arXiv 2404.19733); 0: none."""


Loss = (
    ReinforceLoss
    | PpoLoss
    | CispoLoss
    | GspoLoss
    | GmpoLoss
    | SapoLoss
    | DppoLoss
    | VespoLoss
    | ToprLoss
    | AspoLoss
    | SurrogateLoss
    | SatLoss
    | CrossEntropyLoss
    | DpoLoss
)


@dataclass(frozen=True)
class PlanConfig:
    """The optimiser updates of a step, and the policy that their ratios are measured from."""

    anchor: Literal["present", "rollout", "step"] = "present"
    """Denominator of the ratio: present, the trained policy itself (every ratio is 1); rollout, the policy that sampled
    the token; step, the policy before the first update of the step."""
    updates: Annotated[int, Interval(ge=1, le=1_000)] = 1
    """Mini-batches, in whole groups, that a step is cut into, each with an optimiser update; one version of the weights
    is published after the last."""
    epochs: Annotated[int, Interval(ge=1, le=1_000)] = 1
    """Passes over the samples of a step."""


@dataclass(frozen=True)
class CorrectionConfig:
    """Correction of the difference between the policy that sampled and the anchor."""

    level: Literal["off", "token", "sequence", "geometric"] = "token"
    """Importance weight, anchor over rollout: of each token, of the sample (the product), its geometric mean, or
    off."""
    mode: Annotated[Literal["truncate", "mask"], WITH_CORRECTION] = "truncate"
    """Weights outside [low, high] are truncated (TIS), or set to 0 (IcePop, arXiv 2510.18855)."""
    low: Annotated[float, Interval(ge=0, le=1), WITH_CORRECTION] = 0.0
    """Lower bound of the weight."""
    high: Annotated[float, Interval(ge=1, le=1_000_000), WITH_CORRECTION] = 2.0
    """Upper bound of the weight."""
    reject_low: Annotated[float, Interval(ge=0, le=1)] = 0.0
    """Mask samples whose geometric mean ratio, policy over rollout, is below this; 0: none."""
    reject_high: Annotated[float, Interval(ge=0, le=1_000_000)] = 0.0
    """Mask samples whose geometric mean ratio, policy over rollout, is above this (1 or more); 0: none."""
    reject_negative_kl: Annotated[float, Interval(ge=0, le=1_000)] = 0.0
    """Mask samples with negative advantage that have moved more than this from the rollout policy, in nats a token
    (DeepSeek-V3.2, arXiv 2512.02556); 0: none."""
    reject_binary_kl: Annotated[float, Interval(ge=0, le=1_000)] = 0.0
    """Mask samples whose mean KL of rollout and policy, of each token as one of two outcomes (this token, another), is
    above this, in nats a token (FlashREINFORCE); 0: none."""
    second_moment: Annotated[float, Interval(ge=0, le=1_000)] = 0.0
    """Mask the tokens with the largest squared log ratios until the mean of the rest is below this (M2PO, arXiv
    2510.01161); 0: none."""


@dataclass(frozen=True)
class KlConfig:
    """Penalty on the divergence from the reference model."""

    coef: Annotated[float, Interval(ge=0, le=1_000), KL_OR_ADVANTAGES] = 1e-3
    """Weight of the penalty; 0: none, and no reference worker is started."""
    where: Annotated[Literal["loss", "reward"], WITH_KL] = "loss"
    """As a term of the loss, or subtracted from the reward of each sample (sum over its tokens)."""
    estimator: Annotated[Literal["k1", "k2", "k3", "k3_with_k2_slope", "unbiased"], WITH_KL, KL_IN_LOSS] = "k3"
    """Estimator of the term in the loss: k1, k2, k3 (joschu.net/blog/kl-approx.html), the value of k3 with the slope of
    k2, or k3 with importance weights (arXiv 2512.02556)."""
    target: Annotated[float, Interval(ge=0, le=1_000), WITH_KL, KL_IN_LOSS] = 0.0
    """Divergence that the coefficient follows, in nats a token: coef is that of the first step, and
    after each it is multiplied by 1 + clip(kl / target - 1, -0.2, 0.2) * samples / horizon (arXiv 1909.08593); 0: the
    coefficient is fixed."""
    horizon: Annotated[
        int, Interval(ge=1, le=1_000_000_000), WITH_KL, KL_IN_LOSS, OnlyIf("algorithm.kl.target", but=(0,))
    ] = 10_000
    """Samples over which the coefficient changes by a factor of at most about 1.2."""


@dataclass(frozen=True)
class EntropyConfig:
    """Entropy of the predictions in the loss."""

    coef: Annotated[float, Interval(ge=-1_000, le=1_000)] = 0.0
    """Weight of the entropy bonus, in nats; 0: none."""
    top_share: Annotated[float, Interval(gt=0, le=1)] = 1.0
    """Share of the step's tokens, those of highest entropy, that the policy loss is kept for (arXiv 2506.01939)."""


@dataclass(frozen=True)
class AlgorithmConfig:
    """The RL objective: a preset by name, any field of it, or a class of your own."""

    name: str = "reinforce"
    """Preset, such as grpo or dapo, which sets all keys of the objective; or FILE.py:NAME, a class with the methods of
    flowrt.algorithms.algorithm.Algorithm."""
    advantage: Annotated[AdvantageConfig, WITH_TOKEN_LOSS] = field(default_factory=AdvantageConfig)
    """Advantages."""
    loss: Loss = field(default_factory=ReinforceLoss)
    """The policy loss of a token or a sample, and how losses become the loss of a step."""
    plan: PlanConfig = field(default_factory=PlanConfig)
    """Updates of a step."""
    correction: Annotated[CorrectionConfig, WITH_TOKEN_LOSS] = field(default_factory=CorrectionConfig)
    """Correction for stale samples."""
    kl: Annotated[KlConfig, WITH_TOKEN_LOSS] = field(default_factory=KlConfig)
    """The reference model."""
    entropy: Annotated[EntropyConfig, WITH_TOKEN_LOSS] = field(default_factory=EntropyConfig)
    """Entropy."""
    filter: FilterConfig = field(default_factory=FilterConfig)
    """Which groups are trained."""
    staleness_weight: Annotated[
        Literal["uniform", "polynomial"], WITH_TOKEN_LOSS, OnlyIf("max_staleness", but=(0,))
    ] = "uniform"
    """Loss weight of a sample by its staleness s; uniform: 1; polynomial: (1 + s) ** -staleness_power (FedAsync, arXiv
    1903.03934)."""
    staleness_power: Annotated[
        float, Interval(ge=0, le=100), OnlyIf("algorithm.staleness_weight", but=("uniform",))
    ] = 0.5
    """The exponent; 0: uniform."""
    own_reference: bool = False
    """Whether a class of your own needs the reference model; found out when the run starts."""
