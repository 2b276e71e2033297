"""Controller process of a run.

``python launch/controller.py --config RUN/config.toml`` (or ``-m flowrt.launcher.controller_main``). Once the
controller listens, it logs its address and writes it to ``--ready-fd`` and to file ``address`` in the run directory.
"""

import argparse
import asyncio
import contextlib
import json
import logging
import os
import signal
import sys
from pathlib import Path
from time import monotonic

import msgspec

from flowrt.controller.events import EndRun, PreemptRun
from flowrt.controller.policies.admission import StrictLag
from flowrt.controller.server.server import Observability, Server
from flowrt.controller.state.controller_restart import STEP
from flowrt.controller.storage.integrity import LEDGER, check_not_behind_checkpoint
from flowrt.controller.storage.journals import DISCARDED, KEPT, FoundSamples, delete_unknown, read_journals
from flowrt.controller.storage.ledger import Ledger
from flowrt.controller.storage.recording_format import CoreInputs
from flowrt.controller.storage.recording_writer import EventRecording
from flowrt.controller.storage.sample_store import SAMPLES, SampleStore
from flowrt.errors import EXIT_BAD_INPUT, EXIT_FAILED, EXIT_INTERRUPTED, ConfigError, FlowError
from flowrt.launcher.observer import address_of
from flowrt.net.curve_keys import KEYS_VARIABLE, controller_keys
from flowrt.protocol.journals import journals_of
from flowrt.protocol.messages import Position, unpack
from flowrt.recipes import grpo
from flowrt.recipes.config import RunConfig, changed
from flowrt.recipes.config_io import from_file, to_toml
from flowrt.recipes.input_digests import changed_inputs
from flowrt.recipes.run_dir import CONFIG, address_file, check_summary_file, checkpoint_steps
from flowrt.runtime.addresses import Endpoint, parse_address
from flowrt.runtime.clock import MonotonicClock
from flowrt.runtime.command_line import Parser
from flowrt.runtime.event_loop import serve_loop
from flowrt.runtime.files import RunLock, atomic_write, partial_path, private_directory
from flowrt.runtime.host import reachable
from flowrt.runtime.parent_death import is_alive
from flowrt.runtime.resource_limits import check_descriptor_limit, raise_descriptor_limit
from flowrt.runtime.standard_streams import FULL, log_to_stderr
from flowrt.runtime.termination import EarlySignals, ignore_termination, termination_signals
from flowrt.runtime.waits import pause

log = logging.getLogger("flowrt")
BIND_RETRY_S = 0.25


def make_server(config: RunConfig, text: str, from_checkpoint: bool) -> tuple[Server, str]:
    """Create the server, not yet listening; returns it and the address to bind.

    If the previous controller died during the run, the new one recovers the state and the workers of the run;
    otherwise, and always with ``from_checkpoint``, it resumes from the newest checkpoint.

    Args:
        config: of the run.
        text: the configuration as TOML, which every worker receives.
        from_checkpoint: do not recover.
    """
    times = config.controller
    run_dir = Path(config.run_dir)
    keys = controller_keys(Path(times.keys)) if times.keys else None
    saved = max(checkpoint_steps(run_dir), default=0)
    check_not_behind_checkpoint(run_dir / LEDGER, saved, require_intact_wal=not from_checkpoint)
    ledger = Ledger(run_dir / LEDGER)
    clock = MonotonicClock()
    recovered = None if from_checkpoint else ledger.recover()
    if recovered is None:
        ledger.step_lines(saved)  # raises if the ledger lacks the saved steps, before anything is rolled back
        position = ledger.resume(saved, clock.now())
        delete_unknown(run_dir, ledger.run_attempt)
    else:
        position = ledger.position(recovered.numbers.get(STEP, saved))
        log.info("recovering as term %d with the workers %s", ledger.term, ", ".join(sorted(recovered.members)))
    if position.step:
        log.info("resuming after step %d", position.step - 1)
    kept = kept_samples(config, ledger, position)
    if recovered is None:
        numbers = dict(position.numbers)
        before = dict.fromkeys([name for name in numbers if name.startswith((KEPT, DISCARDED))], 0.0)
        for name, value in (counts := {**before, **kept.numbers()}).items():
            ledger.add_summary_value(name, value, position.step)
        position = msgspec.structs.replace(position, numbers=tuple({**numbers, **counts}.items()))
    inputs = CoreInputs(
        config=text,
        term=ledger.term,
        position=position,
        recovered=recovered,
        outcomes=tuple(ledger.outcomes()) if grpo.curriculum(config).history else (),
        journals=journals_of(ledger.run_attempt) if config.checkpoint.samples else "",
        kept=kept.kept,
    )
    server = Server(
        core=grpo.core(config, inputs),
        config=text,
        run_dir=run_dir,
        heartbeat_s=times.heartbeat_s,
        request_timeout_s=grpo.request_timeout_s(config),
        clock=clock,
        ledger=ledger,
        keys=keys,
        observability=Observability(
            samples=sample_store(config),
            recording=EventRecording(run_dir, inputs, config.recorder.mb * 1_000_000) if config.recorder.mb else None,
            timeline_bytes=config.timeline.mb * 1_000_000,
            guard_command=config.guards.command,
        ),
    )
    if from_checkpoint or (recovered is None and not address_file(run_dir).exists()):
        return server, times.bind
    # The port that the workers know; the host to bind may differ from the host that they connect to.
    port = parse_address(address_of(run_dir)).port
    return server, Endpoint(parse_address(times.bind).host, port).address


