"""Stand-in for an SGLang server where none is installed: a process with the same protocol and its pitfalls.

It accepts the requests of one release, generates the version of its weights as every token, and can be configured to
exit or fail at a request. ``python standin.py PORT RELEASE [DEVICE [INFO]]`` (or in place of SGLang's Python); INFO is
JSON that is added to its server info.
"""

import asyncio
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from aiohttp import web
from safetensors import SafetensorError
from safetensors.numpy import load_file

RELEASES = json.loads((Path(__file__).parents[2] / "unit" / "engines" / "sglang_requests.json").read_text())
TOKEN_S = 0.01
MAX_STOPS = 32


class Standin:
    """One server's state."""

    def __init__(
        self,
        release: str,
        crash_route: str = "",
        device: str = "none",
        info: str = "{}",
        *,
        key: str = "",
        has_tokenizer: bool = True,
    ) -> None:
        self.key = key
        self.accepted = RELEASES[release]
        self.release = release
        self.crash_route = crash_route  # route: a request for it kills the process
        self.info = {"version": release, "tp_size": 1, "device": device, "dtype": "float32"}
        self.info |= {"skip_tokenizer_init": not has_tokenizer, "api_key": key} | json.loads(info)
        self.version = "0"
        self.session = False
        self.paused = ""
        self.aborts = 0
        self.is_stuck = False  # a request hangs in the scheduler
        self.fail_next = ""  # route: the next request for it fails
        self.status = 400  # of the failing request; 0: no response
        self.routes: list[str] = []
        self.bodies: list[tuple[str, Any]] = []
        self.loaded: dict[str, list[int]] = {}
        self.state_changed = asyncio.Event()

    async def handle(self, request: web.Request) -> web.Response:
        route = request.path
        if self.key and route != "/health" and request.headers.get("Authorization") != f"Bearer {self.key}":
            return web.json_response({"error": "Unauthorized"}, status=401)
        if route == "/health_generate":  # answers as the scheduler does, which may hang in a request
            return web.json_response({}, status=503 if self.is_stuck else 200)
        if route == "/health" and self.paused:  # it generates a token, too
            return web.json_response({}, status=503)
        self.routes.append(route)
        body = await request.json() if request.can_read_body else {}
        if route in ("/health", "/server_info", "/routes", "/bodies", "/loaded", "/fail_next"):
            return self.report(route, body)
        sent: dict[str, Any] = {name: value for name, value in body.items() if isinstance(value, str | bool | dict)}
        if "input_ids" in body:
            sent["input_tokens"] = len(body["input_ids"])
        self.bodies.append((route, sent))
        refusal = self.refusal(route, body)
        if refusal:
            return web.json_response({"success": False, "message": refusal}, status=400)
        if route == self.crash_route:
            os.kill(os.getpid(), signal.SIGKILL)
        if route == self.fail_next:
            self.fail_next = ""
            if not self.status:
                self.is_stuck = True
                await asyncio.Event().wait()
            return web.json_response({"success": False, "message": f"{route} was told to fail"}, status=self.status)
        if route == "/generate":
            return await self.generate(body)
        self.apply(route, body)
        return web.json_response({"success": True, "message": "done"})

    def report(self, route: str, body: Any) -> web.Response:
        if route == "/fail_next":
            self.fail_next, self.status = body["route"], body.get("status", 400)
        if route == "/routes":
            return web.json_response(self.routes)
        if route == "/bodies":
            return web.json_response(self.bodies)
        if route == "/loaded":
            return web.json_response(self.loaded)
        return web.json_response(self.info)

    def refusal(self, route: str, body: dict[str, Any]) -> str:
        """Why this release refuses the request; empty if it accepts it."""
        if route not in self.accepted["routes"]:
            return f"{self.release} has no {route}"
        fields = self.accepted["routes"][route]
        if not set(fields["required"]) <= set(body) <= {*fields["required"], *fields["optional"]}:
            return f"{route} has fields {sorted(body)}"
        if not set(body.get("sampling_params", {})) <= set(self.accepted["sampling_params"]):
            return f"sampling_params has fields {sorted(body['sampling_params'])}"
        if refusal := self.refused_sampling(**body.get("sampling_params", {})):
            return refusal
        if route == "/begin_weight_update" and self.session:
            return "a weight-update session is already open; call end_weight_update() first"
        if route == "/end_weight_update" and not self.session:
            return "no weight-update session is open; call begin_weight_update() first"
        partial = route in ("/update_weights_from_tensor", "/update_weights_from_distributed")
        if route == "/update_weights_from_disk":
            return self.unreadable(Path(body["model_path"]))
        if partial and self.session != ("/begin_weight_update" in self.accepted["routes"]):
            return f"{route} must run between begin_weight_update() and end_weight_update()"
        return ""

    def refused_sampling(self, stop: Any = (), min_new_tokens: int = 0, top_k: int = -1, **_: Any) -> str:
        """Why a server of any release refuses these sampling parameters; empty if it accepts them."""
        if self.info["skip_tokenizer_init"] and (stop or min_new_tokens):
            return f"stop={stop!r}, min_new_tokens={min_new_tokens} is unavailable when skip_tokenizer_init=True"
        if len(stop or ()) > MAX_STOPS:
            return f"at most {MAX_STOPS} stop strings are allowed, got {len(stop)}"
        return f"top_k must be -1 (disable) or at least 1, got {top_k}." if top_k < 1 and top_k != -1 else ""

    def unreadable(self, directory: Path) -> str:
        """Load the weights in a directory, as the server would. Returns the error; empty if there is none."""
        try:
            self.loaded = {
                name: list(tensor.shape) for name, tensor in load_file(directory / "model.safetensors").items()
            }
        except (OSError, SafetensorError) as error:
            return f"{directory} cannot be read: {error}"
        return ""

    def apply(self, route: str, body: dict[str, Any]) -> None:
        if route == "/pause_generation":
            self.paused = body["mode"]
            self.aborts += self.paused == "abort"
        elif route == "/continue_generation":
            self.paused = ""
        elif route in ("/begin_weight_update", "/end_weight_update"):
            self.session = route == "/begin_weight_update"
        self.version = body.get("weight_version", self.version)
        self.state_changed.set()
        self.state_changed.clear()

    async def generate(self, body: dict[str, Any]) -> web.Response:
        aborts = self.aborts
        tokens: list[int] = []
        spans: list[dict[str, Any]] = []
        count = body["sampling_params"]["max_new_tokens"]
        end = min(count, self.info.get("stops_after", count), self.info.get("cuts_after", count))
        while len(tokens) < end and aborts == self.aborts:
            if self.paused:
                await self.state_changed.wait()
                continue
            tokens.append(int(self.version))
            if not spans or spans[-1]["version"] != self.version:
                spans.append({"version": self.version, "start": len(tokens) - 1, "end": len(tokens)})
            spans[-1]["end"] = len(tokens)
            await asyncio.sleep(TOKEN_S)
        is_cut = len(tokens) == count or "cuts_after" in self.info
        finish = {"type": "length"} if is_cut else {"type": "stop", "matched": tokens[-1]}
        if len(tokens) < end:
            finish = {"type": "abort", "message": "cut by a pause"}
        meta: dict[str, Any] = {
            "finish_reason": finish,
            "output_token_logprobs": [[-1.0, token, None] for token in tokens],
        }
        if self.accepted["token_versions"]:
            meta["weight_versions"] = spans
        return web.json_response({"output_ids": tokens, "meta_info": meta})


