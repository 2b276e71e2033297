"""The vllm rollout engine: generation on a server with its own Python environment."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from flowrt.engines.descriptor import PublishedWeights
from flowrt.engines.options import RolloutSettings, ServerOptions
from flowrt.engines.server.descriptor import ServerGeneration

if TYPE_CHECKING:
    from flowrt.engines.server.engine import ServerRollout

MAX_TOP_K = 512
"""Maximum number of tokens that are requested of those that could be drawn: about 60 bytes each, for each token."""
KEY_VARIABLE = "VLLM_API_KEY"
"""Environment variable of the worker: the API key of a server that it did not start."""


class VllmGeneration(ServerGeneration):
    """A vLLM server."""

    name, title = "vllm", "vLLM"
    key_variable = KEY_VARIABLE
    address_schemes = ("unix:/",)
    tensor_parallel = ("--tensor-parallel-size", "-tp")
    parts = ("--data-parallel-size", "-dp", "--pipeline-parallel-size", "-pp", "--nnodes", "--api-server-count")
    memory_fraction, static_share = "--gpu-memory-utilization", 1.0
    reserved: ClassVar = {
        "--model": "use --model of flowrt",
        **dict.fromkeys(
            ("--uds", "--host", "--port"),
            "a server that a worker starts has a private socket; for another one use rollout.vllm.url",
        ),
        "--api-key": "the run's files would have it, and it protects no route that changes weights; leave it out",
        **dict.fromkeys(
            ("--logprobs-mode", "--max-logprobs", "--return-sampling-mask", "--generation-config"),
            "log-probabilities and sampling are those of the run; leave it out",
        ),
        "--skip-tokenizer-init": "a token outside of the vocabulary would end such a server; leave it out",
        "--worker-extension-cls": "it is flowrt's, which reports missing tensors; leave it out",
    }

    def server_options(self, rollout: RolloutSettings) -> ServerOptions:
        return rollout.vllm

    def rollout_engine(self, options: Any, model: Path, **arguments: Any) -> "ServerRollout":
        from flowrt.engines.vllm.dialect import vllm_rollout

        return vllm_rollout(options, model, **arguments)

    def mistakes(self, rollout: RolloutSettings, published: PublishedWeights, *, deterministic: bool) -> Iterator[str]:
        yield from super().mistakes(rollout, published, deterministic=deterministic)
        if rollout.top_k > MAX_TOP_K:
            yield (
                f"rollout.top_k is {rollout.top_k}, and flowrt asks a vLLM server for {MAX_TOP_K} tokens of those that "
                "could be drawn at most; lower it"
            )
