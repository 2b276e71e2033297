"""Stand-in for a vLLM server where none is installed: a process with the same protocol and its pitfalls.

It generates the version of its weights as every token. ``python standin.py SOCKET RELEASE [STATE]``; STATE is JSON that
replaces attributes of `Standin`. The route /standin changes them later, and reports the requests so far.
"""

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

from aiohttp import web
from safetensors.numpy import load_file

TOKEN_S = 0.01


class Standin:
    """One server's state."""

    def __init__(self, release: str, state: dict[str, Any]) -> None:
        self.numbers = tuple(int(part) for part in release.split("."))
        self.reported = release
        self.label = "default"
        self.version = 0
        self.tensors: list[str] = []
        self.paused = ""
        self.aborts = 0
        self.requests: list[tuple[str, Any]] = []
        self.is_broken = False  # after a load that failed: the next generation ends the process
        self.development = True
        self.scale_out = True
        self.logprobs_mode = "processed_logprobs"
        self.data_parallel = 1
        self.context = 4096
        self.support = 0  # tokens in each support, if they are requested
        self.fail_load = False
        self.refuse_reset = False
        self.state_changed = asyncio.Event()
        vars(self).update(state)

    async def handle(self, request: web.Request) -> web.Response:
        route, query = request.path, dict(request.query)
        body = await request.json() if request.can_read_body else {}
        if route == "/standin":
            vars(self).update(body)
            return web.json_response({"requests": self.requests, "tensors": self.tensors})
        if route in ("/health", "/version"):
            return web.json_response({"version": self.reported})
        if route == "/metrics":
            return web.Response(text=f'vllm:iteration_tokens_total_count{{engine="0"}} {len(self.requests)}\n')
        self.requests.append((route, {**body, **query}))
        if route == "/inference/v1/generate":
            if not self.scale_out:
                return web.json_response({"error": "scale out is disabled"}, status=403)
            return await self.generate(body)
        known = ["/server_info", "/pause", "/resume", "/reset_prefix_cache", "/collective_rpc"]
        known += ["/update_weight_version"] if self.numbers >= (0, 27) else []
        if not self.development or route not in known:
            return web.json_response({"detail": "Not Found"}, status=404)
        answer = self.control(route, query, body)
        self.state_changed.set()
        self.state_changed.clear()
        return answer

    def control(self, route: str, query: dict[str, str], body: dict[str, Any]) -> web.Response:
        if route == "/server_info":
            return web.json_response({"vllm_config": self.config()})
        if route == "/pause":
            self.paused = query["mode"]
            self.aborts += self.paused == "abort"
        elif route == "/resume":
            self.paused = ""
        elif route == "/reset_prefix_cache":
            return web.json_response({"success": not self.refuse_reset})
        elif route == "/update_weight_version":
            self.label = body["new_version"]
        else:
            return self.load(body)
        return web.json_response({"status": "done"})

    def config(self) -> dict[str, Any]:
        return {
            "model_config": {"logprobs_mode": self.logprobs_mode, "max_model_len": self.context},
            "parallel_config": {"tensor_parallel_size": 1, "data_parallel_size": self.data_parallel},
            "scheduler_config": {"enable_chunked_prefill": False},
            "device_config": {"device": "cpu"},
        }

    def load(self, body: dict[str, Any]) -> web.Response:
        if body["method"] != "flowrt_load" or self.fail_load:
            self.is_broken = self.fail_load
            self.fail_load = False
            return web.json_response({"error": {"message": "the load failed"}}, status=500)
        held = list(load_file(Path(body["args"][0]) / "model.safetensors"))
        self.tensors = self.tensors or held
        self.version += 1
        return web.json_response({"results": [sorted(set(self.tensors) - set(held))]})

    async def generate(self, body: dict[str, Any]) -> web.Response:
        if self.is_broken:
            os._exit(1)
        settings = body["sampling_params"]
        aborts, tokens, spans = self.aborts, list[int](), list[dict[str, Any]]()
        wanted = settings["max_tokens"]
        count = min(wanted, self.context - len(body["token_ids"]))
        while len(tokens) < count and aborts == self.aborts:
            if self.paused:
                await self.state_changed.wait()
                continue
            label = self.label if self.numbers >= (0, 27) else str(self.version)
            tokens.append(int(label))
            if not spans or spans[-1]["version"] != label:
                spans.append({"version": label, "start": len(tokens) - 1, "end": len(tokens)})
            spans[-1]["end"] = len(tokens)
            await asyncio.sleep(TOKEN_S)
        choice: dict[str, Any] = {
            "index": 0,
            "finish_reason": "length" if len(tokens) == count else "abort",
            "token_ids": tokens,
            "logprobs": {"content": [self.entry(token, settings["logprobs"]) for token in tokens]},
        }
        if self.numbers >= (0, 32):
            choice["weight_versions"] = spans
        return web.json_response({"request_id": "generate-tokens-1", "choices": [choice]})

    def entry(self, token: int, logprobs: int) -> dict[str, Any]:
        """Log-probabilities of a token and of the likeliest ones, with the names of their release."""
        others = [(token + offset, -1.0 if offset < self.support else -9999.0) for offset in range(logprobs)]
        return {**self.named(token, -1.0), "top_logprobs": [self.named(other, logprob) for other, logprob in others]}

    def named(self, token: int, logprob: float) -> dict[str, Any]:
        if self.numbers >= (0, 32):
            return {"token_id": token, "logprob": logprob, "rank": 1}
        return {"token": f"token_id:{token}", "logprob": logprob}


def forked(arguments: list[str], environment: dict[str, str]) -> None:
    """`main` in a forked process, in the environment of the one that asked for it."""
    os.environ.clear()
    os.environ.update(environment)
    main(arguments)


def main(arguments: list[str]) -> None:
    socket, release, *state = arguments
    server = Standin(release, json.loads(state[0]) if state else {})
    app = web.Application(client_max_size=2**30)
    app.router.add_route("*", "/{route:.*}", server.handle)
    web.run_app(app, path=socket, print=None)


if __name__ == "__main__":
    main(sys.argv[1:])
