"""The device of each role: its own key, else that of the run (``device``), else the default of its engine.

Of the reference workers, which have no engine, also the dtype.
"""

from dataclasses import replace

from flowrt.engines.options import Dtype
from flowrt.engines.registry import ROLLOUT_ENGINES, TRAIN_ENGINES
from flowrt.ids import AUTO, REFERENCE, ROLLOUT, TRAINER
from flowrt.recipes.algorithms import needs_reference
from flowrt.recipes.config import RunConfig

ACCELERATORS = ("cuda", "npu")


def with_devices(config: RunConfig) -> RunConfig:
    """The configuration with ``device`` in place of each empty device key of a role."""
    name = config.device
    if not name:
        return config
    trainer, rollout, reference = config.trainer, config.rollout, config.reference
    sglang, vllm = rollout.sglang, rollout.vllm
    if name != AUTO:  # an empty key is the server's own choice
        sglang = replace(sglang, device=sglang.device or name)
        vllm = replace(vllm, device=vllm.device or name)
    fsdp = replace(trainer.fsdp, device=trainer.fsdp.device or name)
    return replace(
        config,
        trainer=replace(trainer, device=trainer.device or name, fsdp=fsdp),
        rollout=replace(rollout, device=rollout.device or name, sglang=sglang, vllm=vllm),
        reference=replace(reference, device=reference.device or name),
    )


def training_device(config: RunConfig) -> str:
    """The device of the trainer: cpu, cuda, npu or auto."""
    return TRAIN_ENGINES[config.trainer.engine].device(with_devices(config).trainer)


def rollout_device(config: RunConfig) -> str:
    """The device of the rollout workers' engines: cpu, cuda, npu or auto."""
    return ROLLOUT_ENGINES[config.rollout.engine].device(with_devices(config).rollout)


def reference_device(config: RunConfig) -> str:
    """The device of the reference workers: cpu, cuda, npu or auto."""
    return with_devices(config).reference.device or "cpu"


def reference_dtype(config: RunConfig) -> Dtype:
    """Dtype of the reference model; with ``auto``, that of the trainer's forward passes."""
    if config.reference.dtype != "auto":
        return config.reference.dtype
    return TRAIN_ENGINES[config.trainer.engine].forward_dtype(config.trainer)


def named_accelerators(config: RunConfig) -> dict[str, str]:
    """The accelerator (cuda or npu) that each role needs, by role; without roles whose device is cpu or auto."""
    devices = {TRAINER: training_device(config), ROLLOUT: rollout_device(config)}
    if needs_reference(config.algorithm):
        devices[REFERENCE] = reference_device(config)
    return {role: name for role, name in devices.items() if name in ACCELERATORS}
