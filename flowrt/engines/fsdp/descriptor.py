"""The fsdp engine: parameters, gradients and optimiser state in shards, on any device."""

import importlib.util
from collections.abc import Iterator
from typing import TYPE_CHECKING

from flowrt.engines.descriptor import (
    DELTA_SNAPSHOTS,
    DTYPE_BYTES,
    FLOAT_BYTES,
    ModelShape,
    PassSize,
    PublishedWeights,
    TrainEngineDescriptor,
    TrainerMemory,
    TrainerSetup,
)
from flowrt.engines.options import Dtype, TrainerSettings
from flowrt.errors import ConfigError

if TYPE_CHECKING:
    from flowrt.engines.fsdp.trainer import FsdpTrainer


class FsdpTraining(TrainEngineDescriptor):
    """FSDP2, with LoRA adapters if ``trainer.lora.rank`` is set. docs/guides/engines.md has the table of its memory."""

    needs_process_group = True
    applies_supports = True

    def mistakes(self, trainer: TrainerSettings) -> Iterator[str]:
        if trainer.compile and trainer.fsdp.recompute:
            ways = "trainer.fsdp.recompute, which runs layers uncompiled"
            yield f"trainer.compile changes nothing with {ways}; leave out one"

    def check_packages(self, trainer: TrainerSettings) -> None:
        if trainer.lora.rank and importlib.util.find_spec("peft") is None:
            raise ConfigError(
                "trainer.lora.rank is set, which needs peft, not installed here: pip install 'flowrt[lora]'"
            )

    def device(self, trainer: TrainerSettings) -> str:
        return trainer.fsdp.device or "auto"

    def is_lock_step(self, trainer: TrainerSettings) -> bool:
        return trainer.fsdp.gather == "pass"

    def published(self, trainer: TrainerSettings) -> PublishedWeights:
        adapters_only = trainer.lora.rank and trainer.lora.publish == "adapters"
        return PublishedWeights(trainer.fsdp.dtype, trainer.lora if adapters_only else None)

    def forward_dtype(self, trainer: TrainerSettings) -> Dtype:
        return trainer.fsdp.dtype

    def trained_parameters(self, trainer: TrainerSettings, shape: ModelShape) -> int:
        return shape.adapter_parameters(trainer.lora) or shape.parameters

    def memory(self, trainer: TrainerSettings, shape: ModelShape, size: PassSize) -> TrainerMemory:
        narrow = DTYPE_BYTES[trainer.fsdp.dtype]  # size of a parameter in passes
        wide = max(narrow, FLOAT_BYTES)  # size of a gradient, and of a parameter that the optimiser updates
        held = shape.parameters + shape.adapter_parameters(trainer.lora)
        trained = self.trained_parameters(trainer, shape)
        shards = wide * held + 3 * wide * trained  # gradients and both moments
        gathered = narrow * held + wide * trained  # parameters and gradients
        whole = gathered if trainer.fsdp.gather == "step" else gathered // max(shape.layers, 1)
        published = DELTA_SNAPSHOTS * self.published(trainer).size_bytes(shape)
        return TrainerMemory(
            model=shards // trainer.ranks + whole,
            passes=shape.kept_bytes(size, trainer.fsdp.dtype, trainer.fsdp.recompute),
            first_rank=max(wide * held, published),  # only rank 0 reads and writes the whole model
        )

    def build(self, setup: TrainerSetup) -> "FsdpTrainer":
        from flowrt.engines.fsdp.trainer import FsdpTrainer

        return FsdpTrainer(
            setup.model,
            setup.device,
            setup.settings,
            setup.algorithm,
            fsdp=setup.settings.fsdp,
            lora=setup.settings.lora,
            temperature=setup.temperature,
            seed=setup.seed,
        )
