"""Accelerator lanes on a machine without accelerators: the device channel over a socket as process group."""

import socket
from collections.abc import Callable

import torch

from flowrt.transport.lanes.channel import SignalStore, TransferRateLimit
from flowrt.transport.lanes.device import DeviceChannel


class SocketTransport:
    """The sender listens, and sends its port through the rendezvous store."""

    def open(self, store: SignalStore, sending: bool, rate_limit: TransferRateLimit) -> DeviceChannel:
        if sending:
            with socket.create_server(("127.0.0.1", 0)) as server:
                server.settimeout(rate_limit.deadline_s)
                store.set("port", str(server.getsockname()[1]))
                connection, _ = server.accept()
        else:
            port = int(store.get("port"))
            connection = socket.create_connection(("127.0.0.1", port), rate_limit.deadline_s)
        return DeviceChannel(
            group=SocketGroup(connection),
            abort=connection.close,
            store=store,
            device=torch.device("cpu"),
            rate_limit=rate_limit,
        )


class SocketGroup:
    """The part of a two-rank group that a channel uses. It transfers bytes only when a work is polled."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._connection = connection

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int) -> "SocketWork":
        return SocketWork(self._connection.send, tensors[0])

    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int) -> "SocketWork":
        return SocketWork(self._connection.recv_into, tensors[0])


class SocketWork:
    """Like the works of nccl and hccl: also completed after a failure."""

    def __init__(self, move: Callable[[memoryview], int], tensor: torch.Tensor) -> None:
        self._move = move
        self._left = tensor.view(torch.uint8).numpy().data
        self._error: OSError | None = None

    def is_completed(self) -> bool:
        while self._left and self._error is None:
            try:
                moved = self._move(self._left)
            except BlockingIOError:
                return False
            except OSError as error:
                self._error = error
            else:
                self._error = None if moved else ConnectionError("the other end has closed its connection")
                self._left = self._left[moved:]
        return True

    def exception(self) -> OSError | None:
        return self._error
