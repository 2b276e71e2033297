"""A test that leaves a ZeroMQ context open fails by its own name.

Otherwise the cycle collector closes the context and its sockets during a later test, which fails for that, or hangs
while a socket lingers.
"""

import traceback
from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary

import pytest
import zmq

_opened_by: "WeakKeyDictionary[zmq.Context[Any], str]" = WeakKeyDictionary()
"""The calls that opened each context of this process."""
CALLS = 4


@pytest.fixture(scope="session", autouse=True)
def _recorded_contexts() -> Iterator[None]:
    make = zmq.Context.__init__

    def recorded(context: "zmq.Context[Any]", *arguments: Any, **named: Any) -> None:
        make(context, *arguments, **named)
        calls = [call for call in traceback.extract_stack()[:-1] if "site-packages" not in call.filename]
        _opened_by[context] = "".join(traceback.format_list(calls[-CALLS:]))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(zmq.Context, "__init__", recorded)
        yield


def open_contexts() -> "dict[zmq.Context[Any], str]":
    """The open contexts of this process, and the calls that opened each."""
    return {context: opened_by for context, opened_by in list(_opened_by.items()) if not context.closed}


@pytest.fixture(autouse=True)
def _closed_contexts(_recorded_contexts: None) -> Iterator[None]:
    """Fail a test that leaves a context open, and close that context."""
    before = open_contexts()
    yield
    left = {context: opened_by for context, opened_by in open_contexts().items() if context not in before}
    for context in left:
        context.destroy(linger=0)
    assert not left, "the test leaves ZeroMQ contexts open that were opened by\n" + "\n".join(left.values())
