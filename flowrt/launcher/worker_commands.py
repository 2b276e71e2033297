"""Commands that start the workers of a run; the command of a worker on another host has a launcher prefix."""

import os
import shlex
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from string import Template

from flowrt.engines.registry import ROLLOUT_ENGINES, TRAIN_ENGINES
from flowrt.errors import ConfigError
from flowrt.ids import REFERENCE, ROLLOUT
from flowrt.recipes.config import RunConfig
from flowrt.recipes.grpo import settings
from flowrt.recipes.run_dir import ranks_dir
from flowrt.runtime.interpreter import RUN_MODULE

MAX_WORKER_THREADS_PER_CORE = 4
MAX_THREADS_PER_CORE = 64
"""Maximum for all workers of a machine together."""


@dataclass(frozen=True, slots=True)
class Command:
    """``PREFIX python ARGUMENTS``: a worker, or a torchrun of several workers. The prefix starts it on another host."""

    name: str
    arguments: tuple[str, ...]
    prefix: tuple[str, ...] = ()
    ranks: int = 1

    @property
    def role(self) -> str:
        """The last part of the module's name: the role of the worker, or torchrun."""
        return self.arguments[1].rpartition(".")[2]

    @property
    def workers(self) -> list[str]:
        """The names of its workers in the run."""
        return [self.name] if self.ranks == 1 else [f"{self.name}-{rank}" for rank in range(self.ranks)]

    @property
    def words(self) -> list[str]:
        """The complete command line."""
        return [*self.prefix, sys.executable, *self.arguments]


def worker_commands(config: RunConfig, address: str, rendezvous: str = "") -> list[Command]:
    """The commands of all workers, the trainer last. Raises ConfigError for a launcher prefix that cannot be used.

    Args:
        config: of the run; a run that only evaluates has no trainer.
        address: of the controller.
        rendezvous: HOST:PORT of the rendezvous store of several torchruns.
    """
    names = [
        (role, name)
        for role in settings(config).replaceable_roles
        if role != ROLLOUT
        for name in (reference_names(config) if role == REFERENCE else [role])
    ]
    names += [(ROLLOUT, f"{ROLLOUT}-{index}") for index in range(config.rollout.workers)]
    common: tuple[str, ...] = ("--controller", address, "--connect-timeout-s", str(config.controller.connect_timeout_s))
    if config.controller.keys:
        # The launcher's environment may not reach another host.
        common = (*common, "--keys", config.controller.keys)
    commands = [
        Command(name, (RUN_MODULE, f"flowrt.roles.{role}", *common, "--name", name), _prefix(config, role, name))
        for role, name in names
    ]
    return commands if config.eval.only else [*commands, _trainer(config, common, rendezvous)]


def reference_names(config: RunConfig) -> list[str]:
    """The names of the reference workers."""
    workers = config.reference.workers
    return [REFERENCE] if workers == 1 else [f"{REFERENCE}-{index}" for index in range(workers)]


def check_programs(config: RunConfig) -> None:
    """Raises ConfigError if a program that starts workers on other hosts, or a package of local workers, is missing."""
    if not config.launch.trainer:
        TRAIN_ENGINES[config.trainer.engine].check_packages(config.trainer)
    if not config.launch.rollout:
        ROLLOUT_ENGINES[config.rollout.engine].check_packages(config.rollout)
    for key in ("rollout", "trainer", "auxiliary"):
        words = _words(config, key, HOST="HOST")
        if words and shutil.which(words[0]) is None:
            raise ConfigError(f"launch.{key} starts with {words[0]}, which is not a program on this host; correct it")


def check_machine(config: RunConfig, cores: int) -> None:
    """Raises ConfigError if the local workers have too many threads for a machine with this many ``cores``.

    Systems limit processes and threads together, some to a few thousand.
    """
    here = sum(len(command.workers) for command in worker_commands(config, "") if not command.prefix)
    if here and config.threads > (most := MAX_WORKER_THREADS_PER_CORE * cores):
        raise ConfigError(f"threads is {config.threads}, and this machine has {cores} cores; use at most {most}")
    if here * config.threads > (most := MAX_THREADS_PER_CORE * cores):
        raise ConfigError(
            f"{here} workers with {config.threads} threads each would start on this machine, which has {cores} cores; "
            f"use fewer rollout.workers, trainer.ranks or threads, for at most {most} threads in all, or other hosts "
            "(launch.rollout, launch.trainer)"
        )


def _prefix(config: RunConfig, role: str, name: str) -> tuple[str, ...]:
    if role != "rollout" or not config.launch.rollout_hosts:
        return _words(config, role if role in ("rollout", "trainer") else "auxiliary")
    hosts = [host for word in _words(config, "rollout_hosts") for host in word.split(",") if host]
    if not hosts:
        raise ConfigError(
            f"launch.rollout_hosts names no host: {config.launch.rollout_hosts!r}; give a comma-separated list"
        )
    return _words(config, "rollout", HOST=hosts[int(name.rpartition("-")[2]) % len(hosts)])


def _words(config: RunConfig, key: str, **own: str) -> tuple[str, ...]:
    """The words of ``launch.KEY``, with each $NAME from the environment, which may differ after a requeue."""
    text = getattr(config.launch, key)
    try:
        return tuple(Template(word).substitute(os.environ | own) for word in shlex.split(text))
    except KeyError as missing:
        raise ConfigError(f"launch.{key} needs ${missing.args[0]}, which is not set: {text!r}; export it") from None
    except ValueError:
        raise ConfigError(
            f"launch.{key} has a $ that is not followed by a name: {text!r}; write $$ for a dollar sign"
        ) from None


def _trainer(config: RunConfig, common: tuple[str, ...], rendezvous: str) -> Command:
    worker = (*common, "--name", "trainer")
    ranks = config.trainer.ranks
    nodes = config.trainer.nodes
    prefix = _words(config, "trainer")
    if ranks == 1:
        return Command("trainer", (RUN_MODULE, "flowrt.roles.trainer", *worker), prefix)
    torchrun: tuple[str, ...] = (RUN_MODULE, "flowrt.ranks.torchrun", "--ranks", str(ranks // nodes))
    if nodes > 1:
        # The rendezvous store is a child of the launcher: no torchrun hosts it, and it listens on any free port.
        torchrun = (*torchrun, "--hosts", str(nodes), "--rendezvous", rendezvous)
    if not prefix:
        torchrun = (*torchrun, "--directory", str(ranks_dir(Path(config.run_dir))))
    return Command("trainer", (*torchrun, *worker), prefix, ranks)
