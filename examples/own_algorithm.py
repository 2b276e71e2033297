"""An objective of your own: REINFORCE (Williams, 1992) on group advantages, with a penalty on long responses.

    flowrt run --algorithm examples/own_algorithm.py:ShortReinforce

Each trainer rank constructs the class without arguments; flowrt/algorithms/algorithm.py defines its interface.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from flowrt.algorithms.advantages import GroupAdvantages
from flowrt.algorithms.algorithm import Credit, Groups, Needs, Plan, StepTokens, Term, Tokens


@dataclass(frozen=True)
class ShortReinforce:
    penalty: float = 0.01
    needs = Needs()
    plan = Plan()

    def credit(self, groups: Groups) -> Credit:
        credit = GroupAdvantages()(groups)
        return Credit(credit.advantages_N - self.penalty * groups.lengths_N, credit.trained_N)

    def measure(self, step: StepTokens) -> dict[str, float]:  # noqa: ARG002
        return {}

    def terms(self, tokens: Tokens) -> Sequence[Term]:
        weights_T = (tokens.anchor_T - tokens.rollout_T).exp().clamp(max=2.0) * tokens.valid_T
        loss_T = -weights_T.detach() * tokens.advantages_T * tokens.logprobs_T
        return [Term("policy", loss_T.sum(), "token", {"weights": weights_T.detach().double().sum()})]
