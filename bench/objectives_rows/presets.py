"""The objectives under test, by name: published methods with the constants of their papers.

Every test over methods takes its list from here.
"""

from flowrt.algorithms.algorithm import Algorithm, Plan
from flowrt.algorithms.credit import BestOfGroup, GroupAdvantages
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
from flowrt.algorithms.policy_losses import (
    Aspo,
    Cispo,
    CrossEntropy,
    Dppo,
    Gmpo,
    Gspo,
    PolicyLoss,
    Ppo,
    Sapo,
    Topr,
    Vespo,
)

OFF = Correction("off")
ROLLOUT, STEP = Plan("rollout"), Plan("step")
CENTRED = GroupAdvantages(scale="none")
PLAIN = GroupAdvantages(baseline="none", scale="none")


def presets(limit: int) -> dict[str, Algorithm]:
    """All of them, for responses of at most ``limit`` tokens."""
    sequence_mean = Aggregation("sequence_mean")

    def ratio(policy: PolicyLoss, aggregation: Aggregation | None = None) -> Objective:
        return Objective(policy=policy, plan=ROLLOUT, correction=OFF, aggregation=aggregation or Aggregation())

    return {
        "default": Objective(kl=Kl(1e-3)),
        "reinforce": Objective(PLAIN),
        "grpo": Objective(policy=Ppo(), plan=STEP, kl=Kl(0.04), aggregation=sequence_mean),
        "dr_grpo": Objective(CENTRED, Ppo(), STEP, aggregation=Aggregation("constant", limit)),
        "dapo": Objective(policy=Ppo(0.2, 0.28), plan=STEP),
        "rloo": Objective(GroupAdvantages(baseline="leave_one_out", scale="none"), kl=Kl(0.05, "k2")),
        "lite_ppo": Objective(GroupAdvantages(scale="batch_std"), Ppo(), STEP),
        "reinforce_plus_plus": Objective(GroupAdvantages("none", "none", whiten=True, kl_coef=0.01), Ppo(), STEP),
        "reinforce_plus_plus_baseline": Objective(GroupAdvantages(scale="none", whiten=True), Ppo(), STEP),
        "opo": Objective(GroupAdvantages(baseline="length_weighted", scale="none")),
        "max_rl": Objective(GroupAdvantages(scale="group_mean")),
        "ppo_rollout": ratio(Ppo(dual_clip=3.0)),
        "two_sided": ratio(Ppo(0.2, 0.28, delta=4.0)),
        "cispo": ratio(Cispo()),
        "gspo": ratio(Gspo(), sequence_mean),
        "luspo": ratio(Gspo(length_weighted=True), sequence_mean),
        "gmpo": ratio(Gmpo(), sequence_mean),
        "sapo": ratio(Sapo(), sequence_mean),
        "dppo_tv": ratio(Dppo()),
        "dppo_kl": ratio(Dppo("kl", 0.05)),
        "vespo": ratio(Vespo()),
        "topr": ratio(Topr()),
        "topr_token": ratio(Topr(level="token")),
        "aspo": ratio(Aspo()),
        "decoupled": Objective(policy=Ppo(), plan=STEP, correction=Correction("token", "truncate", 0.0, 5.0)),
        "icepop": Objective(correction=Correction("token", "mask", 0.5, 5.0)),
        "sequence_tis": Objective(correction=Correction("sequence")),
        "geometric_mask": Objective(correction=Correction("geometric", "mask", 0.8, 1.25)),
        "off_policy_mask": Objective(rejection=Rejection(negative_kl=0.05)),
        "rejection": Objective(rejection=Rejection(0.9, 1.1)),
        "unbiased_kl": Objective(kl=Kl(0.1, "unbiased")),
        "raft": Objective(BestOfGroup(), CrossEntropy(), correction=OFF),
        "online_dpo": OnlineDpo(),
        "m2po": Objective(policy=Ppo(), plan=ROLLOUT, correction=OFF, second_moment=SecondMoment()),
        "entropy_bonus": Objective(entropy=Entropy(0.01)),
        "top_entropy": Objective(entropy=Entropy(top=0.2)),
        "four_updates": Objective(policy=Ppo(), plan=Plan("step", updates=4)),
        "two_epochs": Objective(policy=Ppo(), plan=Plan("step", updates=2, epochs=2)),
    }
