"""Mathematics of RL post-training on tensors.

- Imports torch, and nothing of flowrt outside this package.
- Losses and metrics are sums over tokens, never means: the gradient does not depend on how a step is cut into
  micro-batches or ranks. The step divides by the global count at its end.
- Suffixes of names are shapes (``logprobs_T``); each module lists its own.

The functions that a micro-batch passes through, in order:

    cut_packed -> pack_samples -> (model) -> predicted_logprobs, or fused_logprobs  if the model supports packing
    cut_by_tokens -> pad_samples -> (model) -> predicted_logprobs, or fused_logprobs  otherwise
    Algorithm.credit -> Algorithm.terms -> backward
"""

from flowrt.algorithms.logprobs import logits_entropy, predicted_logprobs
from flowrt.algorithms.losses import kl_k1_T, kl_k2_T, kl_k3_T
from flowrt.algorithms.packing import PackedBatch, Padded, cut_by_tokens, cut_packed, pack_samples, pad_samples

__all__ = [
    "PackedBatch",
    "Padded",
    "cut_by_tokens",
    "cut_packed",
    "kl_k1_T",
    "kl_k2_T",
    "kl_k3_T",
    "logits_entropy",
    "pack_samples",
    "pad_samples",
    "predicted_logprobs",
]
