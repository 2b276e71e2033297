"""Engine descriptors: checks, devices, memory and constructor of an engine, before it is built.

- Descriptors import no torch at module level: the controller, the launcher and `flowrt doctor` read them too.
- An engine's descriptor is in the engine's own package; `flowrt.engines.registry` is the list of all.
- No other module compares the name of an engine.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from flowrt.engines.options import (
    MAX_SUPPORT,
    Dtype,
    LoraOptions,
    RolloutSettings,
    ServerOptions,
    TrainerSettings,
    Truncation,
)

if TYPE_CHECKING:
    from flowrt.algorithms.algorithm import Algorithm
    from flowrt.engines.base import RolloutEngine, TrainEngine
    from flowrt.transport.devices import Device

FLOAT_BYTES = 4
HALF_BYTES = 2
ADAM_BYTES = 8
"""Both moments of AdamW, in float32."""
DTYPE_BYTES: dict[Dtype, int] = {"float64": 8, "float32": FLOAT_BYTES, "bfloat16": HALF_BYTES}
SCORE_BYTES = 12
"""Of a score in a pass without a backward pass, where attention is not fused: before and after softmax, and a mask."""
WHOLE_LOGITS = 1 << 24
"""Elements of a pass's logits up to which all logits are computed at once; above it, the LM head is fused with the
log-probabilities (`flowrt.algorithms.lm_head`)."""
ALLOCATOR_OVERHEAD = 1.1
"""Memory of activations over the sum of their sizes."""
ATTENTION_COPIES = 2
"""Of queries, keys and values: what attention keeps of each token of whole samples, which packed ones are copied to."""
MAX_EXPANSION = 2
"""Tokens of the samples of a pass before packing over its budget, at most (`flowrt.algorithms.packing.cut_packed`)."""
PACKED_LAYERS = frozenset({"full_attention", "sliding_attention"})
MAX_PACKED_WINDOW = 1024
"""Types of layers, and the largest sliding window (tokens), of models whose samples are packed: the check of
`flowrt.engines.training.forward.enable_packing` needs a sample longer than the window."""
FUSED_HEAD_BYTES = 15 * 10**7
"""Memory of the fused head beyond hidden states, weights and their gradients (bench/objectives_rows/lm_head.py)."""
ASSUMED_SUPPORT = 64
"""Mean number of tokens of a support that top-p or min-p alone is assumed to have."""
FUSED_SCORING_BYTES = 7 * 10**7
"""The same without a backward pass: one tensor of WHOLE_LOGITS elements."""
DELTA_SNAPSHOTS = 2
"""Versions that a trainer holds: the newest and the previous one, between which deltas are computed."""
STAGED_VERSIONS = 2
"""Versions that a rollout worker holds besides its model: the arriving one, and the base of its delta."""


def support_tokens(truncation: Truncation) -> int:
    """Upper bound of the tokens of a support: top-k; without one, an assumed number for top-p and min-p."""
    if truncation.top_k < MAX_SUPPORT:
        return truncation.top_k or (ASSUMED_SUPPORT if truncation.is_active else 0)
    return ASSUMED_SUPPORT if truncation != Truncation(truncation.top_k) else truncation.top_k


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptActivations:
    """What a layer keeps of one token for the backward pass, as multiples of its sizes.

    Counted with torch's hooks for saved tensors (tests/unit/launcher/test_model_shapes.py); the defaults are those
    of Llama: two RMSNorms, queries, keys, values and the output of attention, and a gated feed-forward part.

    Attributes:
        norms: of the hidden size, by norms before and after attention and feed-forward.
        attention: of the queries and of the keys.
        feed_forward: of the intermediate size.
        narrow_norms: in addition, in a dtype below float32, in which norms keep float32 copies.
        narrow_attention: the same of norms of queries and keys.
        score_bytes: bytes of a score (of one head, for one pair of tokens), where attention is not fused; else 0.
    """

    norms: int = 6
    attention: int = 2
    feed_forward: int = 4
    narrow_norms: int = 2
    narrow_attention: int = 0
    score_bytes: int = 0

    def elements(self, shape: "ModelShape", dtype: Dtype) -> int:
        """Elements of one token in one layer."""
        is_narrow = DTYPE_BYTES[dtype] < FLOAT_BYTES
        norms = self.norms + self.narrow_norms * is_narrow
        attention = self.attention + self.narrow_attention * is_narrow
        of_attention = attention * shape.key_query_size
        return norms * shape.hidden_size + of_attention + self.feed_forward * shape.intermediate_size


@dataclass(frozen=True, slots=True, kw_only=True)
class PassSize:
    """Tokens of a forward pass.

    Attributes:
        sample: of the longest sample.
        packed: computed by the layers: of prompts and responses, with the prompt of a group once if it is shared.
        attended: of the whole samples, computed by attention.
        predicted: of the responses, for which logits are computed.
    """

    sample: int
    packed: int
    attended: int
    predicted: int


def largest_pass(*, prompt: int, response: int, group: int, samples: int, budget: int, is_shared: bool) -> PassSize:
    """The largest pass of the trainer or the reference, over samples of this length.

    Args:
        prompt: length of a prompt.
        response: length of a response.
        group: samples of a prompt.
        samples: number of all samples.
        budget: ``trainer.forward_tokens``; a longer sample has a pass of its own.
        is_shared: whether samples are packed with the prompt of a group once.
    """
    longest = prompt + response
    if not is_shared:
        group = 1
    packed_group, attended_group = prompt + group * response, group * longest
    most = max(budget, longest)
    packed = min(
        most,
        MAX_EXPANSION * most * packed_group // attended_group,
        math.ceil(samples / group) * prompt + samples * response,
    )
    packed = max(packed, longest)
    attended = min(packed * attended_group // packed_group, samples * longest)
    return PassSize(
        sample=longest,
        packed=packed,
        attended=max(attended, packed),
        predicted=packed * group * response // packed_group,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The numbers of a model that memory depends on."""

    parameters: int
    layers: int
    hidden_size: int
    kv_size: int
    """Elements of the keys (or values) of one token in one layer."""
    vocab_size: int
    max_length: int
    intermediate_size: int
    """Elements that the feed-forward part of a layer computes of one token; of a mixture, by all experts it uses."""
    query_size: int = 0
    """Elements of the queries of one token in one layer; 0: the hidden size."""
    heads: int = 0
    """Attention heads, if ``kept`` has the size of their scores."""
    cache_layers: int = 0
    """Number of layers with keys and values; 0: all."""
    shares_prompts: bool = True
    """Whether samples of this architecture are packed (`flowrt.engines.training.forward.enable_packing`)."""
    kept: "KeptActivations" = field(default_factory=lambda: KeptActivations())

    @property
    def cache_token_elements(self) -> int:
        """Elements of the keys and values of one token in all layers."""
        return (self.cache_layers or self.layers) * 2 * self.kv_size

    def kept_bytes(self, size: PassSize, dtype: Dtype, recompute: bool = False) -> int:
        """Activations that a training pass keeps for its backward pass, and its logits, in bytes.

        One layer is counted twice: the backward pass has the gradients of its activations.
        """
        elements = self.kept.elements(self, dtype) * size.packed
        if self.shares_prompts:
            # Attention keeps its inputs and its output of whole samples, and the next product the packed output.
            attention = ATTENTION_COPIES * self.key_query_size
            elements += size.attended * attention - size.packed * (attention - self._query_size)
        layer = int(ALLOCATOR_OVERHEAD * elements)
        scores = int(ALLOCATOR_OVERHEAD * self.kept.score_bytes * self.heads * size.attended * size.sample)
        of_layer = DTYPE_BYTES[dtype] * layer + scores
        inputs = DTYPE_BYTES[dtype] * size.packed * self.layers * self.hidden_size if recompute else 0
        layers = 2 if recompute else self.layers + 1
        return inputs + layers * of_layer + self._head_bytes(size.predicted, FUSED_HEAD_BYTES)

    def computed_bytes(self, dtype: Dtype) -> int:
        """Activations of one token in a pass without a backward pass, in bytes: those of one layer at a time."""
        elements = 4 * self.hidden_size + 2 * self.key_query_size + 3 * self.intermediate_size
        return DTYPE_BYTES[dtype] * elements

    @property
    def key_query_size(self) -> int:
        """Elements of the queries and the keys of one token in one layer."""
        return self._query_size + self.kv_size

    @property
    def _query_size(self) -> int:
        return self.query_size or self.hidden_size

    @property
    def weight_bytes(self) -> int:
        """Size of the weights in float32, in bytes."""
        return self.parameters * FLOAT_BYTES

    @property
    def logits_bytes(self) -> int:
        """Size of one token's logits and their gradient (or softmax) in float32, in bytes."""
        return 2 * self.vocab_size * FLOAT_BYTES

    def _head_bytes(self, tokens: int, fused: int) -> int:
        """Memory in bytes of the LM head and the log-probabilities of this number of tokens; ``fused``: if it is."""
        return tokens * self.logits_bytes if tokens * self.vocab_size <= WHOLE_LOGITS else fused

    def scoring_bytes(self, size: PassSize, dtype: Dtype) -> int:
        """Memory in bytes of a pass without a backward pass, with log-probabilities."""
        attention = size.attended * ATTENTION_COPIES * self.key_query_size
        scores = SCORE_BYTES * self.heads * size.attended * size.sample if self.kept.score_bytes else 0
        activations = size.packed * self.computed_bytes(dtype) + DTYPE_BYTES[dtype] * attention + scores
        return activations + self._head_bytes(size.predicted, FUSED_SCORING_BYTES)

    def adapter_parameters(self, lora: LoraOptions) -> int:
        """Upper bound of the number of adapter parameters: one adapter at each linear layer; 0 at rank 0."""
        hidden, wide = self.hidden_size, self.intermediate_size
        attention = 2 * (hidden + hidden) + 2 * (hidden + self.kv_size)
        return lora.rank * self.layers * (attention + 3 * (hidden + wide))


