"""The torch engines: the whole model in each process, on the CPU."""

from typing import TYPE_CHECKING

from flowrt.engines.descriptor import (
    DTYPE_BYTES,
    STAGED_VERSIONS,
    ModelShape,
    PublishedWeights,
    RolloutEngineDescriptor,
    RolloutMemory,
    RolloutSettings,
    RolloutSetup,
    TrainEngineDescriptor,
    TrainerSettings,
    TrainerSetup,
)
from flowrt.errors import ConfigError

if TYPE_CHECKING:
    from flowrt.engines.torch.rollout import TorchRollout
    from flowrt.engines.torch.trainer import TorchTrainer

TOKEN_BYTES = 4


class TorchTraining(TrainEngineDescriptor):
    """Each rank holds parameters, gradients and optimiser state in float32."""

    applies_supports = True

    def check(self, trainer: TrainerSettings) -> None:
        if trainer.lora.rank:
            raise ConfigError(
                "trainer.lora.rank is set, but the torch engine has no adapters; use --trainer.engine fsdp"
            )

    def build(self, setup: TrainerSetup) -> "TorchTrainer":
        from flowrt.engines.hf import load_model
        from flowrt.engines.torch.trainer import TorchTrainer

        return TorchTrainer(
            load_model(setup.model),
            setup.options,
            setup.algorithm,
            temperature=setup.temperature,
        )


class TorchGeneration(RolloutEngineDescriptor):
    """Generates with the parameters and dtype that the trainer publishes."""

    def memory(
        self, rollout: RolloutSettings, shape: ModelShape, published: PublishedWeights, cache_elements: int
    ) -> RolloutMemory:
        # An in-flight update with recomputation needs a second model and a second KV cache.
        copies = 2 if rollout.weight_update == "in_flight" and rollout.recompute_kv_on_update else 1
        adapters = shape.adapter_parameters(published.lora) if published.lora else 0
        model = (shape.parameters + adapters + cache_elements) * DTYPE_BYTES[published.dtype]
        versions = STAGED_VERSIONS * published.size_bytes(shape)
        sequence = shape.logits_bytes + rollout.max_new_tokens * rollout.truncation.top_k * TOKEN_BYTES
        return RolloutMemory(host=copies * model + versions + rollout.max_running_requests * sequence)

    def build(self, setup: RolloutSetup) -> "TorchRollout":
        import torch

        from flowrt.engines.hf import load_model
        from flowrt.engines.stopping import StopConditions
        from flowrt.engines.torch.rollout import TorchRollout, optimize_layout
        from flowrt.engines.training.lora import add_adapters

        published, rollout = setup.published, setup.settings
        model = load_model(setup.model, dtype=getattr(torch, published.dtype))
        if published.lora:
            model = add_adapters(model, published.lora).to(model.dtype)
        return TorchRollout(
            # Memory layout changes rounding: a deterministic run keeps the layout of a plain loop.
            model if setup.deterministic else optimize_layout(model),
            stop=StopConditions.of(setup.model, rollout.stop, setup.chat_template),
            rows=1 if setup.deterministic else rollout.max_running_requests,
            max_new_tokens=rollout.max_new_tokens,
            temperature=rollout.temperature,
            truncation=rollout.truncation,
            recompute=rollout.recompute_kv_on_update,
            compiled=rollout.compile,
        )
