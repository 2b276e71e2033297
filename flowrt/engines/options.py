"""Options of the engines. Imports no torch: recipes contain them."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from annotated_types import Interval

from flowrt.runtime.bounds import Seconds
from flowrt.runtime.conditions import OnlyIf

LearningRate = Annotated[float, Interval(ge=0, le=10)]
StepCount = Annotated[int, Interval(ge=0, le=10_000_000)]
RestartCount = Annotated[int, Interval(ge=0, le=10_000)]
Dtype = Literal["float32", "bfloat16", "float64"]
Device = Literal["", "auto", "cpu", "cuda", "npu"]
DtypeOrAuto = Literal["auto", "float32", "bfloat16", "float64"]
STARTED = OnlyIf(".url", have=((),))
MAX_SUPPORT = 4_096
"""Maximum number of tokens that are kept of those that could be drawn, for the trainer."""
MIN_TEMPERATURE = 0.01
"""With a lower one, rounding of the logits decides which token is drawn."""
CUT_CHARACTER = "\ufffd"
"""What a tokenizer decodes the bytes of an incomplete character to."""


@dataclass(frozen=True, slots=True)
class Truncation:
    """The tokens that can be drawn: those within all three limits, which are applied to the whole distribution."""

    top_k: int = 0
    """The k most likely tokens; 0: all."""
    top_p: float = 1.0
    """The fewest most likely tokens whose probabilities sum to at least this."""
    min_p: float = 0.0
    """Tokens of at least this fraction of the highest probability."""

    @property
    def is_active(self) -> bool:
        """Whether any token may be excluded."""
        return self != Truncation()


@dataclass(frozen=True, slots=True)
class SamplingOptions:
    """How the tokens of a sequence are drawn."""

    temperature: float
    """Above 0."""
    truncation: Truncation = field(default_factory=Truncation)
    """Which tokens can be drawn. The support is not recorded: such sequences are not trained."""


@dataclass(frozen=True)
class TrainOptions:
    """Optimiser and forward-pass options of a training engine."""

    lr: LearningRate = 1e-3
    """Learning rate after the warm-up."""
    warmup_steps: StepCount = 5
    """Optimiser steps over which the learning rate rises linearly."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate after the warm-up: constant, or decaying to min_lr."""
    decay_steps: Annotated[StepCount, OnlyIf("trainer.schedule", but=("constant",))] = 0
    """Optimiser steps of the decay; 0: all steps after the warm-up, so that one more step would have min_lr."""
    min_lr: Annotated[LearningRate, OnlyIf("trainer.schedule", but=("constant",))] = 0.0
    """Learning rate after the last step of the decay."""
    beta1: Annotated[float, Interval(ge=0, lt=1)] = 0.9
    """AdamW's decay of the gradient mean."""
    beta2: Annotated[float, Interval(ge=0, lt=1)] = 0.95
    """AdamW's decay of the squared gradient mean."""
    weight_decay: Annotated[float, Interval(ge=0, le=1_000)] = 0.0
    """AdamW's weight decay."""
    max_grad_norm: Annotated[float, Interval(gt=0, le=1_000_000_000)] = 1.0
    """Gradients are clipped to this norm."""
    forward_tokens: Annotated[int, Interval(gt=0, le=1_000_000_000)] = 8192
    """Token budget of a forward pass; larger micro-batches are split."""
    share_prompts: bool = True
    """Compute each distinct prompt once per pass (shared-prefix packing), if the model supports it."""
    compile: bool = False
    """Compile the decoder layers with torch.compile; the first pass may take minutes."""
    dropout: bool = False
    """Train with the dropout rates and router noise of the model's configuration, which the rollout never has: the two
    then disagree, and trainer.max_initial_mismatch may end the run."""
    max_initial_mismatch: Annotated[float, Interval(ge=0, le=1_000_000)] = 0.02
    """KL divergence (k3, nats per token) between rollout and trainer at equal weights above which the run ends before
    its first update; a hundredth of it where both compute in float32 or float64; 0: no check."""
    final_dtype: Literal["source", "float32", "bfloat16", "float64"] = "source"
    """Dtype of the exported model; source: that of the initial model."""
    file_gb: Annotated[float, Interval(gt=0, le=100_000)] = 5.0
    """Maximum file size (GB) of the exported model; larger models are split."""


