"""The sglang rollout engine: generation on a server with its own Python environment."""

import itertools
import os
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from flowrt.engines.descriptor import (
    FLOAT_BYTES,
    HALF_BYTES,
    ModelShape,
    PublishedWeights,
    RolloutEngineDescriptor,
    RolloutMemory,
    RolloutSetup,
)
from flowrt.engines.options import RolloutSettings
from flowrt.errors import ConfigError
from flowrt.ids import ROLLOUT
from flowrt.runtime.addresses import check_url

if TYPE_CHECKING:
    from flowrt.engines.server.engine import ServerRollout

KEY_VARIABLE = "SGLANG_API_KEY"
"""Environment variable of the worker: the API key of a server that it did not start."""
MAX_STOP_STRINGS = 32
"""Maximum number of stop strings of a request."""
VERSION_COPIES = 3
"""Copies of a version in the worker: the version in use, the arriving version, and the copy that is being sent."""
TENSOR_PARALLEL = ("--tp-size", "--tensor-parallel-size")
PARTS = ("--dp-size", "--data-parallel-size", "--pp-size", "--pipeline-parallel-size", "--nnodes")
"""Server arguments that split a server into parts with weights of their own, or processes on other nodes."""
RESERVED = {
    "--model-path": "use --model",
    "--host": "a server that a worker starts listens on 127.0.0.1; for another one use rollout.sglang.url",
    "--port": "a server that a worker starts has a free port; for another one use rollout.sglang.url",
    "--api-key": "the run's files would have it, and each start has a key of its own; leave it out",
    "--admin-api-key": "the run's files would have it, and each start has a key of its own; leave it out",
    "--weight-version": "versions are those of the run; leave it out",
}
"""Server arguments that would make the server unreachable or reveal its key, and what to do instead."""


VISIBLE_DEVICES = ("CUDA_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES")
MIN_ABBREVIATION = len("--tp")


