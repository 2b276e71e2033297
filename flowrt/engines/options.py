"""Options of the engines, without torch: recipes carry them."""

from dataclasses import dataclass
from typing import Literal

Dtype = Literal["float32", "bfloat16", "float64"]


@dataclass(frozen=True)
class TrainOptions:
    """The optimiser, and how much one forward pass may hold."""

    lr: float = 1e-3
    """Learning rate after the warm-up."""
    warmup_steps: int = 5
    """Optimiser steps over which the learning rate rises linearly."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """What the learning rate does after the warm-up: stay, or fall to min_lr."""
    decay_steps: int = 0
    """Optimiser steps over which it falls; 0: all that the run has left after the warm-up."""
    min_lr: float = 0.0
    """Where the learning rate ends when it falls."""
    beta1: float = 0.9
    """AdamW's decay of the gradient mean."""
    beta2: float = 0.95
    """AdamW's decay of the squared gradient mean."""
    weight_decay: float = 0.0
    """AdamW's weight decay."""
    max_grad_norm: float = 1.0
    """Gradients are clipped to this norm."""
    forward_tokens: int = 8192
    """Most tokens in one forward pass; a larger micro-batch is cut."""
    share_prompts: bool = True
    """Compute a prompt once for all samples of a pass that have it, where the model allows it."""
    compile: bool = False
    """Compile the decoder layers with torch.compile: passes are faster after a first one of up to some minutes."""
    final_dtype: Literal["source", "float32", "bfloat16", "float64"] = "source"
    """Type of the trained model that is written; source: that of the model that training began with."""


@dataclass(frozen=True)
class FsdpOptions:
    """The FSDP2 engine: parameters, gradients and optimiser state in shards over the ranks."""

    gather: Literal["step", "pass"] = "step"
    """Gather parameters once a step, so that ranks work at their own pace, or layer by layer in each forward pass,
    in lock step, for models that do not fit otherwise."""
    dtype: Dtype = "float32"
    """Type of the parameters in forward passes and when they are published; the optimiser's own are float32
    (float64 is for comparisons: then everything is)."""
    recompute: bool = False
    """Keep only each layer's input and compute the rest of its activations again in the backward pass."""
    device: str = "auto"
    """Where to train: cpu, cuda, npu, or auto (whichever accelerator is there, else cpu)."""
    file_gb: float = 5.0
    """Largest file of the model that is written at the end; a larger model is cut into several."""


@dataclass(frozen=True)
class LoraOptions:
    """Low-rank adapters in place of training all weights; needs flowrt[lora]."""

    rank: int = 0
    """Rank of the adapters; 0: none, all weights are trained."""
    alpha: float = 16.0
    """What an adapter adds is scaled by alpha / rank."""
    targets: str = "all-linear"
    """Names of the layers that get one (q_proj,v_proj), or all-linear."""
    publish: Literal["adapters", "merged"] = "adapters"
    """What rollout workers receive: the adapters, which they then have too, or whole weights with these added."""


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
