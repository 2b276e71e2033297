"""Plain mathematics of RL post-training on tensors: imports torch and nothing else of flowrt.

A micro-batch walks through it in this order:

    cut_folded -> fold_samples -> (model) -> predicted_logprobs            where the model can take folded samples
    cut_by_tokens -> pad_samples -> (model) -> selected_logprobs -> Padded.response_T                        else
    group_advantages, truncated_importance -> grpo_token_loss_sum -> backward

and the step ends by dividing the accumulated gradient by the global count.
"""

from flowrt.algorithms.advantages import group_advantages, leave_one_out_advantages
from flowrt.algorithms.aggregation import (
    constant_length_weights_T,
    sequence_mean_weights_T,
    token_mean_weights_T,
)
from flowrt.algorithms.correction import (
    masked_importance,
    mismatch_statistics,
    sequence_truncated_importance,
    truncated_importance,
)
from flowrt.algorithms.folding import Folded, cut_folded, fold_samples
from flowrt.algorithms.kl import kl_k1_T, kl_k2_T, kl_k3_T
from flowrt.algorithms.logprobs import predicted_logprobs, prediction_entropy, selected_logprobs
from flowrt.algorithms.losses import (
    ClipStatistics,
    GrpoLoss,
    TokenLossSum,
    cispo_loss_T,
    grpo_token_loss_sum,
    gspo_loss_T,
    policy_loss_T,
    token_loss_sum,
)
from flowrt.algorithms.packing import Padded, cut_by_tokens, pad_samples

__all__ = [
    "ClipStatistics",
    "Folded",
    "GrpoLoss",
    "Padded",
    "TokenLossSum",
    "cispo_loss_T",
    "constant_length_weights_T",
    "cut_by_tokens",
    "cut_folded",
    "fold_samples",
    "group_advantages",
    "grpo_token_loss_sum",
    "gspo_loss_T",
    "kl_k1_T",
    "kl_k2_T",
    "kl_k3_T",
    "leave_one_out_advantages",
    "masked_importance",
    "mismatch_statistics",
    "pad_samples",
    "policy_loss_T",
    "predicted_logprobs",
    "prediction_entropy",
    "selected_logprobs",
    "sequence_mean_weights_T",
    "sequence_truncated_importance",
    "token_loss_sum",
    "token_mean_weights_T",
    "truncated_importance",
]