class SglangGeneration(RolloutEngineDescriptor):
    """A server that the worker starts, or a running one at ``rollout.sglang.url``."""

    is_in_worker = False

    limits_prompts = True

    def mistakes(self, rollout: RolloutSettings, published: PublishedWeights, *, deterministic: bool) -> Iterator[str]:
        server = rollout.sglang
        if published.lora:
            yield "rollouts on SGLang take whole weights; use --trainer.lora.publish merged"
        if bool(server.url) == bool(server.python):
            yield (
                "rollout.engine is sglang: name its Python with --rollout.sglang.python (scripts/install_sglang "
                "makes one), or a running server with --rollout.sglang.url, not both"
            )
        if server.python and not Path(server.python).is_file():
            yield f"rollout.sglang.python is {server.python!r}, which is not a file; name a Python executable"
        if len(rollout.stop) > MAX_STOP_STRINGS:
            yield f"rollout.stop has {len(rollout.stop)} strings, and SGLang accepts {MAX_STOP_STRINGS}; use fewer"
        if deterministic:
            yield "deterministic runs need --rollout.engine torch: a server batches by arrival time"
        if server.device == "npu" and server.weights == "broadcast":
            yield "rollout.sglang.weights broadcast uses gloo, which does not support NPUs; use disk or tensor"
        yield from _argument_mistakes(server.arguments)
        if server.url:
            yield from _url_mistakes(server.url, rollout.workers)

    def check_packages(self, rollout: RolloutSettings) -> None:
        from flowrt.engines.server.process import check_installed

        if rollout.sglang.python:
            check_installed(
                "rollout.sglang.python", rollout.sglang.python, "sglang", "scripts/install_sglang makes one"
            )

    def device(self, rollout: RolloutSettings) -> str:
        """The device of the server; cpu for a running server, whose memory is in use before the run starts."""
        return "cpu" if rollout.sglang.url else rollout.sglang.device or "auto"

    def devices(self, rollout: RolloutSettings) -> int:
        return max([1, *_numbers(rollout.sglang.arguments, TENSOR_PARALLEL)[-1:]])

    def memory(
        self, rollout: RolloutSettings, shape: ModelShape, published: PublishedWeights, cache_elements: int
    ) -> RolloutMemory:
        width = FLOAT_BYTES if rollout.sglang.dtype == "float32" else HALF_BYTES
        server = 0 if rollout.sglang.url else (shape.parameters + cache_elements) * width
        return RolloutMemory(host=VERSION_COPIES * published.size_bytes(shape), device=server)

    def build(self, setup: RolloutSetup) -> "ServerRollout":
        from flowrt.engines.sglang.dialect import sglang_rollout
        from flowrt.engines.stopping import StopConditions

        server = setup.settings.sglang
        if server.device != "cpu":
            _check_visible(setup.worker, self.devices(setup.settings))
        if server.url:
            server = replace(server, url=(_url_of(setup.worker, server.url),))
        return sglang_rollout(
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


def _url_mistakes(urls: Sequence[str], workers: int) -> Iterator[str]:
    """Other than one address of a server for each worker. Raises ConfigError for a wrong address."""
    if len({url.rstrip("/") for url in urls}) < len(urls):
        yield "rollout.sglang.url names a server twice: two workers cannot change its weights; name others"
    if len(urls) != workers:
        yield (
            f"rollout.workers is {workers}, and rollout.sglang.url has {len(urls)} address(es): two workers "
            "cannot change the weights of one server; name one for each worker"
        )
    for url in urls:
        check_url("rollout.sglang.url", url, f"put a server's key into the environment of its worker ({KEY_VARIABLE})")


def _url_of(worker: str, urls: Sequence[str]) -> str:
    """The address of a worker's server. Raises ConfigError if there is none for it."""
    names = [f"{ROLLOUT}-{index}" for index in range(len(urls))]
    if worker not in names:
        raise ConfigError(
            f"worker {worker} has no SGLang server: those of rollout.sglang.url are for {', '.join(names)}; name "
            "another one there, or use rollout.sglang.python, so that each worker starts its own"
        )
    return urls[names.index(worker)]


def _check_visible(worker: str, devices: int) -> None:
    """Raise ConfigError if a variable limits the accelerators of this process to fewer than its server needs."""
    for variable in VISIBLE_DEVICES:
        visible = [name for name in os.environ.get(variable, "").split(",") if name.strip() not in ("", "-1")]
        if visible and len(visible) < devices:
            raise ConfigError(
                f"worker {worker} may use {len(visible)} accelerator(s) ({variable}={os.environ[variable]}), and "
                f"rollout.sglang.arguments ask for {devices}; give each rollout worker {devices}, or lower --tp"
            )


def _argument_mistakes(arguments: str) -> Iterator[str]:
    """Server arguments that cannot be read, or with which no server can be used."""
    try:
        words = list(_arguments(arguments))
    except ValueError as error:
        yield f"rollout.sglang.arguments is {arguments!r}: {error}"
        return
    for name, value in words:
        for reserved, instead in RESERVED.items():
            if _means(name, (reserved,)):
                yield f"rollout.sglang.arguments has {name}: {instead}"
        if _means(name, TENSOR_PARALLEL) and not (value.isdecimal() and int(value)):
            yield f"rollout.sglang.arguments has {name} {value!r}, which is no number of devices from 1 on"
        if _means(name, PARTS) and value != "1":
            yield (
                f"rollout.sglang.arguments has {name} {value}: the weights of such a server cannot be changed; use "
                "more rollout workers, or --tp"
            )


def _numbers(arguments: str, names: Sequence[str]) -> list[int]:
    """The numbers that follow these server arguments, in order."""
    return [int(value) for name, value in _arguments(arguments) if _means(name, names) and value.isdecimal()]


def _arguments(arguments: str) -> Iterator[tuple[str, str]]:
    """The names of server arguments with the words that follow them. Raises ValueError for an unclosed quote."""
    words = [part for word in shlex.split(arguments) for part in (word.split("=", 1) if word[:2] == "--" else [word])]
    for name, value in itertools.pairwise([*words, ""]):
        if name.startswith("--"):
            yield name, value


def _means(name: str, arguments: Sequence[str]) -> bool:
    """Whether the server takes a name for one of these arguments: argparse accepts abbreviations."""
    return len(name) >= MIN_ABBREVIATION and any(argument.startswith(name) for argument in arguments)
