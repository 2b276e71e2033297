"""Options of the engines, without torch: recipes carry them."""

from dataclasses import dataclass


@dataclass(frozen=True)
class TrainOptions:
    """The optimiser, and how much one forward pass may hold."""

    lr: float = 1e-3
    """Learning rate after the warm-up."""
    warmup_steps: int = 5
    """Optimiser steps over which the learning rate rises linearly."""
    beta1: float = 0.9
    """AdamW's decay of the gradient mean."""
    beta2: float = 0.95
    """AdamW's decay of the squared gradient mean."""
    weight_decay: float = 0.0
    """AdamW's weight decay."""
    max_grad_norm: float = 1.0
    """Gradients are clipped to this norm."""
    forward_tokens: int = 8192
    """Most padded tokens in one forward pass; a larger micro-batch is cut."""
