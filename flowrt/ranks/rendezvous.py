"""Rendezvous of torchruns on several hosts: a store that counts hosts, and a torchrun backend that uses it.

torchrun's c10d backend pickles its state into a store that every process with access to the port can write to, and
each agent unpickles it. The backend here needs one number per host, and unpickles nothing. A process with access to the
port can still disturb the rendezvous.

Usage: ``python -m flowrt.ranks.rendezvous --host HOST --ready-fd FD`` serves the store on a port chosen by the kernel,
writes HOST:PORT to the descriptor and runs until SIGINT or SIGTERM.
"""

import argparse
import os
import signal
import socket
import sys
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

from flowrt.errors import EXIT_INTERRUPTED
from flowrt.runtime.addresses import Endpoint, split_endpoint

COUNTING = "flowrt"
"""Name of this backend for torchrun's ``--rdzv-backend``."""
STORE_TIMEOUT = timedelta(minutes=5)


def serve_tcp_store(host: str, deadline: timedelta, members: int | None = None) -> TCPStore:
    """A TCPStore that other processes can join, on ``host`` and a port chosen by the kernel.

    Unlike torch's default it does not listen on all interfaces. Requests to it fail after ``deadline``. Raises OSError
    if ``host`` is not an address of this host.
    """
    family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    with socket.create_server(address, family=family) as listener:
        port = listener.getsockname()[1]
        return TCPStore(
            host,
            port,
            members,
            is_master=True,
            timeout=deadline,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )


class CountingRendezvous(RendezvousHandler):
    """Numbers hosts in order of arrival; the ranks of all hosts use the same store."""

    def __init__(self, host: str, port: int, hosts: int, run_id: str, deadline_s: float) -> None:
        self._host = host
        self._port = port
        self._hosts = hosts
        self._run_id = run_id
        self._deadline = timedelta(seconds=deadline_s)

    def next_rendezvous(self) -> RendezvousInfo:
        """Join as the next host. Raises RendezvousClosedError if ``hosts`` have joined already."""
        tcp = TCPStore(self._host, self._port, is_master=False, wait_for_workers=False, timeout=self._deadline)
        store: Store = PrefixStore(self._run_id, tcp)
        number = int(store.add("hosts", 1)) - 1
        if number >= self._hosts:
            raise RendezvousClosedError(
                f"{self._hosts} hosts have already joined at {Endpoint(self._host, self._port)}"
            )
        return RendezvousInfo(store, number, self._hosts, RendezvousStoreInfo(self._host, self._port))

    @property
    def use_agent_store(self) -> bool:
        """True: ranks use the same store, so no host opens another port."""
        return True

    def get_backend(self) -> str:
        return COUNTING

    def get_run_id(self) -> str:
        return self._run_id

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        """No-op: hosts neither join late nor rejoin."""

    def num_nodes_waiting(self) -> int:
        return 0

    def shutdown(self) -> bool:
        return True


def register(deadline_s: float) -> None:
    """Register the backend with torchrun in this process; hosts wait ``deadline_s`` seconds for each other."""

    def make(parameters: RendezvousParameters) -> CountingRendezvous:
        endpoint = split_endpoint(parameters.endpoint)
        return CountingRendezvous(
            host=endpoint.host,
            port=endpoint.port,
            hosts=parameters.max_nodes,
            run_id=parameters.run_id,
            deadline_s=deadline_s,
        )

    rendezvous_handler_registry.register(COUNTING, make)


def main() -> int:
    parser = argparse.ArgumentParser(description="rendezvous store of torchrun on several hosts")
    parser.add_argument("--host", required=True, help="address of this host that the other hosts can reach")
    parser.add_argument("--ready-fd", type=int, required=True, help="file descriptor to write HOST:PORT to")
    arguments = parser.parse_args()
    store = serve_tcp_store(arguments.host, STORE_TIMEOUT)
    os.write(arguments.ready_fd, f"{Endpoint(arguments.host, store.port)}\n".encode())
    os.close(arguments.ready_fd)
    signal.sigwait({signal.SIGINT, signal.SIGTERM})
    return EXIT_INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