@dataclass(frozen=True)
class FsdpOptions:
    """Options of the FSDP2 engine, which shards parameters, gradients and optimiser state over the ranks."""

    gather: Literal["step", "pass"] = "step"
    """Gather parameters once a step (step: ranks work at their own pace) or layer by layer in each forward pass (pass:
    in lock step, for models that do not fit otherwise)."""
    dtype: Dtype = "float32"
    """Dtype of parameters in forward passes and when published; the optimiser's are float32, or float64 if this is
    float64 (for comparisons)."""
    recompute: bool = False
    """Activation checkpointing: keep only each layer's input, recompute the rest in the backward pass."""
    device: Device = ""
    """Training device; auto: an accelerator if present; empty: that of the run, else auto."""


@dataclass(frozen=True)
class LoraOptions:
    """Low-rank adapters (LoRA) instead of full training; needs flowrt[lora]."""

    rank: Annotated[int, Interval(ge=0, le=65_536)] = 0
    """Rank of the adapters; 0: no adapters, all weights are trained."""
    alpha: Annotated[float, Interval(ge=-1_000_000, le=1_000_000), OnlyIf("trainer.lora.rank", but=(0,))] = 16.0
    """Adapter outputs are scaled by alpha / rank."""
    targets: Annotated[str, OnlyIf("trainer.lora.rank", but=(0,))] = "all-linear"
    """Adapted layers: names (q_proj,v_proj), a regular expression over whole paths, or all-linear."""
    publish: Annotated[Literal["adapters", "merged"], OnlyIf("trainer.lora.rank", but=(0,))] = "adapters"
    """What rollout workers receive: the adapters alone, or full weights with the adapters merged."""


@dataclass(frozen=True)
class TrainerSettings(TrainOptions):
    """The part of the trainer's configuration that descriptors of training engines read."""

    ranks: Annotated[int, Interval(gt=0, le=65_536)] = 1
    """Data-parallel trainer processes; two or more are started by torchrun."""
    device: Annotated[Device, OnlyIf("trainer.engine", have=("torch",), instead="trainer.fsdp.device")] = ""
    """Engine torch: device of each rank; auto: an accelerator if present; empty: that of the run, else cpu."""
    dtype: Annotated[Dtype, OnlyIf("trainer.engine", have=("torch",), instead="trainer.fsdp.dtype")] = "float32"
    """Engine torch: dtype of parameters in forward and backward passes and when published; the optimiser's parameters
    and accumulated gradients are float32, or float64 if this is float64."""
    fsdp: Annotated[FsdpOptions, OnlyIf("trainer.engine", have=("fsdp",))] = field(default_factory=FsdpOptions)
    """The fsdp engine."""
    lora: Annotated[LoraOptions, OnlyIf("trainer.engine", have=("fsdp",))] = field(default_factory=LoraOptions)
    """LoRA: train low-rank adapters instead of all weights."""


PauseMode = Literal["retract", "in_place", "abort"]
WeightPath = Literal["disk", "tensor", "broadcast"]


@dataclass(frozen=True)
class ServerOptions:
    """Options of a rollout worker's server: a running one, or one that the worker starts."""

    url: tuple[str, ...] = ()
    """Addresses of running servers (http://HOST:PORT; for vLLM also unix:PATH), one for each rollout worker, in the
    order of the workers; empty: each rollout worker starts one."""
    python: str = ""
    """Python of the environment with the server; flowrt's own environment does not need it."""
    device: str = ""
    """Device of a started server: cpu, cuda, npu; empty: that of the run, else the server's choice."""
    dtype: Annotated[str, STARTED] = "auto"
    """Dtype of a started server's weights, in the server's terms: auto, float32, bfloat16."""
    arguments: Annotated[str, STARTED] = ""
    """Further arguments of a started server, in one text: --rollout.sglang.arguments="--tp 2"."""
    stage: str = ""
    """Directory shared with the server, for weights by disk; empty: memory of this worker (same host only)."""
    pause: PauseMode = "retract"
    """Running sequences on an in-flight update: recompute their KV cache, keep it, or abort and send them again."""
    start_s: Seconds = 300.0
    """Time limit (seconds) for a server to become ready; 20 s longer for each GB of weights."""
    request_s: Seconds = 600.0
    """A server that gives no sign of life for this long (seconds) while it generates counts as hung; without a way to
    ask for one, the time limit of one sequence."""
    update_s: Seconds = 120.0
    """Time limit (seconds) of one weight update; 20 s longer for each GB of weights."""
    max_server_restarts: RestartCount = 3
    """Maximum restarts of a failed server (died, hung, or could not load weights) in a run."""


