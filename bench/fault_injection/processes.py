"""The processes of a trial: forked from a process that has imported everything, and recorded by name."""

import asyncio
import os
import signal
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path

from fault_injection.faults import FORK_SERVER
from fault_injection.tcp_proxy import TcpProxy

from flowrt.launcher.fork_server.child import serve
from flowrt.launcher.fork_server.parent import ForkServer
from flowrt.launcher.processes import Child, Children
from flowrt.runtime.parent_death import die_with_parent

MOST_BYTES = 256


class ForkedChildren(Children):
    """The children of a launcher. The constructor forks, so it must be called before a thread is started.

    The file ``table`` gets a line "NAME PID" for each process. ``links`` are the workers whose connection has a proxy,
    which executes the messages on ``orders``: "hang up NAME", "hush NAME", "relent NAME".
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
            signal.set_wakeup_fd(-1)  # it belongs to the launcher's event loop
            die_with_parent()
            serve(theirs)
        theirs.close()
        self._note(FORK_SERVER, pid)
        self._fork_server = ForkServer(log_dir / "fork_server.log", os.environ, modules=("flowrt.",))
        self._fork_server.attach(ours)
        self._proxies = {name: TcpProxy() for name in links}
        self._proxy_addresses: dict[str, str] = {}
        self._orders = orders

    async def start_fork_server(self) -> None:
        """Do nothing: the constructor has started the fork server."""

    async def start(self, name: str, words: Sequence[str], pass_fds: Sequence[int] = ()) -> Child:
        if name in self._proxies:
            words = await self._through_proxy(name, list(words))
        child = await super().start(name, words, pass_fds)
        self._note(name, child.process.pid)
        return child

    def _note(self, name: str, pid: int) -> None:
        with self._table.open("a") as table:
            table.write(f"{name} {pid}\n")

    async def _through_proxy(self, name: str, words: list[str]) -> list[str]:
        """The worker's command, with the address of its proxy in place of the controller's."""
        proxy = self._proxies[name]
        if not self._proxy_addresses:
            self._orders.setblocking(False)
            asyncio.get_running_loop().add_reader(self._orders, self._on_command)
        if name not in self._proxy_addresses:
            self._proxy_addresses[name] = await proxy.listen()
        at = words.index("--controller") + 1
        proxy.target, words[at] = words[at], self._proxy_addresses[name]
        return words

    def _on_command(self) -> None:
        order = self._orders.recv(MOST_BYTES).decode()
        if not order:
            asyncio.get_running_loop().remove_reader(self._orders)
            return
        kind, _, name = order.rpartition(" ")
        proxy = self._proxies[name]
        {"hang up": proxy.hang_up, "hush": proxy.hold_back, "relent": proxy.resume}[kind]()
