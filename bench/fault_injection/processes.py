"""The processes of a trial: forked from one that has imported everything already, and noted by name."""

import asyncio
import os
import signal
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path

from fault_injection.faults import FORK_SERVER
from fault_injection.tcp_proxy import Relay

from flowrt.launcher.fork_server.child import serve
from flowrt.launcher.fork_server.parent import ForkServer
from flowrt.launcher.processes import Child, Children
from flowrt.runtime.parent_death import die_with_parent

MOST_BYTES = 256


class Forked(Children):
    """As those of a run; made before there is a thread.

    ``table`` gets a line "NAME PID" for each process; ``links`` gives the names of the workers whose connection can be
    cut, by what comes in through ``orders``: "hang up NAME", "hush NAME", "relent NAME".
    """

    def __init__(
        self,
        log_dir: Path,
        environment: Mapping[str, str],
        own: Mapping[str, Mapping[str, str]] | None = None,
        *,
        table: Path,
        links: Sequence[str],
        orders: socket.socket,
    ) -> None:
        super().__init__(log_dir, environment, own)
        self._table = table
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        pid = os.fork()
        if pid == 0:
            ours.close()
            signal.set_wakeup_fd(-1)  # that of the launcher's event loop
            die_with_parent()
            serve(theirs)
        theirs.close()
        self._note(FORK_SERVER, pid)
        self._fork_server = ForkServer(log_dir / "fork_server.log", os.environ, modules=("flowrt.",))
        self._fork_server.attach(ours)
        self._relays = {name: Relay() for name in links}
        self._places: dict[str, str] = {}
        self._orders = orders

    async def start_fork_server(self) -> None:
        """It is running."""

    async def start(self, name: str, words: Sequence[str], pass_fds: Sequence[int] = ()) -> Child:
        if name in self._relays:
            words = await self._through_relay(name, list(words))
        child = await super().start(name, words, pass_fds)
        self._note(name, child.process.pid)
        return child

    def _note(self, name: str, pid: int) -> None:
        with self._table.open("a") as table:
            table.write(f"{name} {pid}\n")

    async def _through_relay(self, name: str, words: list[str]) -> list[str]:
        """The worker's command, with the relay in place of the controller."""
        relay = self._relays[name]
        if not self._places:
            self._orders.setblocking(False)
            asyncio.get_running_loop().add_reader(self._orders, self._on_command)
        if name not in self._places:
            self._places[name] = await relay.listen()
        at = words.index("--controller") + 1
        relay.target, words[at] = words[at], self._places[name]
        return words

    def _on_command(self) -> None:
        order = self._orders.recv(MOST_BYTES).decode()
        if not order:
            asyncio.get_running_loop().remove_reader(self._orders)
            return
        kind, _, name = order.rpartition(" ")
        relay = self._relays[name]
        {"hang up": relay.hang_up, "hush": relay.hush, "relent": relay.resume}[kind]()
