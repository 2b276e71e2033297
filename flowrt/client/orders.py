"""What the controller says, carried out in the order in which it came: lanes depend on it."""

from collections.abc import Callable

from flowrt.client.arrivals import Arrivals
from flowrt.client.asking import Asking
from flowrt.client.memory import Memory
from flowrt.client.params import Params
from flowrt.client.promised import Promised
from flowrt.errors import FlowError, RemoteProtocolError, Stopped
from flowrt.transport.lane import LaneSet
from flowrt.transport.store import TensorStore
from flowrt.wire import messages as m


class Orders:
    """Hands answers to whoever asked, tensors to whoever is named; ``end`` is told what ends the session."""

    def __init__(
        self,
        store: TensorStore,
        lanes: LaneSet,
        arrivals: Arrivals,
        params: Params,
        asking: Asking,
        promised: Promised,
        memory: Memory,
        end: Callable[[FlowError], None],
    ) -> None:
        self._store = store
        self._lanes = lanes
        self._arrivals = arrivals
        self._params = params
        self._asking = asking
        self._promised = promised
        self._memory = memory
        self._end = end

    def obey(self, message: m.Message) -> None:
        """One message of the controller. Raises RemoteProtocolError for what it has no business to say."""
        # Nearly all that is said is one of the first two.
        if isinstance(message, m.Grant):
            asked = self._asking.asked(message.request)
            if isinstance(asked, m.Pull):
                self._memory.granted(asked, message)
            for incoming in message.incoming:
                self._arrivals.begin(incoming)
            self._asking.answer(message.request, message)
        elif isinstance(message, m.Opened):
            self._promised.opened(message.request, message.first)
            self._asking.answer(message.request, message)
        else:
            self._obey_rarely(message)

    def _obey_rarely(self, message: m.Message) -> None:
        match message:
            case m.Committed(request, refused):
                asked = self._asking.asked(request)
                if isinstance(asked, m.Commit):
                    self._memory.ended(asked.slots, asked.leases)
                self._promised.committed(request, refused)
                self._asking.answer(request, message)
            case m.Refused(request):
                self._promised.refused(request)
                self._asking.answer(request, message)
            case m.Serve():
                self._arrivals.serve(message)
            case m.Free(columns, slots, groups):
                self._store.free(columns, slots, groups)
            case m.Signal(peer, lane, key, value):
                self._lanes.deliver(peer, lane, key, value)
            case m.Fetch():
                self._params.fetch(message)
            case m.ServeWeights():
                self._params.serve(message)
            case m.Retire():
                self._params.retire(message)
            case m.Stop(reason, code):
                self._end(Stopped(reason, code))
            case m.Drain():
                self._asking.leave()
            case m.Heartbeat():
                pass
            case _:
                raise RemoteProtocolError(f"the controller sent {type(message).__name__}, which only workers say")