@dataclass(frozen=True)
class SglangOptions(ServerOptions):
    """Options of a rollout worker's SGLang server."""

    weights: WeightPath = "disk"
    """How weights are sent: as a checkpoint in shared memory, within requests, or by broadcast over a group."""
    host: Annotated[str, OnlyIf(".weights", have=("broadcast",))] = ""
    """Address of the worker that its server can reach, for weights by broadcast; empty: the one from which the worker
    reaches the server."""
    stage: Annotated[str, OnlyIf(".weights", have=("disk",))] = ""
    """Directory shared with the server, for weights by disk; empty: memory of this worker (same host only)."""


@dataclass(frozen=True)
class VllmOptions(ServerOptions):
    """Options of a rollout worker's vLLM server."""


@dataclass(frozen=True)
class RolloutSettings:
    """The part of the rollout workers' configuration that descriptors of rollout engines read."""

    workers: Annotated[int, Interval(gt=0, le=10_000)] = 2
    """Number of rollout workers."""
    max_running_requests: Annotated[int, Interval(gt=0, le=65_536)] = 64
    """Sequences that a worker generates concurrently."""
    max_new_tokens: Annotated[int, Interval(gt=0, le=16_777_216)] = 16
    """Maximum response length, in tokens."""
    temperature: Annotated[float, Interval(ge=MIN_TEMPERATURE, le=100)] = 1.0
    """Sampling temperature."""
    top_k: Annotated[int, Interval(ge=0, le=MAX_SUPPORT)] = 0
    """Sample from this many most likely tokens, of which the trainer's probabilities are then too; 0: from all."""
    top_p: Annotated[float, Interval(gt=0, le=1)] = 1.0
    """Sample from the fewest most likely tokens whose probabilities sum to this, of at most top_k, or without it 4,096;
    1: from all."""
    min_p: Annotated[float, Interval(ge=0, lt=1)] = 0.0
    """Sample from the tokens of at least this fraction of the highest probability, of at most top_k, or without it
    4,096; 0: from all."""
    stop: tuple[str, ...] = ()
    """Stop strings: a response ends with the token that completes one, or with a stop token of the checkpoint; the
    reward gets the text before it."""
    weight_update: Literal["between_sequences", "in_flight"] = "between_sequences"
    """When a worker activates new weights: between sequences, or in flight, between two tokens of running sequences."""
    recompute_kv_on_update: Annotated[
        bool,
        OnlyIf("rollout.engine", but=("sglang",), instead="rollout.sglang.pause"),
        OnlyIf("rollout.engine", but=("vllm",), instead="rollout.vllm.pause"),
        OnlyIf("rollout.weight_update", have=("in_flight",)),
    ] = True
    """On an in-flight update, recompute the KV cache with the new weights, in the background; if false, keep the old
    KV cache."""
    compile: Annotated[
        bool,
        OnlyIf("rollout.engine", but=("sglang",), instead="rollout.sglang.arguments"),
        OnlyIf("rollout.engine", but=("vllm",), instead="rollout.vllm.arguments"),
    ] = False
    """Compile decoding (torch.compile on a CPU, CUDA graphs on a GPU): faster steps, but up to a minute more at
    startup."""
    device: Annotated[
        Device,
        OnlyIf("rollout.engine", but=("sglang",), instead="rollout.sglang.device"),
        OnlyIf("rollout.engine", but=("vllm",), instead="rollout.vllm.device"),
    ] = ""
    """Engine torch: device of each worker; auto: an accelerator if present; empty: that of the run, else cpu."""
    dtype: Annotated[
        DtypeOrAuto,
        OnlyIf("rollout.engine", but=("sglang",), instead="rollout.sglang.dtype"),
        OnlyIf("rollout.engine", but=("vllm",), instead="rollout.vllm.dtype"),
    ] = "auto"
    """Engine torch: dtype of the model and its KV cache; auto: that of the weights that the trainer publishes."""
    sglang: Annotated[SglangOptions, OnlyIf("rollout.engine", have=("sglang",))] = field(default_factory=SglangOptions)
    """The SGLang server."""
    vllm: Annotated[VllmOptions, OnlyIf("rollout.engine", have=("vllm",))] = field(default_factory=VllmOptions)
    """The vLLM server."""

    @property
    def truncation(self) -> Truncation:
        """The support of sampling: top-k, top-p and min-p. A support has at most `MAX_SUPPORT` tokens."""
        is_bounded = self.top_k or (self.top_p == 1 and self.min_p == 0)
        return Truncation(self.top_k if is_bounded else MAX_SUPPORT, self.top_p, self.min_p)
