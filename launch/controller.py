"""The controller of a run: one process, one script.

``python launch/controller.py --config RUN/config.toml`` (or ``-m flowrt.launch.controller``). It logs its address and
writes it to ``--ready-fd`` and to ``address`` in the run directory, so that whoever starts workers need not
guess when and where it listens.
"""

import argparse
import asyncio
import dataclasses
import json
import logging
import os
import signal
import sys
from pathlib import Path
from time import monotonic

from flowrt.launch.status import address_of

from flowrt.clock import MonotonicClock
from flowrt.controller.core import Core
from flowrt.controller.events import End, Suspend
from flowrt.controller.ledger import Ledger
from flowrt.controller.ledger_file import LEDGER, check_knows
from flowrt.controller.server import Server
from flowrt.controller.walk import STEP
from flowrt.errors import EXIT_BAD_INPUT, EXIT_FAILED, EXIT_INTERRUPTED, ConfigError, FlowError
from flowrt.lock import RunLock
from flowrt.recipes import grpo
from flowrt.recipes.config import RunConfig
from flowrt.recipes.load import from_toml
from flowrt.recipes.paths import address_file, checkpoint_steps, write_whole
from flowrt.waiting import pause
from flowrt.wire.hosts import reachable
from flowrt.wire.keys import KEYS_VARIABLE, controller_keys
from flowrt.wire.loops import serve_loop

log = logging.getLogger("flowrt")
PART = ".summary.json.part"
TRY_S = 0.25


def make_server(config: RunConfig, text: str, anew: bool) -> tuple[Server, str]:
    """A controller for this configuration, not yet listening, and where it is to listen.

    If the one before it did not end the run, it comes back to the workers of that one; otherwise, and ``anew`` in any
    case, it goes on from the newest checkpoint.
    """
    flow, times, run_dir = grpo.dataflow(config), config.controller, Path(config.run_dir)
    keys = controller_keys(Path(times.keys)) if times.keys else None
    saved = max(checkpoint_steps(run_dir), default=0)
    check_knows(run_dir / LEDGER, saved, to_the_end=not anew)
    ledger, clock = Ledger(run_dir / LEDGER), MonotonicClock()
    remains = None if anew else ledger.recall()
    if remains is None:
        position = ledger.resume(saved, clock.now())
    else:
        position = ledger.position(remains.numbers.get(STEP, saved))
        log.info("coming back as term %d to %s", ledger.term, ", ".join(sorted(remains.crew)))
    if position.step:
        log.info("going on after step %d", position.step - 1)
    settings = dataclasses.replace(grpo.settings(config), position=position)
    core = Core(settings, flow, grpo.policies(config), ledger.term, remains)
    server = Server(core, flow.columns, text, run_dir, times.heartbeat_s, times.wait_s, clock, ledger, keys)
    if anew or (remains is None and not address_file(run_dir).exists()):
        return server, times.bind
    # Where workers look for it, or will: perhaps none had come yet. It may be bound under another name than they use.
    return server, f"{times.bind.rpartition(':')[0]}:{address_of(run_dir).rpartition(':')[2]}"


async def serve(config: RunConfig, text: str, ready_fd: int, anew: bool) -> int:
    """Run the controller until the run ends; writes summary.json and returns the exit code."""
    server, where = make_server(config, text, anew)
    patience_s = 0.0 if where == config.controller.bind else config.controller.return_s
    address = reachable(await listening(server, where, patience_s), config.controller.host)
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, server.end, "interrupted (SIGINT)", EXIT_INTERRUPTED)
    loop.add_signal_handler(signal.SIGTERM, _terminate, server, config)
    only = f"for the keys of {config.controller.keys}" if config.controller.keys else "for this machine only: no keys"
    log.info("listening on %s, %s", address, only)
    write_whole(address_file(Path(config.run_dir)), address + "\n")
    if ready_fd >= 0:
        os.write(ready_fd, address.encode() + b"\n")
        os.close(ready_fd)
    # Nobody shall look for a controller where another process may soon listen.
    ended = await server.run(lambda: address_file(Path(config.run_dir)).unlink(missing_ok=True))
    try:
        _summarize(server, config, ended)
    except (FlowError, OSError) as error:
        (Path(config.run_dir) / PART).unlink(missing_ok=True)
        log.log(logging.WARNING if ended.code else logging.ERROR, "the summary cannot be written: %s", error)
        return ended.code or EXIT_FAILED
    server.ledger.close()
    return ended.code


def _terminate(server: Server, config: RunConfig) -> None:
    """The machine is about to be taken away, and the run shall go on elsewhere: with all that it has trained."""
    reason, kept = "interrupted (SIGTERM)", max(checkpoint_steps(Path(config.run_dir)), default=0)
    if config.checkpoint.every and config.checkpoint.drain_s:
        log.info("terminated: what was trained after step-%06d is saved first", kept)
        server.suspend(Suspend(reason, EXIT_INTERRUPTED, kept))
    else:
        server.end(reason, EXIT_INTERRUPTED)


async def listening(server: Server, where: str, patience_s: float) -> str:
    """Listen; returns the address. Raises ConfigError when somebody else still does after so many seconds.

    Workers look for a controller that comes back at one place only, for so long; who took it meanwhile may go again.
    """
    end_s = monotonic() + patience_s
    tried = False
    while True:
        try:
            return server.bind(where)
        except ConfigError as taken:
            if monotonic() >= end_s:
                raise
            if not tried:
                log.warning("%s; the workers look for the controller there: trying for %.0f s", taken, patience_s)
            tried = True
        await pause(TRY_S)


def _summarize(server: Server, config: RunConfig, ended: End) -> None:
    """Write summary.json, whole or not at all."""
    summary = {
        "recipe": config.recipe,
        "seed": config.seed,
        **server.summary(config.staleness),
        "exit_code": ended.code,
        "reason": ended.reason,
    }
    aside = Path(config.run_dir) / PART
    aside.write_text(json.dumps(summary, indent=2) + "\n")
    aside.rename(Path(config.run_dir) / "summary.json")


def main() -> int:
    parser = argparse.ArgumentParser(description="flowrt controller")
    parser.add_argument("--config", required=True, help="the run's config.toml")
    parser.add_argument("--ready-fd", type=int, default=-1, help="file descriptor to write the address to")
    parser.add_argument(
        "--anew",
        action="store_true",
        help="go on from the newest checkpoint, not with the workers of a controller that crashed",
    )
    parser.add_argument(
        "--keys", default=os.environ.get(KEYS_VARIABLE, ""), help="directory that flowrt keys made (controller.keys)"
    )
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    try:
        text = Path(arguments.config).read_text()
        config = from_toml(text)
        if arguments.keys:
            config = dataclasses.replace(config, controller=dataclasses.replace(config.controller, keys=arguments.keys))
        run_dir = Path(config.run_dir)
        run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        RunLock(run_dir)  # until this process ends
        return serve_loop(serve(config, text, arguments.ready_fd, arguments.anew))
    except (FlowError, OSError) as error:
        log.error("%s", error)
        return EXIT_BAD_INPUT


if __name__ == "__main__":
    sys.exit(main())
