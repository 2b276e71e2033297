"""Assignment of this host's accelerators to its workers, which would all use the first one otherwise.

- Devices are counted in /dev, without torch.
- A variable that limits the launcher's visible devices limits those of its workers.
"""

from collections.abc import Mapping
from pathlib import Path

from flowrt.engines.registry import ROLLOUT_ENGINES
from flowrt.ids import AUTO, ROLLOUT, TRAINER
from flowrt.launcher.doctor.estimate import ResourceEstimate, accelerated, has_accelerated_reference
from flowrt.launcher.worker_commands import reference_names
from flowrt.recipes.config import RunConfig

DEV = Path("/dev")
NONE = "none"
CUDA, ASCEND = "CUDA_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES"
NODES = {CUDA: "nvidia[0-9]*", ASCEND: "davinci[0-9]*"}
"""Device files in /dev, by the variable that lists the visible ones."""


def environments(config: RunConfig, environment: Mapping[str, str], dev: Path = DEV) -> dict[str, dict[str, str]]:
    """Variables to add to the environment of each worker, by the worker's name; empty without accelerators."""
    if config.launch.devices == NONE:
        return {}
    variable, devices = visible(environment, dev)
    if config.launch.devices != AUTO:
        devices = tuple(name.strip() for name in config.launch.devices.split(","))
    return {name: {variable: ",".join(assigned)} for name, assigned in assign(config, devices).items()}


def visible(environment: Mapping[str, str], dev: Path) -> tuple[str, tuple[str, ...]]:
    """The variable of this host's kind of accelerator, and the devices in it that the launcher may use."""
    for variable, pattern in NODES.items():
        count = len(list(dev.glob(pattern)))
        if count and variable in environment:
            listed = [name.strip() for name in environment[variable].split(",")]
            return variable, tuple(name for name in listed if name and name != "-1")
        if count:
            return variable, tuple(map(str, range(count)))
    return CUDA, ()


def shared_device_bytes(config: RunConfig, needs: ResourceEstimate, devices: int) -> int:
    """Bytes of accelerator memory needed on the fullest device that several processes share; 0 if none is shared.

    Args:
        config: of the run.
        needs: memory of each process.
        devices: number of accelerators of this host.

    Reference workers are not counted: see `flowrt.launcher.doctor.estimate.reference_bytes`.
    """
    training, generating = accelerated(config, bool(devices))
    totals: dict[str, list[int]] = {}
    for name, places in assign(config, tuple(map(str, range(devices)))).items():
        if name == TRAINER and training:
            for place in places:
                totals.setdefault(place, []).append(needs.trainer_device)
        elif name.startswith(ROLLOUT) and generating:
            for place in places:
                totals.setdefault(place, []).append(needs.server // len(places))
    return max((sum(sizes) for sizes in totals.values() if len(sizes) > 1), default=0)


def assign(config: RunConfig, devices: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    """The devices of each local worker, by its name.

    - Trainer ranks that use accelerators get the first devices, one each.
    - Rollout workers are assigned round-robin to the remaining devices, or to all if too few remain. A tensor- or
      pipeline-parallel server gets one device for each of its parts.
    - Reference workers that use accelerators are assigned round-robin to the remaining devices, or to all if none
      remains.
    """
    if not devices:
        return {}
    launch = config.launch
    assigned = {}
    left = devices
    if accelerated(config, there=True)[0] and not launch.trainer:
        assigned["trainer"] = devices[: config.trainer.ranks]
        left = devices[config.trainer.ranks :]
    if not launch.rollout:
        each = ROLLOUT_ENGINES[config.rollout.engine].devices(config.rollout)
        pool = left if len(left) >= each else devices
        for index in range(config.rollout.workers):
            places = range(index * each, index * each + min(each, len(pool)))
            assigned[f"rollout-{index}"] = tuple(pool[place % len(pool)] for place in places)
    if has_accelerated_reference(config, there=True) and not launch.auxiliary:
        pool = left or devices
        for index, name in enumerate(reference_names(config)):
            assigned[name] = (pool[index % len(pool)],)
    return assigned
