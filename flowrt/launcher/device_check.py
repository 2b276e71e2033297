"""Check that this host has the accelerators that a run names, and name those that it leaves unused."""

from collections.abc import Callable, Mapping
from pathlib import Path

from flowrt.engines.registry import ROLLOUT_ENGINES
from flowrt.errors import ConfigError, FlowError, WaitExpired
from flowrt.ids import REFERENCE, ROLLOUT, TRAINER
from flowrt.launcher.accelerators import CUDA, DEV, visible
from flowrt.recipes.config import RunConfig
from flowrt.recipes.devices import named_accelerators, rollout_device, training_device
from flowrt.runtime.interpreter import last_line

LIMIT_S = 120.0
"""Time limit for the import of torch and the answer of the driver."""


def wanted_here(config: RunConfig) -> dict[str, tuple[int, list[str]]]:
    """By name of the accelerator: the most that one role needs on this host, and the roles that have workers here."""
    launch, trainer = config.launch, config.trainer
    elsewhere = {TRAINER: launch.trainer, ROLLOUT: launch.rollout, REFERENCE: launch.auxiliary}
    if not ROLLOUT_ENGINES[config.rollout.engine].is_in_worker:
        elsewhere[ROLLOUT] = "a server, whose torch is not that of this environment"
    wanted: dict[str, tuple[int, list[str]]] = {}
    for role, name in named_accelerators(config).items():
        if not elsewhere[role]:
            count, roles = wanted.get(name, (0, []))
            ranks = trainer.ranks // trainer.nodes if role == TRAINER else 1
            wanted[name] = max(count, ranks), [*roles, role]
    return wanted


def check_devices_here(config: RunConfig) -> None:
    """Raise ConfigError if the run names an accelerator that this host does not have, or too few of them."""
    for name, (count, roles) in wanted_here(config).items():
        if reason := missing(name, count):
            raise ConfigError(f"device {name} of {' and '.join(roles)}: {reason}")


def unused(
    config: RunConfig,
    environment: Mapping[str, str],
    dev: Path = DEV,
    probe: Callable[[str, int], str] | None = None,
) -> str:
    """A sentence if this host has accelerators, and a run that names no device computes here on the CPU; else empty.

    Args:
        config: of the run.
        environment: of the launcher; it may limit the visible devices.
        dev: directory of device files.
        probe: says why torch does not have this number of accelerators of a kind; default: `missing`.
    """
    launch = config.launch
    elsewhere = {TRAINER: launch.trainer, ROLLOUT: launch.rollout}
    devices = {TRAINER: training_device(config), ROLLOUT: rollout_device(config)}
    roles = [role for role, name in devices.items() if name == "cpu" and not elsewhere[role]]
    keys = (config.device, config.trainer.device, config.rollout.device, config.trainer.fsdp.device)
    variable, here = visible(environment, dev)
    if not here or not roles or any(keys):
        return ""
    kind, flag = ("GPU", "cuda") if variable == CUDA else ("NPU", "npu")
    several = f"{len(here)} {kind}s" if len(here) > 1 else f"a {kind}"
    reason = (probe or missing)(flag, 1)
    advice = f"torch does not see one: {reason}" if reason else f"--device {flag} uses them"
    return f"this machine has {several}, and {' and '.join(roles)} compute on the CPU; {advice}"


def missing(name: str, count: int) -> str:
    """Why this host does not have ``count`` accelerators of this kind; empty if it has."""
    try:
        return last_line("flowrt.transport.devices", (name, str(count)), LIMIT_S, f"the probe of {name} devices")
    except WaitExpired:
        return f"torch did not answer within {LIMIT_S:.0f} s whether there is one; is its driver stuck?"
    except FlowError as error:
        return f"torch failed: {error}"
