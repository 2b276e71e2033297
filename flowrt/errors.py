"""Exceptions of flowrt, and the exit codes of its processes.

::

    FlowError
      ConfigError            the input is wrong: exit code 2, nothing was started
      ProtocolError
        LocalProtocolError   this process was about to send or do something illegal (a bug of its own)
        RemoteProtocolError  the peer sent something illegal, or has another protocol version
      WaitExpired            a wait reached its deadline; names what it waited for
      TransferError          tensors did not arrive; names the lane and the peer
      OverBudget             a tensor store has no room; names its budget and the rows that do not fit
      EngineError            a model could not be loaded, run or updated
        EngineGone           the server behind an engine died, or does not answer in time
      Stopped                the run is over; carries the reason and the exit code
      Drained                this worker is drained: it gets no more work
"""

from collections.abc import Iterable
from difflib import get_close_matches


class FlowError(Exception):
    """Base class. Its text is one sentence that names the object, its state and the fix."""


MAX_MISTAKES = 8
"""Maximum number of mistakes in the text of an error."""


class ConfigError(FlowError):
    """The user's input is wrong. ``args``: a sentence on each mistake; the text of several has a line for each."""

    def __str__(self) -> str:
        if len(self.args) <= 1:
            return super().__str__()
        more = [f"and {len(self.args) - MAX_MISTAKES} more"] if len(self.args) > MAX_MISTAKES else []
        return "\n  ".join([f"there are {len(self.args)} mistakes:", *self.args[:MAX_MISTAKES], *more])


class ProtocolError(FlowError):
    """A message or call violates the protocol."""


class LocalProtocolError(ProtocolError):
    """This process was about to violate the protocol."""


class RemoteProtocolError(ProtocolError):
    """The peer has violated the protocol."""


class WaitExpired(FlowError):
    """A wait has reached its deadline."""


class TransferError(FlowError):
    """Tensors did not arrive."""


class OverBudget(FlowError):
    """A tensor store has no room."""


class EngineError(FlowError):
    """A model could not be loaded, run or updated."""


class EngineGone(EngineError):
    """The server behind an engine has died, or does not answer in time."""


class Stopped(FlowError):
    """The controller has ended the run or dismissed this worker. ``code`` is the exit code for this process."""

    def __init__(self, reason: str, code: int) -> None:
        super().__init__(reason)
        self.reason = reason
        self.code = code


class Drained(FlowError):
    """This worker is drained: it finishes the work that it has, and pulls no more."""


PROGRAMMING_ERRORS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    MemoryError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""Exceptions that mean a bug where they are not expected; an object that raised one is not used any more."""

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_BAD_INPUT = 2
EXIT_STALLED = 3
EXIT_DISMISSED = 4  # the controller has dismissed the worker; the run continues, and another worker may replace it
EXIT_GUARD = 5  # a guard has stopped the run, after a checkpoint
EXIT_INTERRUPTED = 130

VIOLATION = "protocol violation"
"""Prefix of the dismissal reason of a worker that violated the protocol."""


def first_line(error: BaseException) -> str:
    """The first line of an error's text; the name of its type without one."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def refuse(*checks: Iterable[str]) -> None:
    """Raise ConfigError with all mistakes of these checks, if there is one.

    Args:
        checks: sentences, each on one mistake. A ConfigError that a check raises has its last ones.
    """
    mistakes: dict[str, None] = {}
    for check in checks:
        try:
            for sentence in check:
                mistakes[sentence] = None
        except ConfigError as error:
            mistakes |= dict.fromkeys(error.args)
    if mistakes:
        raise ConfigError(*mistakes)


MAX_NAMES = 20
"""Maximum number of names that an error message lists."""


def suggested(name: str, known: Iterable[str]) -> str:
    """The end of an error message about an unknown name: the most similar known name, or up to MAX_NAMES of them."""
    known = sorted(known)
    if close := get_close_matches(name, known, 1):
        return f"; did you mean {close[0]!r}?"
    more = f", and {len(known) - MAX_NAMES} more" if len(known) > MAX_NAMES else ""
    return f"; there is {', '.join(map(repr, known[:MAX_NAMES])) or 'none'}{more}"
