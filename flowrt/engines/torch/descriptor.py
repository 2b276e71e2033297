"""The torch engines: the whole model in each process, on any device."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from flowrt.engines.descriptor import (
    DTYPE_BYTES,
    FLOAT_BYTES,
    STAGED_VERSIONS,
    ModelShape,
    PassSize,
    PublishedWeights,
    RolloutEngineDescriptor,
    RolloutMemory,
    RolloutSetup,
    TrainEngineDescriptor,
    TrainerMemory,
    TrainerSetup,
    support_tokens,
)
from flowrt.engines.options import Dtype, RolloutSettings, TrainerSettings

if TYPE_CHECKING:
    from flowrt.engines.torch.rollout import TorchRollout
    from flowrt.engines.torch.trainer import TorchTrainer

TOKEN_BYTES = 4
PREFILL_TOKENS = 2048
"""Largest number of tokens, padding included, of a forward pass of a prefill."""
SCORE_ELEMENTS = 1 << 24
"""Largest number of elements of such a pass's attention mask, and of its scores where attention computes them whole."""
SEQUENCE_TOKEN_BYTES = 12
"""A token of a running sequence: its id, its log-probability and its random number."""
DRAWN_ELEMENTS = 1 << 24
"""Largest number of log-probabilities that are computed at once when tokens are drawn."""
DRAWING_TENSORS = 3
"""Tensors of that size."""


class TorchTraining(TrainEngineDescriptor):
    """Each rank holds the whole model with its gradients and optimiser state, in float32, or float64 for dtype float64.

    With dtype bfloat16 it holds a bfloat16 copy of the parameters in addition.
    """

    applies_supports = True

    def device(self, trainer: TrainerSettings) -> str:
        return trainer.device or "cpu"

    def published(self, trainer: TrainerSettings) -> PublishedWeights:
        return PublishedWeights(trainer.dtype)

    def forward_dtype(self, trainer: TrainerSettings) -> Dtype:
        return trainer.dtype

    def memory(self, trainer: TrainerSettings, shape: ModelShape, size: PassSize) -> TrainerMemory:
        memory = super().memory(trainer, shape, size)
        if trainer.dtype == "float32":
            return memory
        narrow, wide = DTYPE_BYTES[trainer.dtype], DTYPE_BYTES[_wide(trainer.dtype)]
        state = 5 * wide * shape.parameters  # parameters, gradients, their concatenation, both moments
        copies = narrow * shape.parameters if narrow < wide else 0
        passes = shape.kept_bytes(size, trainer.dtype)
        return TrainerMemory(
            model=state + copies,
            passes=max(passes - wide * shape.parameters, 0),
            first_rank=memory.first_rank,
        )

    def build(self, setup: TrainerSetup) -> "TorchTrainer":
        import torch

        from flowrt.engines.hf import load_model
        from flowrt.engines.torch.trainer import TorchTrainer

        dtype = setup.settings.dtype
        return TorchTrainer(
            load_model(setup.model, str(setup.device.torch), getattr(torch, _wide(dtype))),
            setup.settings,
            setup.algorithm,
            temperature=setup.temperature,
            narrow=getattr(torch, dtype),
        )


def _wide(dtype: Dtype) -> Dtype:
    """Dtype of the parameters that the optimiser updates."""
    return "float64" if dtype == "float64" else "float32"


class TorchGeneration(RolloutEngineDescriptor):
    """Generates inside the worker, on its device."""

    limits_prompts = True

    def mistakes(
        self,
        rollout: RolloutSettings,
        published: PublishedWeights,  # noqa: ARG002
        *,
        deterministic: bool,  # noqa: ARG002
    ) -> Iterator[str]:
        if rollout.compile and rollout.device == "npu":
            yield "rollout.compile is for CPUs and GPUs, and rollout.device is npu; leave it out"

    def device(self, rollout: RolloutSettings) -> str:
        return rollout.device or "cpu"

    def memory(
        self, rollout: RolloutSettings, shape: ModelShape, published: PublishedWeights, cache_elements: int
    ) -> RolloutMemory:
        # An in-flight update with recomputation needs a second model and a second KV cache.
        copies = 2 if rollout.weight_update == "in_flight" and rollout.recompute_kv_on_update else 1
        adapters = shape.adapter_parameters(published.lora) if published.lora else 0
        dtype = _model_dtype(rollout, published)
        model = (shape.parameters + adapters + cache_elements) * DTYPE_BYTES[dtype]
        versions = STAGED_VERSIONS * published.size_bytes(shape)
        support = TOKEN_BYTES * support_tokens(rollout.truncation)
        sequence = shape.vocab_size * DTYPE_BYTES[dtype] + rollout.max_new_tokens * (SEQUENCE_TOKEN_BYTES + support)
        drawing = (
            DRAWING_TENSORS
            * FLOAT_BYTES
            * min(rollout.max_running_requests * shape.vocab_size, max(DRAWN_ELEMENTS, shape.vocab_size))
        )
        computing = copies * model + rollout.max_running_requests * sequence
        computing += max(drawing, PREFILL_TOKENS * shape.computed_bytes(dtype))
        if self.device(rollout) == "cpu":
            return RolloutMemory(host=computing + versions)
        return RolloutMemory(host=versions, device=computing)

    def build(self, setup: RolloutSetup) -> "TorchRollout":
        import torch

        from flowrt.engines.hf import load_model
        from flowrt.engines.stopping import StopConditions
        from flowrt.engines.torch.generation_path import Way, right_way
        from flowrt.engines.torch.rollout import TorchRollout, optimize_layout
        from flowrt.engines.training.lora import add_adapters
        from flowrt.transport.devices import own_device

        published, rollout = setup.published, setup.settings
        device = own_device(self.device(rollout))
        device.use()
        if setup.deterministic:
            device.compute_deterministically()
        model = load_model(setup.model, str(device.torch), getattr(torch, _model_dtype(rollout, published)))
        if published.lora:
            model = add_adapters(model, published.lora).to(device.torch, model.dtype)
        # Memory layout changes rounding: a deterministic run keeps the layout of a plain loop.
        model = (model if setup.deterministic else optimize_layout(model)).eval()
        rows = 1 if setup.deterministic else rollout.max_running_requests
        way = right_way(model, compiled=rollout.compile)
        return TorchRollout(
            model if way is Way.ROWS else way.of(model, rows),
            stop=StopConditions.of(setup.model, rollout.stop, setup.chat_template),
            rows=rows,
            max_new_tokens=rollout.max_new_tokens,
            temperature=rollout.temperature,
            truncation=rollout.truncation,
            recompute=rollout.recompute_kv_on_update,
            compiled=rollout.compile,
            published=getattr(torch, published.dtype),
        )


def _model_dtype(rollout: RolloutSettings, published: PublishedWeights) -> Dtype:
    """The dtype of a rollout worker's model."""
    return published.dtype if rollout.dtype == "auto" else rollout.dtype
