"""The command of each worker of a run, and what it is put behind to start on another host."""

import os
import shlex
import shutil
import sys
from dataclasses import dataclass
from string import Template

from flowrt.errors import ConfigError
from flowrt.recipes.config import RunConfig


@dataclass(frozen=True, slots=True)
class Command:
    """A worker's own command, ``python ARGUMENTS``, and the words before it that start it elsewhere."""

    name: str
    arguments: tuple[str, ...]
    behind: tuple[str, ...] = ()
    ranks: int = 1

    @property
    def workers(self) -> list[str]:
        """What the run knows its processes as."""
        return [self.name] if self.ranks == 1 else [f"{self.name}-{rank}" for rank in range(self.ranks)]

    @property
    def words(self) -> list[str]:
        return [*self.behind, sys.executable, *self.arguments]


def worker_commands(config: RunConfig, address: str, meeting: str = "") -> list[Command]:
    """Everybody but the controller. ``meeting`` is the HOST:PORT where torchruns of several hosts find each other."""
    names = [("source", "source"), ("reward", "reward")]
    names += [("rollout", f"rollout-{index}") for index in range(config.rollout.workers)]
    if config.loss.kl_coef > 0:
        names.append(("reference", "reference"))
    find: tuple[str, ...] = ("--controller", address, "--join-s", str(config.controller.join_s))
    if config.controller.keys:
        # The launcher's environment may not reach another host.
        find = (*find, "--keys", config.controller.keys)
    commands = [
        Command(name, ("-m", f"flowrt.workers.{role}", *find, "--name", name), _behind(config, role, name))
        for role, name in names
    ]
    return [*commands, _trainer(config, find, meeting)]


def check_programs(config: RunConfig) -> None:
    """Raises ConfigError when what is to start workers on other hosts is not installed on this one."""
    for key in ("rollout", "trainer", "others"):
        words = _words(config, key, HOST="HOST")
        if words and shutil.which(words[0]) is None:
            raise ConfigError(f"launch.{key} begins with {words[0]}, and there is no such program here; correct it")


def _behind(config: RunConfig, role: str, name: str) -> tuple[str, ...]:
    if role != "rollout" or not config.launch.rollout_hosts:
        return _words(config, role if role in ("rollout", "trainer") else "others")
    hosts = [host for word in _words(config, "rollout_hosts") for host in word.split(",") if host]
    if not hosts:
        raise ConfigError(f"launch.rollout_hosts names no host: {config.launch.rollout_hosts!r}; name some, by commas")
    return _words(config, "rollout", HOST=hosts[int(name.rpartition("-")[2]) % len(hosts)])


def _words(config: RunConfig, key: str, **own: str) -> tuple[str, ...]:
    """The words of ``launch.KEY``, each $NAME in them as it is in this environment: it may differ after a requeue."""
    text = getattr(config.launch, key)
    try:
        return tuple(Template(word).substitute(os.environ | own) for word in shlex.split(text))
    except KeyError as missing:
        raise ConfigError(f"launch.{key} needs ${missing.args[0]}, which is not set: {text!r}; export it") from None
    except ValueError:
        raise ConfigError(f"launch.{key} has a $ that begins no name: {text!r}; write $$ for the sign itself") from None


def _trainer(config: RunConfig, find: tuple[str, ...], meeting: str) -> Command:
    worker = (*find, "--name", "trainer")
    ranks, nodes, behind = config.trainer.ranks, config.trainer.nodes, _words(config, "trainer")
    if ranks == 1:
        return Command("trainer", ("-m", "flowrt.workers.trainer", *worker), behind)
    together: tuple[str, ...] = ("-m", "flowrt.workers.ranks", "--ranks", str(ranks // nodes))
    if nodes > 1:
        # The store is the launcher's: no torchrun takes itself for its host, and none needs a port that is known.
        together = (*together, "--hosts", str(nodes), "--meeting", meeting)
    return Command("trainer", (*together, *worker), behind, ranks)
