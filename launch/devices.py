"""Which accelerators of this machine each worker that is started on it sees: else all would begin with the first.

torch is not asked: the launcher does without it. A variable that limits what may be seen here is obeyed.
"""

import itertools
import shlex
from collections.abc import Mapping
from pathlib import Path

from flowrt.launch.memory import accelerated

from flowrt.recipes.config import RunConfig

DEV = Path("/dev")
AUTO, NONE = "auto", "none"
CUDA, ASCEND = "CUDA_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES"
NODES = {CUDA: "nvidia[0-9]*", ASCEND: "davinci[0-9]*"}
"""The variable that says what of a kind is seen, and the files of that kind in /dev."""
SPLITS = ("--tp", "--tp-size", "--tensor-parallel-size", "--pp-size", "--pipeline-parallel-size")
"""Arguments of an SGLang server that say over how many devices it goes."""


def environments(config: RunConfig, environment: Mapping[str, str], dev: Path = DEV) -> dict[str, dict[str, str]]:
    """What is added to the environment of each worker, by its name; nothing where there are no accelerators."""
    if config.launch.devices == NONE:
        return {}
    variable, devices = visible(environment, dev)
    if config.launch.devices != AUTO:
        devices = tuple(name.strip() for name in config.launch.devices.split(","))
    return {name: {variable: ",".join(own)} for name, own in shares(config, devices).items()}


def visible(environment: Mapping[str, str], dev: Path) -> tuple[str, tuple[str, ...]]:
    """The accelerators that may be used here, and the variable that says so."""
    for variable, pattern in NODES.items():
        count = len(list(dev.glob(pattern)))
        if count and variable in environment:
            named = [name.strip() for name in environment[variable].split(",")]
            return variable, tuple(name for name in named if name and name != "-1")
        if count:
            return variable, tuple(map(str, range(count)))
    return CUDA, ()


def shares(config: RunConfig, devices: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    """The devices of each worker that is started on this machine, by its name.

    Trainer ranks that work on a device have the first ones, a rank each; rollout workers go round the others, or round
    all of them where too few are left. A server that is split has as many as it is split over.
    """
    if not devices:
        return {}
    launch, found = config.launch, {}
    left = devices
    if accelerated(config, there=True)[0] and not launch.trainer:
        found["trainer"] = devices[: config.trainer.ranks]
        left = devices[config.trainer.ranks :]
    if not launch.rollout:
        each = _split(config)
        pool = left if len(left) >= each else devices
        for index in range(config.rollout.workers):
            places = range(index * each, index * each + min(each, len(pool)))
            found[f"rollout-{index}"] = tuple(pool[place % len(pool)] for place in places)
    return found


def _split(config: RunConfig) -> int:
    """Over how many devices each server goes."""
    if config.rollout.engine != "sglang":
        return 1
    words = [part for word in shlex.split(config.rollout.sglang.arguments) for part in word.split("=", 1)]
    count = 1
    for name, value in itertools.pairwise(words):
        if name in SPLITS and value.isdigit():
            count *= max(int(value), 1)
    return count
