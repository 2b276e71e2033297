"""What rollout engines on a server have in common: their options, their devices and their memory."""

import itertools
import os
import shlex
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from flowrt.engines.descriptor import (
    FLOAT_BYTES,
    HALF_BYTES,
    ModelShape,
    PublishedWeights,
    RolloutEngineDescriptor,
    RolloutMemory,
    RolloutSetup,
)
from flowrt.engines.options import RolloutSettings, ServerOptions
from flowrt.errors import ConfigError
from flowrt.ids import ROLLOUT
from flowrt.runtime.addresses import check_url
from flowrt.runtime.resource_limits import memory_share

if TYPE_CHECKING:
    from flowrt.engines.server.engine import ServerRollout

VERSION_COPIES = 3
"""Copies of a version in the worker: the version in use, the arriving version, and the copy that is being sent."""
VISIBLE_DEVICES = ("CUDA_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES")
MIN_ABBREVIATION = len("--tp")


class ServerGeneration(RolloutEngineDescriptor):
    """A server that the worker starts, or a running one at its ``url``."""

    is_in_worker = False
    limits_prompts = True
    name: str
    """Name of the engine, of the table of its options, and of the package in the server's environment: sglang."""
    title: str
    """As in messages: SGLang."""
    key_variable: str
    """Environment variable of the worker: the API key of a server that it did not start."""
    address_schemes: tuple[str, ...] = ()
    """Prefixes of addresses besides http:// and https://."""
    tensor_parallel: tuple[str, ...]
    """Server arguments that split each tensor over devices."""
    parts: tuple[str, ...]
    """Server arguments that split a server into parts with weights of their own, or processes on other nodes."""
    memory_fraction: str
    """Server argument: what the server takes of the memory that is free when it starts."""
    static_share: float
    """`memory_fraction` over all memory that a server uses."""
    reserved: ClassVar[Mapping[str, str]]
    """Server arguments with which it would be unreachable or compute other numbers, and what to do instead."""

    @property
    def table(self) -> str:
        """The table of its options in a configuration: rollout.sglang."""
        return f"rollout.{self.name}"

    @abstractmethod
    def server_options(self, rollout: RolloutSettings) -> ServerOptions:
        """The options of the server."""

    @abstractmethod
    def rollout_engine(self, options: Any, model: Path, **arguments: Any) -> "ServerRollout":
        """Construct the engine (see `flowrt.engines.sglang.dialect.sglang_rollout`)."""

    def mistakes(self, rollout: RolloutSettings, published: PublishedWeights, *, deterministic: bool) -> Iterator[str]:
        server, table = self.server_options(rollout), self.table
        if published.lora:
            yield f"rollouts on {self.title} take whole weights; use --trainer.lora.publish merged"
        if bool(server.url) == bool(server.python):
            yield (
                f"rollout.engine is {self.name}: name its Python with --{table}.python (scripts/install_{self.name} "
                f"makes one), or a running server with --{table}.url, not both"
            )
        if server.python and not Path(server.python).is_file():
            yield f"{table}.python is {server.python!r}, which is not a file; name a Python executable"
        if deterministic:
            yield "deterministic runs need --rollout.engine torch: a server batches by arrival time"
        yield from self._argument_mistakes(server.arguments)
        if server.url:
            yield from self._url_mistakes(server.url, rollout.workers)

    def _url_mistakes(self, urls: Sequence[str], workers: int) -> Iterator[str]:
        """Other than one address of a server for each worker. Raises ConfigError for a wrong address."""
        if len({url.rstrip("/") for url in urls}) < len(urls):
            yield f"{self.table}.url names a server twice: two workers cannot change its weights; name others"
        if len(urls) != workers:
            yield (
                f"rollout.workers is {workers}, and {self.table}.url has {len(urls)} address(es): two workers cannot "
                "change the weights of one server; name one for each worker"
            )
        for url in urls:
            if not (self.address_schemes and url.startswith(self.address_schemes)):
                fix = f"put a server's key into the environment of its worker ({self.key_variable})"
                check_url(f"{self.table}.url", url, fix)

    def _argument_mistakes(self, arguments: str) -> Iterator[str]:
        """Server arguments that cannot be read, or with which no server can be used."""
        key = f"{self.table}.arguments"
        try:
            words = list(_words(arguments))
        except ValueError as error:
            yield f"{key} is {arguments!r}: {error}"
            return
        for name, value in words:
            for reserved, instead in self.reserved.items():
                if _means(name, (reserved,)):
                    yield f"{key} has {name}: {instead}"
            if _means(name, self.tensor_parallel) and not (value.isdecimal() and int(value)):
                yield f"{key} has {name} {value!r}, which is no number of devices from 1 on"
            if _means(name, (self.memory_fraction,)) and not _is_fraction(value):
                yield f"{key} has {name} {value!r}, which is no fraction between 0 and 1"
            if _means(name, self.parts) and value != "1":
                yield (
                    f"{key} has {name} {value}: the weights of such a server cannot be changed; use more rollout "
                    f"workers, or {self.tensor_parallel[0]}"
                )

    def check_packages(self, rollout: RolloutSettings) -> None:
        from flowrt.engines.server.process import check_installed

        if python := self.server_options(rollout).python:
            check_installed(self.name, self.title, python)

    def device(self, rollout: RolloutSettings) -> str:
        """The device of the server; cpu for a running server, whose memory is in use before the run starts."""
        server = self.server_options(rollout)
        return "cpu" if server.url else server.device or "auto"

    def devices(self, rollout: RolloutSettings) -> int:
        numbers = [
            int(value)
            for name, value in _words(self.server_options(rollout).arguments)
            if _means(name, self.tensor_parallel) and value.isdecimal()
        ]
        return max([1, *numbers[-1:]])

    def memory_share(self, rollout: RolloutSettings) -> float | None:
        return self._fraction(self.server_options(rollout).arguments)

    def _fraction(self, arguments: str) -> float | None:
        values = [value for name, value in _words(arguments) if _means(name, (self.memory_fraction,))]
        return float(values[-1]) if values else None

    def memory(
        self, rollout: RolloutSettings, shape: ModelShape, published: PublishedWeights, cache_elements: int
    ) -> RolloutMemory:
        server = self.server_options(rollout)
        width = FLOAT_BYTES if server.dtype == "float32" else HALF_BYTES
        static = 0 if server.url else (shape.parameters + cache_elements) * width
        device = static if server.device == "cpu" else int(static / self.static_share)
        return RolloutMemory(host=VERSION_COPIES * published.size_bytes(shape), device=device)

    def build(self, setup: RolloutSetup) -> "ServerRollout":
        from flowrt.engines.stopping import StopConditions

        server = self.server_options(setup.settings)
        if server.device != "cpu":
            self._check_visible(setup.worker, self.devices(setup.settings))
        if server.url:
            server = replace(server, url=(self._url_of(setup.worker, server.url),))
        elif server.device != "cpu":
            server = self.within_share(server, memory_share())
        return self.rollout_engine(
            server,
            setup.model,
            stop=StopConditions.of(setup.model, setup.settings.stop, setup.chat_template),
            rows=setup.settings.max_running_requests,
            max_new_tokens=setup.settings.max_new_tokens,
            temperature=setup.settings.temperature,
            truncation=setup.settings.truncation,
            threads=setup.threads,
            log_path=setup.log_path,
        )

    def within_share(self, server: ServerOptions, share: float) -> ServerOptions:
        """The options of a server that may use this share of its devices' memory, unless they have a fraction."""
        if share == 1 or self._fraction(server.arguments) is not None:
            return server
        fraction = f"{self.memory_fraction} {self.static_share * share:.4f}"
        return replace(server, arguments=f"{server.arguments} {fraction}".strip())

    def _url_of(self, worker: str, urls: Sequence[str]) -> str:
        """The address of a worker's server. Raises ConfigError if there is none for it."""
        names = [f"{ROLLOUT}-{index}" for index in range(len(urls))]
        if worker not in names:
            raise ConfigError(
                f"worker {worker} has no {self.title} server: those of {self.table}.url are for {', '.join(names)}; "
                f"name another one there, or use {self.table}.python, so that each worker starts its own"
            )
        return urls[names.index(worker)]

    def _check_visible(self, worker: str, devices: int) -> None:
        """Raise ConfigError if a variable limits the accelerators of this process to fewer than its server needs."""
        for variable in VISIBLE_DEVICES:
            visible = [name for name in os.environ.get(variable, "").split(",") if name.strip() not in ("", "-1")]
            if visible and len(visible) < devices:
                raise ConfigError(
                    f"worker {worker} may use {len(visible)} accelerator(s) ({variable}={os.environ[variable]}), and "
                    f"{self.table}.arguments ask for {devices}; give each rollout worker {devices}, or lower "
                    f"{self.tensor_parallel[0]}"
                )


def _words(arguments: str) -> Iterator[tuple[str, str]]:
    """The names of server arguments with the words that follow them. Raises ValueError for an unclosed quote."""
    words = [part for word in shlex.split(arguments) for part in (word.split("=", 1) if word[:2] == "--" else [word])]
    for name, value in itertools.pairwise([*words, ""]):
        if name.startswith("-") and not name[1:2].isdecimal():
            yield name, value


def _means(name: str, arguments: Sequence[str]) -> bool:
    """Whether the server takes a name for one of these arguments: argparse accepts abbreviations."""
    is_abbreviation = len(name) >= MIN_ABBREVIATION and any(argument.startswith(name) for argument in arguments)
    return name in arguments or is_abbreviation


def _is_fraction(text: str) -> bool:
    with suppress(ValueError):
        return 0 < float(text) < 1
    return False
