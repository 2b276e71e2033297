"""Assignment of this host's accelerators to its workers, which would all use the first one otherwise.

- Devices are counted in /dev, without torch.
- A variable that limits the launcher's visible devices limits those of its workers.
- Processes that share a device may use shares of its memory in proportion to what the estimate says that they need.
"""

from collections.abc import Mapping
from pathlib import Path

from flowrt.engines.registry import ROLLOUT_ENGINES
from flowrt.errors import ConfigError
from flowrt.ids import AUTO, ROLLOUT, TRAINER
from flowrt.launcher.doctor.estimate import ResourceEstimate, accelerated, estimate, has_accelerated_reference
from flowrt.launcher.doctor.model_shape import shape_of
from flowrt.launcher.worker_commands import reference_names
from flowrt.recipes.config import RunConfig
from flowrt.runtime.resource_limits import MEMORY_SHARE

DEV = Path("/dev")
NONE = "none"
CUDA, ASCEND = "CUDA_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES"
NODES = {CUDA: "nvidia[0-9]*", ASCEND: "davinci[0-9]*"}
"""Device files in /dev, by the variable that lists the visible ones."""
DIVIDED = 0.9
"""Share of a device's memory that processes divide: contexts of the driver take some of it, about 0.5 GB each."""


def environments(config: RunConfig, environment: Mapping[str, str], dev: Path = DEV) -> dict[str, dict[str, str]]:
    """Variables to add to the environment of each worker, by the worker's name; empty without accelerators.

    Raises ConfigError if processes share a device whose memory cannot be divided.
    """
    if config.launch.devices == NONE:
        return {}
    variable, devices = visible(environment, dev)
    if config.launch.devices != AUTO:
        devices = tuple(name.strip() for name in config.launch.devices.split(","))
    assigned = assign(config, devices)
    variables = {name: {variable: ",".join(places)} for name, places in assigned.items()}
    if _sharing(config, assigned):
        for name, share in memory_shares(config, _estimated(config), assigned).items():
            variables[name][MEMORY_SHARE] = f"{share:.4f}"
    return variables


def _estimated(config: RunConfig) -> ResourceEstimate:
    try:
        return estimate(config, shape_of(config))
    except ConfigError as error:
        raise ConfigError(
            f"workers share a device of this host, and its memory cannot be divided among them: {error}; give each a "
            "device of its own (launch.devices), or fewer roles one"
        ) from None


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
    """Bytes that a device needs so that each process has enough in its share, where several share one; 0 if none do.

    Args:
        config: of the run.
        needs: memory of each process.
        devices: number of accelerators of this host.
    """
    assigned = assign(config, tuple(map(str, range(devices))))
    shares = memory_shares(config, needs, assigned)
    return max((int(_need(needs, name, assigned[name]) / share) for name, share in shares.items()), default=0)


def memory_shares(
    config: RunConfig, needs: ResourceEstimate, assigned: Mapping[str, tuple[str, ...]]
) -> dict[str, float]:
    """Share of the memory of its devices that each worker may use, by its name; without workers that share none.

    An engine that is told its share (`RolloutEngineDescriptor.memory_share`) has this one. Raises ConfigError if that
    leaves nothing for the others.
    """
    shares: dict[str, float] = {}
    fixed_share = ROLLOUT_ENGINES[config.rollout.engine].memory_share(config.rollout)
    for place, names in _sharing(config, assigned).items():
        fixed = {name: fixed_share for name in names if name.startswith(ROLLOUT) and fixed_share is not None}
        sizes = {name: _need(needs, name, assigned[name]) for name in names if name not in fixed}
        left = DIVIDED - sum(fixed.values())
        if left <= 0:
            raise ConfigError(
                f"{', '.join(names)} share device {place}, and rollout.{config.rollout.engine}.arguments give "
                f"{sum(fixed.values()):g} of its memory to servers, which leaves nothing for contexts and for others; "
                "lower the fraction of memory there, or leave it out"
            )
        divided = {name: left * size / sum(sizes.values()) for name, size in sizes.items()}
        shares |= {name: min(share, shares.get(name, 1.0)) for name, share in (fixed | divided).items()}
    return shares


def _sharing(config: RunConfig, assigned: Mapping[str, tuple[str, ...]]) -> dict[str, list[str]]:
    """The workers on each device that several use."""
    generating = accelerated(config, there=True)[1]
    names: dict[str, list[str]] = {}
    for name, places in assigned.items():
        if generating or not name.startswith(ROLLOUT):
            for place in dict.fromkeys(places):
                names.setdefault(place, []).append(name)
    return {place: sharing for place, sharing in names.items() if len(sharing) > 1}


def _need(needs: ResourceEstimate, name: str, places: tuple[str, ...]) -> int:
    """Bytes that a worker needs on each of its devices."""
    if name == TRAINER:
        return needs.trainer_device
    return needs.server // len(places) if name.startswith(ROLLOUT) else needs.reference_device


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
        assigned[TRAINER] = devices[: config.trainer.ranks]
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
