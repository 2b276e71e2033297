"""Mathematics of RL post-training on tensors.

- Imports torch, and nothing of flowrt outside this package.
- Losses and metrics are sums over tokens, never means: the gradient does not depend on how a step is cut into
  micro-batches or ranks. The step divides by the global count at its end.
- Suffixes of names are shapes (``logprobs_T``); each module lists its own.

The functions that a micro-batch passes through, in order:

    cut_packed -> pack_samples -> (model) -> predicted_logprobs, or fused_logprobs  if the model supports packing
    cut_by_tokens -> pad_samples -> (model) -> selected_logprobs -> Padded.response_T                    otherwise
    group_advantages, truncated_importance -> grpo_token_loss_sum -> backward
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
from flowrt.algorithms.kl import kl_k1_T, kl_k2_T, kl_k3_T
from flowrt.algorithms.logprobs import logits_entropy, predicted_logprobs, prediction_entropy, selected_logprobs
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
from flowrt.algorithms.prefix_sharing import PackedBatch, cut_packed, pack_samples

__all__ = [
    "ClipStatistics",
    "GrpoLoss",
    "PackedBatch",
    "Padded",
    "TokenLossSum",
    "cispo_loss_T",
    "constant_length_weights_T",
    "cut_by_tokens",
    "cut_packed",
    "group_advantages",
    "grpo_token_loss_sum",
    "gspo_loss_T",
    "kl_k1_T",
    "kl_k2_T",
    "kl_k3_T",
    "leave_one_out_advantages",
    "logits_entropy",
    "masked_importance",
    "mismatch_statistics",
    "pack_samples",
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
