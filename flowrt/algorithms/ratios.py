"""Log ratios of the probabilities of two policies, with the clamp and the shape check of all formulas.

Shapes: T = response tokens of all samples, flattened.
"""

import torch
from torch import Tensor

LOG_RATIO_LIMIT = 20.0
"""exp(20) is about 5e8: far above any useful ratio, and its square fits in float32."""


def require_flat(**tensors: Tensor) -> None:
    """Raise ValueError unless all `tensors` are 1-D and equally long.

    Otherwise [T, 1] would broadcast with [T] into a [T, T] loss, without an error.
    """
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if len(set(shapes.values())) != 1 or any(len(shape) != 1 for shape in shapes.values()):
        listed = ", ".join(f"{name} {list(shape)}" for name, shape in shapes.items())
        raise ValueError(f"per-token tensors must be 1-D and equally long, but got {listed}; flatten them alike")


def clamped_log_ratio_T(numerator_T: Tensor, denominator_T: Tensor) -> Tensor:
    """log(numerator / denominator) per token, float32 or wider, clamped to +-LOG_RATIO_LIMIT."""
    require_flat(numerator_T=numerator_T, denominator_T=denominator_T)
    dtype = torch.promote_types(torch.promote_types(numerator_T.dtype, denominator_T.dtype), torch.float32)
    return (numerator_T.to(dtype) - denominator_T.to(dtype)).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
