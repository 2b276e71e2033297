"""Every error that flowrt raises on purpose.

::

    FlowError
      ConfigError            the input is wrong: exit code 2, nothing was started
      ProtocolError
        LocalProtocolError   we were about to say something illegal (our bug)
        RemoteProtocolError  they said something illegal, or speak another protocol version
      WaitExpired            a wait reached its deadline; names what it waited for
      TransferError          tensors did not arrive; names the lane and the peer
      OverBudget             a store of tensors has no room; names its budget and what would not fit
      EngineError            a model could not be loaded, run or swapped
        EngineGone           the server behind an engine died, or does not answer in time
      Stopped                the run is over; carries the reason and the exit code
      Drained                this worker was told to leave: it gets nothing more to do
"""


class FlowError(Exception):
    """Base of the tree; its text is one sentence that names the thing, its state and the fix."""


class ConfigError(FlowError):
    """The user's input is wrong."""


class ProtocolError(FlowError):
    """The conversation broke its rules."""


class LocalProtocolError(ProtocolError):
    """This side was about to break the rules."""


class RemoteProtocolError(ProtocolError):
    """The other side broke the rules."""


class WaitExpired(FlowError):
    """A deadline passed while waiting."""


class TransferError(FlowError):
    """Tensors did not arrive."""


class OverBudget(FlowError):
    """A store of tensors has no room."""


class EngineError(FlowError):
    """A model failed to load, run or take weights."""


class EngineGone(EngineError):
    """A server that an engine needs has died or hangs."""


class Stopped(FlowError):
    """The controller ended the run.

    ``code`` is the exit code that the process should leave with.
    """

    def __init__(self, reason: str, code: int) -> None:
        super().__init__(reason)
        self.reason = reason
        self.code = code


class Drained(FlowError):
    """This worker was told to leave; it finishes what it has begun and pulls nothing more."""


MISTAKES = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    MemoryError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""What raises these where nothing of the kind is expected is not to be trusted any more."""

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_BAD_INPUT = 2
EXIT_STALLED = 3
EXIT_DISMISSED = 4  # a worker that counts as gone; the run goes on, and another one may take its place
EXIT_INTERRUPTED = 130