@dataclass(frozen=True, slots=True)
class PublishedWeights:
    """The contents of a version: all weights, or only the adapters that ``lora`` describes."""

    dtype: Dtype = "float32"
    lora: LoraOptions | None = None

    def parameters(self, shape: ModelShape) -> int:
        """Number of parameters of a version."""
        return shape.adapter_parameters(self.lora) if self.lora else shape.parameters

    def size_bytes(self, shape: ModelShape) -> int:
        """Size of a version in bytes."""
        return DTYPE_BYTES[self.dtype] * self.parameters(shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerMemory:
    """Estimated memory of a training rank at its peak, in bytes."""

    model: int
    """Parameters, gradients and optimiser state, on the rank's device."""
    passes: int
    """Activations and logits of one pass, on the rank's device."""
    first_rank: int
    """Additional host memory of rank 0: the model while it is read or written, or the published versions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutMemory:
    """Estimated memory of a rollout worker at its peak, in bytes, without the memory of an idle process."""

    host: int
    device: int = 0
    """On `RolloutEngineDescriptor.device`; in host memory if that is the CPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerSetup:
    """The arguments from which a training engine is built.

    Attributes:
        model: directory of the initial model.
        device: of this rank, as `TrainEngineDescriptor.device` requested.
        settings: the trainer's configuration, with the number of decay steps filled in.
        algorithm: the objective.
        temperature: sampling temperature, at which log-probabilities are computed.
        seed: seed of the run.
    """

    model: Path
    device: "Device"
    settings: TrainerSettings
    algorithm: "Algorithm"
    temperature: float
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSetup:
    """The arguments from which a rollout engine is built.

    Attributes:
        model: directory of the initial model and its tokenizer.
        settings: the rollout workers' configuration; a device that it leaves open is that of the run.
        published: the contents of the versions that the engine has to load.
        deterministic: fix batch shapes, so that results do not depend on which sequences run together.
        threads: number of CPU threads of a process that the engine starts.
        log_path: log file of a process that the engine starts.
        chat_template: the templates whose end of turn ends a sequence, as in `stop_token_ids`.
        worker: name of the worker.
    """

    model: Path
    settings: RolloutSettings
    published: PublishedWeights
    deterministic: bool
    threads: int
    log_path: Path
    chat_template: str | Sequence[str] = ""
    worker: str = "rollout-0"


class TrainEngineDescriptor(ABC):
    """A training engine. The defaults describe one that holds the whole model in float32, on the CPU."""

    needs_process_group = False
    """Whether a single rank needs an initialised process group too."""
    applies_supports = False
    """Whether `TrainingBatch.supports` is applied: truncated sampling (top-k, top-p, min-p) needs it."""

    def mistakes(self, trainer: TrainerSettings) -> Iterable[str]:  # noqa: ARG002 (part of the interface)
        """Sentences on options that the engine does not support."""
        return ()

    def server_options(self, rollout: RolloutSettings) -> ServerOptions:  # noqa: ARG002
        """The options of the server of an engine that has one."""
        return ServerOptions()

    def check_packages(self, trainer: TrainerSettings) -> None:  # noqa: B027
        """Raise ConfigError if an optional package that these options need is not installed here."""

    def device(self, trainer: TrainerSettings) -> str:  # noqa: ARG002 (part of the interface)
        """The device of each rank: cpu, cuda, npu, or auto (an accelerator if present)."""
        return "cpu"

    def is_lock_step(self, trainer: TrainerSettings) -> bool:  # noqa: ARG002
        """Whether the passes of a rank need the other ranks."""
        return False

    def published(self, trainer: TrainerSettings) -> PublishedWeights:  # noqa: ARG002
        """The contents of a published version."""
        return PublishedWeights()

    def forward_dtype(self, trainer: TrainerSettings) -> Dtype:  # noqa: ARG002
        """Dtype of the parameters in forward passes."""
        return "float32"

    def trained_parameters(self, trainer: TrainerSettings, shape: ModelShape) -> int:  # noqa: ARG002
        """Number of parameters that the optimiser updates, and that a checkpoint contains."""
        return shape.parameters

    def memory(self, trainer: TrainerSettings, shape: ModelShape, size: PassSize) -> TrainerMemory:
        """Estimated memory of a rank; ``size``: of its largest pass."""
        passes = shape.kept_bytes(size, "float32")
        return TrainerMemory(
            model=shape.parameters * (3 * FLOAT_BYTES + ADAM_BYTES),  # a step concatenates the gradients
            passes=max(passes - FLOAT_BYTES * shape.parameters, 0),  # and has no activations then
            first_rank=DELTA_SNAPSHOTS * self.published(trainer).size_bytes(shape),
        )

    @abstractmethod
    def build(self, setup: TrainerSetup) -> "TrainEngine":
        """Construct the engine. Raises EngineError if the model or the device is not supported."""


class RolloutEngineDescriptor(ABC):
    """A rollout engine. The defaults describe one that generates inside the worker, on the CPU."""

    is_in_worker = True
    """Whether the engine computes inside the worker process, with its installation of torch."""
    limits_prompts = False
    """Whether the engine ends the response to a prompt at `Prompt.max_new_tokens` (``eval.max_new_tokens``)."""

    def mistakes(
        self,
        rollout: RolloutSettings,  # noqa: ARG002
        published: PublishedWeights,  # noqa: ARG002
        *,
        deterministic: bool,  # noqa: ARG002
    ) -> Iterable[str]:
        """Sentences on options that the engine or its device does not support, and on weights that it cannot load.

        ``rollout`` has the run's device where it names none.
        """
        return ()

    def server_options(self, rollout: RolloutSettings) -> ServerOptions:  # noqa: ARG002
        """The options of the server of an engine that has one."""
        return ServerOptions()

    def check_packages(self, rollout: RolloutSettings) -> None:  # noqa: B027
        """Raise ConfigError if what the engine starts is not installed on this host."""

    def device(self, rollout: RolloutSettings) -> str:  # noqa: ARG002
        """The device of `RolloutMemory.device`: cpu, cuda, npu, or auto (an accelerator if present)."""
        return "cpu"

    def devices(self, rollout: RolloutSettings) -> int:  # noqa: ARG002
        """Number of accelerators over which the engine of one worker is split."""
        return 1

    def memory_share(self, rollout: RolloutSettings) -> float | None:  # noqa: ARG002
        """The share of the memory of its devices that these options give the engine; None: they do not say."""
        return None

    @abstractmethod
    def memory(
        self, rollout: RolloutSettings, shape: ModelShape, published: PublishedWeights, cache_elements: int
    ) -> RolloutMemory:
        """Estimated memory of a worker.

        Args:
            rollout: the configuration of the worker.
            shape: the numbers of the model.
            published: the contents of an arriving version.
            cache_elements: number of elements of a KV cache for the maximum number of running sequences, each of the
                maximum length.
        """

    @abstractmethod
    def build(self, setup: RolloutSetup) -> "RolloutEngine":
        """Construct the engine. Raises EngineError if the model or an option is not supported."""
