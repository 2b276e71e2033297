"""An objective of your own: REINFORCE on advantages of a group, with a penalty on long responses.

    flowrt run --algorithm examples/own_algorithm.py:ShortReinforce

The class is made without arguments, in each trainer rank; see flowrt/algorithms/algorithm.py for what it may need.
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
