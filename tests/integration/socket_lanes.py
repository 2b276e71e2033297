"""Lanes like those between accelerators, on a machine without any: their channel, over a group that is a socket."""

import socket
from collections.abc import Callable

import torch

from flowrt.transport.device import DeviceChannel
from flowrt.transport.pace import Pace
from flowrt.transport.rendezvous import SignalStore


class SocketTransport:
    """The sender listens, and says where."""

    def open(self, store: SignalStore, sending: bool, pace: Pace) -> DeviceChannel:
        if sending:
            with socket.create_server(("127.0.0.1", 0)) as server:
                server.settimeout(pace.deadline_s)
                store.set("port", str(server.getsockname()[1]))
                connection, _ = server.accept()
        else:
            port = int(store.get("port"))
            connection = socket.create_connection(("127.0.0.1", port), pace.deadline_s)
        return DeviceChannel(SocketGroup(connection), connection.close, store, torch.device("cpu"), pace)


class SocketGroup:
    """As much of a two-rank group as a channel uses; it moves bytes only when a work is looked at."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._connection = connection

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int) -> "SocketWork":
        return SocketWork(self._connection.send, tensors[0])

    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int) -> "SocketWork":
        return SocketWork(self._connection.recv_into, tensors[0])


class SocketWork:
    """As those of nccl and hccl: it is completed too when it has failed."""

    def __init__(self, move: Callable[[memoryview], int], tensor: torch.Tensor) -> None:
        self._move = move
        self._left = memoryview(tensor.view(torch.uint8).numpy())
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