def forked(arguments: list[str], environment: dict[str, str]) -> None:
    """`main` in a forked process, in the environment of the one that asked for it."""
    os.environ.clear()
    os.environ.update(environment)
    main(arguments)


def main(arguments: list[str]) -> None:
    info: list[str] = []
    if "--port" in arguments:  # started in place of SGLang's Python
        port = int(arguments[arguments.index("--port") + 1])
        release, crash_route = os.environ["STANDIN"].split(",")
        named, _, key = Path(arguments[arguments.index("--config") + 1]).read_text().strip().partition(": ")
        assert named == "api-key"
        key = key.strip("'")
        sys.stdout.write(f"server_args={{'model_path': 'model', 'api_key': {key!r}, 'port': {port}}}\n")
        sys.stdout.flush()
    else:
        port, release, crash_route, key = int(arguments[0]), arguments[1], "", os.environ.get("STANDIN_KEY", "")
        info = arguments[2:]
    app = web.Application(client_max_size=2**30)
    server = Standin(release, crash_route, *info, key=key, has_tokenizer="--skip-tokenizer-init" not in arguments)
    app.router.add_route("*", "/{route:.*}", server.handle)
    web.run_app(app, host="127.0.0.1", port=port, print=None)


if __name__ == "__main__":
    main(sys.argv[1:])
