"""How the torchruns of several hosts find each other: by a store of the launcher's, in which nothing is pickled.

torchrun's own way (c10d) pickles its state into a store that whoever reaches the port can write to, and each agent
unpickles what it finds there. All that is needed is a number for each host: the store counts them.
"""

from datetime import timedelta

from torch.distributed import PrefixStore, Store, TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)

COUNTED = "flowrt"
"""The name of this way among torchrun's ``--rdzv-backend``."""


class Counted(RendezvousHandler):
    """The first to come is the first host, and so on; their ranks meet in the same store."""

    def __init__(self, host: str, port: int, hosts: int, run_id: str, deadline_s: float) -> None:
        self._host, self._port = host, port
        self._hosts = hosts
        self._run_id = run_id
        self._deadline = timedelta(seconds=deadline_s)

    def next_rendezvous(self) -> RendezvousInfo:
        """Raises RendezvousClosedError when all places are taken."""
        tcp = TCPStore(self._host, self._port, is_master=False, wait_for_workers=False, timeout=self._deadline)
        store: Store = PrefixStore(self._run_id, tcp)
        number = int(store.add("hosts", 1)) - 1
        if number >= self._hosts:
            raise RendezvousClosedError(f"{self._hosts} hosts have come to {self._host}:{self._port} already")
        return RendezvousInfo(store, number, self._hosts, RendezvousStoreInfo(self._host, self._port))

    @property
    def use_agent_store(self) -> bool:
        """Ranks meet there, too: no host opens a port for them."""
        return True

    def get_backend(self) -> str:
        return COUNTED

    def get_run_id(self) -> str:
        return self._run_id

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        """Nothing: nobody comes late, and nobody comes again."""

    def num_nodes_waiting(self) -> int:
        return 0

    def shutdown(self) -> bool:
        return True


def register(deadline_s: float) -> None:
    """Teach it to the torchrun of this process; hosts wait so long for each other."""

    def make(parameters: RendezvousParameters) -> Counted:
        host, _, port = parameters.endpoint.rpartition(":")
        return Counted(host, int(port), parameters.max_nodes, parameters.run_id, deadline_s)

    rendezvous_handler_registry.register(COUNTED, make)
