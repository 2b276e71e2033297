"""The learning rate of each optimiser step."""

import math

from flowrt.engines.options import TrainOptions


def learning_rate(options: TrainOptions, step: int) -> float:
    """Of the optimiser's ``step`` (from 0): a linear warm-up, then constant, or falling to ``min_lr`` and staying."""
    warmup = max(options.warmup_steps, 1)
    if step + 1 < warmup:
        return options.lr * (step + 1) / warmup
    if options.schedule == "constant" or not options.decay_steps:
        return options.lr
    done = min(1.0, (step + 1 - warmup) / options.decay_steps)
    left = 1.0 - done if options.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return options.min_lr + (options.lr - options.min_lr) * left
