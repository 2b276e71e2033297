"""The sglang rollout engine: generation on a server with its own Python environment."""

import itertools
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from flowrt.engines.descriptor import (
    FLOAT_BYTES,
    HALF_BYTES,
    ModelShape,
    PublishedWeights,
    RolloutEngineDescriptor,
    RolloutMemory,
    RolloutSettings,
    RolloutSetup,
)
from flowrt.errors import ConfigError

if TYPE_CHECKING:
    from flowrt.engines.sglang.engine import SglangRollout

VERSION_COPIES = 3
"""Copies of a version in the worker: the version in use, the arriving version, and the copy that is being sent."""
PARALLELISM_ARGUMENTS = ("--tp", "--tp-size", "--tensor-parallel-size", "--pp-size", "--pipeline-parallel-size")
"""Server arguments whose product is the number of devices of a server."""


class SglangGeneration(RolloutEngineDescriptor):
    """A server that the worker starts, or a running one at ``rollout.sglang.url``."""

    is_in_worker = False

    def check(self, rollout: RolloutSettings, published: PublishedWeights, *, deterministic: bool) -> None:
        server = rollout.sglang
        if published.lora:
            raise ConfigError("rollouts on SGLang take whole weights; use --trainer.lora.publish merged")
        if bool(server.url) == bool(server.python):
            raise ConfigError(
                "rollout.engine is sglang: name its Python with --rollout.sglang.python (scripts/install_sglang "
                "makes one), or a running server with --rollout.sglang.url, not both"
            )
        if server.python and not Path(server.python).is_file():
            raise ConfigError(
                f"rollout.sglang.python is {server.python!r}, which is not a file; name a Python executable"
            )
        if server.url and not server.url.startswith(("http://", "https://")):
            raise ConfigError(f"rollout.sglang.url is {server.url!r}; it begins with http:// or https://")
        if server.url and rollout.workers > 1:
            raise ConfigError(
                f"rollout.workers is {rollout.workers}: two workers cannot change the weights of one server; use 1"
            )
        try:
            shlex.split(server.arguments)
        except ValueError as error:
            raise ConfigError(f"rollout.sglang.arguments is {server.arguments!r}: {error}") from error
        if deterministic:
            raise ConfigError("deterministic runs need --rollout.engine torch: a server batches by arrival time")
        if rollout.compile:
            raise ConfigError(
                "rollout.compile is for --rollout.engine torch; pass compile options in rollout.sglang.arguments"
            )
        for key, value, default in (("device", rollout.device, ""), ("dtype", rollout.dtype, "auto")):
            if value != default:
                raise ConfigError(f"rollout.{key} is of engine torch; for engine sglang set rollout.sglang.{key}")
        if not rollout.recompute_kv_on_update:
            raise ConfigError(
                "rollout.recompute_kv_on_update is for --rollout.engine torch; use --rollout.sglang.pause in_place"
            )

    def check_device(self, rollout: RolloutSettings) -> None:
        if rollout.sglang.device == "npu" and rollout.sglang.weights == "broadcast":
            raise ConfigError(
                "rollout.sglang.weights broadcast uses gloo, which does not support NPUs; use disk or tensor"
            )

    def device(self, rollout: RolloutSettings) -> str:
        """The device of the server; cpu for a running server, whose memory is in use before the run starts."""
        return "cpu" if rollout.sglang.url else rollout.sglang.device or "auto"

    def devices(self, rollout: RolloutSettings) -> int:
        words = [part for word in shlex.split(rollout.sglang.arguments) for part in word.split("=", 1)]
        count = 1
        for name, value in itertools.pairwise(words):
            if name in PARALLELISM_ARGUMENTS and value.isdigit():
                count *= max(int(value), 1)
        return count

    def memory(
        self, rollout: RolloutSettings, shape: ModelShape, published: PublishedWeights, cache_elements: int
    ) -> RolloutMemory:
        width = FLOAT_BYTES if rollout.sglang.dtype == "float32" else HALF_BYTES
        server = 0 if rollout.sglang.url else (shape.parameters + cache_elements) * width
        return RolloutMemory(host=VERSION_COPIES * published.size_bytes(shape), device=server)

    def build(self, setup: RolloutSetup) -> "SglangRollout":
        from flowrt.engines.sglang.engine import SglangRollout
        from flowrt.engines.stopping import StopConditions

        return SglangRollout(
            setup.settings.sglang,
            setup.model,
            stop=StopConditions.of(setup.model, setup.settings.stop, setup.chat_template),
            rows=setup.settings.max_running_requests,
            max_new_tokens=setup.settings.max_new_tokens,
            temperature=setup.settings.temperature,
            truncation=setup.settings.truncation,
            threads=setup.threads,
            log_path=setup.log_path,
        )
