"""The engines that a configuration can name, each with its descriptor. `flowrt.roles.engine_setup` builds them."""

from collections.abc import Mapping
from typing import Literal

from flowrt.engines.descriptor import RolloutEngineDescriptor, TrainEngineDescriptor
from flowrt.engines.fsdp.descriptor import FsdpTraining
from flowrt.engines.sglang.descriptor import SglangGeneration
from flowrt.engines.torch.descriptor import TorchGeneration, TorchTraining
from flowrt.engines.vllm.descriptor import VllmGeneration

TrainEngineName = Literal["torch", "fsdp"]
RolloutEngineName = Literal["torch", "sglang", "vllm"]

TRAIN_ENGINES: Mapping[TrainEngineName, TrainEngineDescriptor] = {
    "torch": TorchTraining(),
    "fsdp": FsdpTraining(),
}
ROLLOUT_ENGINES: Mapping[RolloutEngineName, RolloutEngineDescriptor] = {
    "torch": TorchGeneration(),
    "sglang": SglangGeneration(),
    "vllm": VllmGeneration(),
}