def kept_samples(config: RunConfig, ledger: Ledger, position: Position) -> FoundSamples:
    """The samples that journals of earlier starts of the run have, and that it may still train."""
    starts = ledger.starts()
    if not config.checkpoint.samples or len(starts) < 2:
        return FoundSamples()
    bound = StrictLag(config.max_staleness)
    journals = read_journals(
        Path(config.run_dir), starts, unpack(position.passed), lambda oldest: bound.may_train(starts[-1], oldest)
    )
    if sentence := journals.sentence():
        log.info("what was generated before: %s", sentence)
    return journals


def sample_store(config: RunConfig) -> SampleStore | None:
    """The sample store of a run, not opened yet; None if it stores no samples."""
    if not config.samples.per_step:
        return None
    path = Path(config.run_dir) / SAMPLES
    return SampleStore(path, per_step=config.samples.per_step, max_bytes=config.samples.mb * 1_000_000)


async def serve(config: RunConfig, text: str, arguments: argparse.Namespace, early: EarlySignals) -> int:
    """Run the controller until the run ends; writes summary.json and returns the exit code.

    Signals in ``early`` end the run as soon as it can be ended in order.
    """
    ready_fd = arguments.ready_fd
    check_summary_file(Path(config.run_dir))
    server, where = make_server(config, text, arguments.from_checkpoint)
    retry_s = 0.0 if where == config.controller.bind else config.controller.reconnect_timeout_s
    try:
        _take_over(config, text, arguments)
        address = reachable(await bind(server, where, retry_s), config.controller.host)
    except (FlowError, OSError):
        server.close()
        raise
    for sentence in changed_inputs(config) if arguments.from_checkpoint else ():
        server.warn(sentence)
    loop = asyncio.get_running_loop()
    if config.guards.health:
        server.watch_health()
    loop.add_signal_handler(signal.SIGINT, server.end, "interrupted (SIGINT)", EXIT_INTERRUPTED)
    for number in termination_signals():
        loop.add_signal_handler(number, _terminate, server, config, number)
    for number in early.received[:1]:
        loop.call_soon(_terminate, server, config, number)
    peers = f"for the keys of {config.controller.keys}" if config.controller.keys else "for this machine only: no keys"
    log.info("listening on %s, %s", address, peers)
    atomic_write(address_file(Path(config.run_dir)), address + "\n")
    if ready_fd >= 0:
        os.write(ready_fd, address.encode() + b"\n")
        os.close(ready_fd)
    # Removed at the end of the run: another process may listen at this address afterwards.
    ended = await server.run(lambda: address_file(Path(config.run_dir)).unlink(missing_ok=True))
    ignore_termination()
    try:
        _summarize(server, config, ended)
    except (FlowError, OSError) as error:
        with contextlib.suppress(OSError):
            partial_path(Path(config.run_dir) / "summary.json").unlink(missing_ok=True)
        log.log(logging.WARNING if ended.code else logging.ERROR, "the summary cannot be written: %s", error)
        return ended.code or EXIT_FAILED
    server.ledger.close()
    return ended.code


