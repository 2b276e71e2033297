"""The controller of a run: one process, one script.

``python launch/controller.py --config RUN/config.toml`` (or ``-m flowrt.launch.controller``). It logs its address and
writes it to ``--ready-fd``, so that whoever starts workers need not guess when and where it listens.
"""

import argparse
import asyncio
import json
import logging
import os
import signal
import sys
from pathlib import Path

from flowrt.controller.core import Core
from flowrt.controller.server import Server
from flowrt.errors import EXIT_BAD_INPUT, EXIT_INTERRUPTED, FlowError
from flowrt.recipes import grpo
from flowrt.recipes.config import RunConfig
from flowrt.recipes.load import from_toml
from flowrt.wire.loops import serve_loop

log = logging.getLogger("flowrt")


def make_server(config: RunConfig, text: str) -> Server:
    """A controller for this configuration, not yet listening."""
    flow = grpo.dataflow(config)
    core = Core(grpo.settings(config), flow, grpo.policies(config))
    times = config.controller
    return Server(core, flow.columns, text, Path(config.run_dir), times.heartbeat_s, times.wait_s)


async def serve(config: RunConfig, text: str, ready_fd: int) -> int:
    """Run the controller until the run ends; writes summary.json and returns the exit code."""
    server = make_server(config, text)
    address = server.bind(config.controller.bind)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, server.end, f"interrupted ({number.name})", EXIT_INTERRUPTED)
    log.info("listening on %s", address)
    if ready_fd >= 0:
        os.write(ready_fd, address.encode() + b"\n")
        os.close(ready_fd)
    ended = await server.run()
    summary = {
        "recipe": config.recipe,
        "seed": config.seed,
        **server.summary(config.staleness),
        "exit_code": ended.code,
        "reason": ended.reason,
    }
    aside = Path(config.run_dir) / ".summary.json.part"
    aside.write_text(json.dumps(summary, indent=2) + "\n")
    aside.rename(Path(config.run_dir) / "summary.json")
    server.ledger.close()
    return ended.code


def main() -> int:
    parser = argparse.ArgumentParser(description="flowrt controller")
    parser.add_argument("--config", required=True, help="the run's config.toml")
    parser.add_argument("--ready-fd", type=int, default=-1, help="file descriptor to write the address to")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    try:
        text = Path(arguments.config).read_text()
        return serve_loop(serve(from_toml(text), text, arguments.ready_fd))
    except (FlowError, OSError) as error:
        log.error("%s", error)
        return EXIT_BAD_INPUT


if __name__ == "__main__":
    sys.exit(main())
