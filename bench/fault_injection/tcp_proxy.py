"""A TCP proxy between one worker and the controller, whose connections can be closed or silenced."""

import asyncio
import contextlib
from urllib.parse import urlsplit

PIECE_BYTES = 1 << 16


class TcpProxy:
    """A proxy to which the worker connects as its controller; ``target`` is the address of the real one."""

    def __init__(self) -> None:
        self.target = ""
        self._open = asyncio.Event()
        self._open.set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server | None = None

    async def listen(self) -> str:
        """Listen on a free port of the loopback interface; returns the address."""
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        return f"tcp://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def hang_up(self) -> None:
        """Close all connections at both ends; new connections are forwarded as before."""
        for writer in list(self._writers):
            writer.transport.abort()

    def hold_back(self) -> None:
        """Hold back all data and all new connections until `resume`, without closing any."""
        self._open.clear()

    def resume(self) -> None:
        """Forward what was held back, and everything after it."""
        self._open.set()

    def close(self) -> None:
        self.hang_up()
        if self._server is not None:
            self._server.close()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # The event loop may end while a connection is held back, which is no error of the run.
        with contextlib.suppress(OSError, asyncio.CancelledError):
            await self._open.wait()
            target = urlsplit(self.target)
            upstream_reader, upstream_writer = await asyncio.open_connection(target.hostname, target.port)
            self._writers |= {writer, upstream_writer}
            await asyncio.gather(self._pass(reader, upstream_writer), self._pass(upstream_reader, writer))
            self._writers -= {upstream_writer}
        self._writers.discard(writer)
        writer.transport.abort()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Forward one direction until either end closes, then close the receiving end."""
        with contextlib.suppress(OSError):
            while data := await reader.read(PIECE_BYTES):
                await self._open.wait()
                writer.write(data)
                await writer.drain()
        writer.transport.abort()
