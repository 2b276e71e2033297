"""A controller that comes back is found, and told all that it may not know."""

import asyncio
import dataclasses
import logging
from collections.abc import Iterator

from flowrt.client.asking import Asking
from flowrt.client.line import Line
from flowrt.client.memory import Memory
from flowrt.client.params import Params
from flowrt.errors import ConfigError, LocalProtocolError, WaitExpired
from flowrt.transport.store import TensorStore
from flowrt.waiting import pause
from flowrt.wire import messages as m

log = logging.getLogger(__name__)
TRY_S = 5.0
"""A controller that went away again before it said welcome is not waited for longer than this at a time."""
AGAIN_S = 0.25


async def find_again(lost: Line, before: m.Welcome) -> tuple[Line, m.Welcome]:
    """Greet whoever answers at the same address as one that was there before.

    Raises WaitExpired when nobody lets this worker in within the seconds that the run allows, Stopped when the run has
    ended meanwhile.
    """
    hello = dataclasses.replace(lost.hello, term=before.term)
    loop = asyncio.get_running_loop()
    log.warning("the controller %s is gone; waiting for it", lost.address)
    end_s = loop.time() + before.return_s
    reason = "nobody answered"
    while (left_s := end_s - loop.time()) > 0:
        line = Line(lost.address, hello, lost.keys)
        try:
            welcome = await line.greet(min(left_s, TRY_S))
        except LocalProtocolError as refusal:
            # It may not have noticed yet that this worker's old connection is closed.
            reason = str(refusal)
            await pause(AGAIN_S)
        except ConfigError as strange:
            # This worker was let in before: whoever listens there now is not the controller, and may go again.
            reason = str(strange)
            await pause(AGAIN_S)
        except WaitExpired:
            reason = "nobody answered"
        else:
            log.warning("the controller %s is back (term %d, was %d)", lost.address, welcome.term, before.term)
            return line, welcome
    raise WaitExpired(
        f"controller {lost.address} went away and did not come back within {before.return_s:.0f} s: {reason}"
    )


def retell(memory: Memory, asking: Asking, params: Params, store: TensorStore) -> Iterator[m.Message]:
    """Everything that the controller has to know again, in the order in which it can use it.

    What is in use comes first, then the work in hand, then what is still to be answered: an answer may have been lost
    on its way. The list of all that is held ends it.
    """
    yield from params.in_use()
    yield from memory.leases()
    yield from memory.again()
    yield from asking.again()
    yield m.Holds(store.inventory(), params.whole())
