"""Process of one exporter: feeds it from the run directory until the run is over or SIGTERM arrives.

``python -m flowrt.observability.exporters.process --run RUN --to NAME [--target PATH] [--follow] [--steps A:B]``
"""

import argparse
import logging
import os
import signal
import sys
from functools import partial
from pathlib import Path
from threading import Event, Thread
from time import monotonic

from flowrt.errors import EXIT_BAD_INPUT, EXIT_FAILED, EXIT_OK, ConfigError
from flowrt.observability.exporters.feed import Feed
from flowrt.observability.exporters.sink import TENSORBOARD, WANDB, Sink, close_timeout_s
from flowrt.runtime.standard_streams import log_to_stderr
from flowrt.runtime.termination import termination_signals
from flowrt.runtime.waits import blocking, join_thread

log = logging.getLogger("flowrt")
POLL_S = 0.5


def make_sink(name: str, run_dir: Path, target: Path, steps: str) -> Sink:
    """The exporter of this name. Raises ConfigError if it cannot be created.

    ``target`` is the directory for its files, ``steps`` the range of those that will be passed on; empty: all.
    """
    if name == TENSORBOARD:
        from flowrt.observability.exporters.tensorboard_files import TensorBoardFiles

        return TensorBoardFiles(target, parse_steps(steps)[0])
    if name == WANDB:
        from flowrt.observability.exporters.wandb_run import WandbRun

        return WandbRun(run_dir, target, steps)
    from flowrt.observability.exporters.own import OwnExporter

    return OwnExporter(name)


def follow(feed: Feed, stop: Event, *, is_live: bool) -> None:
    """Pass on the lines of the run; with ``is_live``, also new ones until the run is over or ``stop`` is set."""
    while is_live:
        is_over = feed.is_over(monotonic())
        feed.read_new()
        if is_over or blocking(partial(stop.wait, POLL_S), POLL_S, "more of the run", "its controller"):
            break
    feed.read_new(is_last=True)


def parse_steps(text: str) -> tuple[int, int | None]:
    """The first and the last step of A:B, A: or :B, or of one number. Raises ConfigError for other texts."""
    first, colon, last = text.partition(":")
    last = last if colon else first
    if not all(
        number == "" or (number.isascii() and number.isdecimal() and len(number) < 16) for number in (first, last)
    ):
        raise ConfigError(f"--steps takes A:B, two step numbers, not {text!r:.80}")
    steps = int(first or 0), int(last) if last else None
    if steps[1] is not None and steps[1] < steps[0]:
        raise ConfigError(f"--steps {text}: the last step is before the first")
    return steps


def main() -> int:
    parser = argparse.ArgumentParser(description="process of one exporter")
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--to", required=True)
    parser.add_argument("--target", type=Path, default=Path())
    parser.add_argument("--steps", default="")
    parser.add_argument("--follow", action="store_true")
    arguments = parser.parse_args()
    log_to_stderr()
    stop = Event()
    for number in (*termination_signals(), signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    try:
        first, last = parse_steps(arguments.steps)
        sink = make_sink(arguments.to, arguments.run, arguments.target, arguments.steps)
        follow(Feed(arguments.run, sink, first, last), stop, is_live=arguments.follow)
        text, code = _closed(sink, close_timeout_s(arguments.to))
        if text:
            log.info("%s", text)
    except ConfigError as error:
        log.error("%s", error)
        return EXIT_BAD_INPUT
    except Exception as error:  # noqa: BLE001 (of the user's class, and of libraries)
        log.error("exporter %s failed: %s: %s", arguments.to, type(error).__name__, error)
        return EXIT_FAILED
    if code != EXIT_OK:
        _leave(code)
    return code


def _closed(sink: Sink, timeout_s: float) -> tuple[str, int]:
    """Close the exporter; returns its last message and an exit code. A close that hangs is abandoned."""
    messages: list[str] = []
    failed: list[BaseException] = []

    def close() -> None:
        try:
            messages.append(sink.close())
        except Exception as error:  # noqa: BLE001 (of the user's class, and of libraries)
            failed.append(error)

    closing = Thread(target=close, daemon=True)
    closing.start()
    has_ended = join_thread(closing, timeout_s)
    if failed:
        return f"its end failed: {type(failed[0]).__name__}: {failed[0]}", EXIT_FAILED
    if not has_ended:
        return f"it did not end within {timeout_s:.0f} s and is left", EXIT_FAILED
    return messages[0], EXIT_OK


def _leave(code: int) -> None:
    """Exit without joining threads that hang."""
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    sys.exit(main())
