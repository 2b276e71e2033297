"""Aggregation of token losses: the weight of each token in the loss sum.

Each aggregation is a sum over tokens of weight x loss, divided at the end of the step by a *global* count (over all
micro-batches and ranks), which its docstring names.

Shapes: T = response tokens of all samples of a micro-batch, flattened; sample_T is the index of the sample
of each token.
"""

import torch
from torch import Tensor


def token_mean_weights_T(sample_T: Tensor) -> Tensor:
    """1 per token; divide by the global number of tokens. DAPO (arXiv 2503.14476, section 3.3)."""
    return torch.ones_like(sample_T, dtype=torch.float32)


def sequence_mean_weights_T(sample_T: Tensor, n_samples: int) -> Tensor:
    """1 / length of the sample; divide by the global number of samples. GRPO (arXiv 2402.03300, equation 3).

    Tokens of short responses have larger weights. All tokens of a sample must be in the call. Raises ValueError if
    `sample_T` is not 1-D.
    """
    if sample_T.dim() != 1:
        raise ValueError(f"sample_T has shape {list(sample_T.shape)}; give one sample index per flattened token")
    return 1.0 / torch.bincount(sample_T, minlength=n_samples).to(torch.float32)[sample_T]


def constant_length_weights_T(sample_T: Tensor, max_length: int) -> Tensor:
    """1 / max_length; divide by the global number of samples. Dr. GRPO (arXiv 2503.20783, section 3.2).

    `max_length` is the response limit in tokens, the same in every step, so that the weight of a token does not depend
    on other responses. Raises ValueError if it is below 1.
    """
    if max_length < 1:
        raise ValueError(f"max_length is {max_length}; give the response limit in tokens")
    return torch.full_like(sample_T, 1.0 / max_length, dtype=torch.float32)
