"""Options of the engines, without torch: recipes carry them."""

from dataclasses import dataclass
from typing import Literal


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


PauseMode = Literal["retract", "in_place", "abort"]
WeightPath = Literal["disk", "tensor", "broadcast"]


@dataclass(frozen=True)
class SglangOptions:
    """The SGLang server of a rollout worker: one that is running, or one that the worker starts."""

    url: str = ""
    """Address of a server that is running (http://HOST:PORT); empty: each rollout worker starts one."""
    python: str = ""
    """Python of the environment that SGLang is installed in; flowrt's own never needs it."""
    device: str = ""
    """Device of a server that is started: cpu, cuda, npu; empty: what SGLang finds."""
    dtype: str = "auto"
    """Type of its weights, as SGLang calls it: auto, float32, bfloat16."""
    arguments: str = ""
    """Further arguments of the server: --rollout.sglang.arguments="--tp 2 --mem-fraction-static 0.7"."""
    weights: WeightPath = "disk"
    """How weights get in: as a checkpoint in shared memory, within requests, or by broadcast over a group."""
    host: str = "127.0.0.1"
    """Address of this worker that the server reaches it at, for weights by broadcast."""
    stage: str = ""
    """Directory for weights by disk that the server sees, too; empty: memory of this worker (same host only)."""
    pause: PauseMode = "retract"
    """Swapped in flight, sequences are computed again, keep the old weights' keys, or are cut and sent again."""
    start_s: float = 300.0
    """Longest start of a server."""
    request_s: float = 600.0
    """Longest time for one sequence, pauses included; a server that takes longer counts as hung."""
    update_s: float = 120.0
    """Longest time for one change of weights."""
    restarts: int = 3
    """How often a server that died, hung or failed to load weights is started (or waited for) again in a run."""
