"""Log lines of the processes of a run: how they are written, and how a launcher reads the last error."""

import logging
import sys

from flowrt.runtime.streams import prepare_streams

FORMAT = "%(asctime)s %(levelname)s %(message)s"


def log_to_stderr() -> None:
    """Log everything from INFO on to stderr, which the launcher redirects to the log of the process.

    A full disk drops lines, see `flowrt.runtime.streams`. Called once, before anything is printed.
    """
    prepare_streams()
    logging.basicConfig(level=logging.INFO, format=FORMAT, stream=sys.stderr)


def error_message(line: str) -> str:
    """The message of a line that was logged as an error; any other line is returned unchanged."""
    return line.rpartition(f" {logging.getLevelName(logging.ERROR)} ")[2]
