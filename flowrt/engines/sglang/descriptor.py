"""The sglang rollout engine: generation on a server with its own Python environment."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from flowrt.engines.descriptor import PublishedWeights
from flowrt.engines.options import RolloutSettings, SglangOptions
from flowrt.engines.server.descriptor import ServerGeneration

if TYPE_CHECKING:
    from flowrt.engines.server.engine import ServerRollout

MAX_STOP_STRINGS = 32
"""Maximum number of stop strings of a request."""
KEY_VARIABLE = "SGLANG_API_KEY"
"""Environment variable of the worker: the API key of a server that it did not start."""


class SglangGeneration(ServerGeneration):
    """An SGLang server."""

    name, title = "sglang", "SGLang"
    key_variable = KEY_VARIABLE
    tensor_parallel = ("--tp-size", "--tensor-parallel-size")
    parts = ("--dp-size", "--data-parallel-size", "--pp-size", "--pipeline-parallel-size", "--nnodes")
    memory_fraction = "--mem-fraction-static"
    static_share = 0.85
    """SGLang's fraction is of weights and KV cache; it keeps more for activations and CUDA graphs."""
    reserved: ClassVar = {
        "--model-path": "use --model",
        "--host": "a server that a worker starts listens on 127.0.0.1; for another one use rollout.sglang.url",
        "--port": "a server that a worker starts has a free port; for another one use rollout.sglang.url",
        "--api-key": "the run's files would have it, and each start has a key of its own; leave it out",
        "--admin-api-key": "the run's files would have it, and each start has a key of its own; leave it out",
        "--weight-version": "versions are those of the run; leave it out",
    }

    def server_options(self, rollout: RolloutSettings) -> SglangOptions:
        return rollout.sglang

    def rollout_engine(self, options: Any, model: Path, **arguments: Any) -> "ServerRollout":
        from flowrt.engines.sglang.dialect import sglang_rollout

        return sglang_rollout(options, model, **arguments)

    def mistakes(self, rollout: RolloutSettings, published: PublishedWeights, *, deterministic: bool) -> Iterator[str]:
        yield from super().mistakes(rollout, published, deterministic=deterministic)
        server = rollout.sglang
        if len(rollout.stop) > MAX_STOP_STRINGS:
            yield f"rollout.stop has {len(rollout.stop)} strings, and SGLang accepts {MAX_STOP_STRINGS}; use fewer"
        if server.device == "npu" and server.weights == "broadcast":
            yield "rollout.sglang.weights broadcast uses gloo, which does not support NPUs; use disk or tensor"