def _take_over(config: RunConfig, text: str, arguments: argparse.Namespace) -> None:
    """Replace the files of an earlier start of the run; called after all checks of the run directory."""
    run_dir = Path(config.run_dir)
    started_with = Path(arguments.config).resolve()
    if started_with.parent == run_dir.resolve() and started_with.name != CONFIG:
        atomic_write(run_dir / CONFIG, text)
    for left in run_dir.glob(f".{CONFIG}.*"):
        if left != started_with and left.suffix[1:].isdecimal() and not is_alive(int(left.suffix[1:])):
            left.unlink(missing_ok=True)  # left by a launcher that was killed
    if arguments.from_checkpoint:
        (run_dir / "summary.json").unlink(missing_ok=True)


def _terminate(server: Server, config: RunConfig, number: signal.Signals) -> None:
    """End the run; if checkpoints are enabled, save the trained steps first, so that the run can be resumed."""
    reason = f"interrupted ({number.name})"
    saved = max(checkpoint_steps(Path(config.run_dir)), default=0)
    if config.checkpoint.every and config.checkpoint.preemption_save_timeout_s:
        log.info("terminated: saving the steps after step-%06d before the run ends", saved)
        server.preempt(PreemptRun(reason, EXIT_INTERRUPTED, saved))
    else:
        server.end(reason, EXIT_INTERRUPTED)


async def bind(server: Server, where: str, retry_s: float) -> str:
    """Bind the server's socket; returns the address. Retries for ``retry_s`` seconds if the port is taken.

    The workers of a restarted controller know only this port. Raises ConfigError if the port is still taken then.
    """
    end_s = monotonic() + retry_s
    warned = False
    while True:
        try:
            return server.bind(where)
        except ConfigError as taken:
            if monotonic() >= end_s:
                raise
            if not warned:
                log.warning("%s; the workers know only this address: retrying for %.0f s", taken, retry_s)
            warned = True
        await pause(BIND_RETRY_S)


def _summarize(server: Server, config: RunConfig, ended: EndRun) -> None:
    """Write summary.json atomically."""
    summary = {
        "recipe": config.recipe,
        "seed": config.seed,
        **server.summary(config.max_staleness),
        "exit_code": ended.code,
        "reason": ended.reason,
    }
    atomic_write(Path(config.run_dir) / "summary.json", json.dumps(summary, indent=2, allow_nan=False) + "\n")


def main() -> int:
    early = EarlySignals()
    parser = Parser(description="flowrt controller")
    parser.add_argument("--config", required=True, help="the run's config.toml")
    parser.add_argument("--ready-fd", type=int, default=-1, help="file descriptor to write the address to")
    parser.add_argument(
        "--from-checkpoint",
        action="store_true",
        help="resume from the newest checkpoint; do not recover the workers of a controller that died",
    )
    parser.add_argument(
        "--keys", default=os.environ.get(KEYS_VARIABLE, ""), help="directory made by flowrt keys (controller.keys)"
    )
    log_to_stderr()
    try:
        arguments = parser.parse_args()
        raise_descriptor_limit()
        check_descriptor_limit()
        config = from_file(Path(arguments.config))
        if arguments.keys:
            config = changed(config, {"controller.keys": arguments.keys})
        run_dir = Path(config.run_dir)
        private_directory(run_dir)
        RunLock(run_dir)  # held until this process ends
        return serve_loop(serve(config, to_toml(config), arguments, early))
    except FlowError as error:
        log.error("%s", error)
        return EXIT_BAD_INPUT
    except OSError as error:
        if error.errno not in FULL:
            log.error("%s", error)
            return EXIT_BAD_INPUT
        log.error(
            "the files of the run in %s cannot be written: %s; free disk space, then flowrt resume %s",
            *(config.run_dir, error.strerror, config.run_dir),
        )
        return EXIT_FAILED


if __name__ == "__main__":
    sys.exit(main())
