"""A wire that can be cut: everything between one worker and the controller passes through here."""

import asyncio
import contextlib
from urllib.parse import urlsplit

PIECE_BYTES = 1 << 16


class Relay:
    """Listens where the worker believes its controller to be; ``target`` is where that is."""

    def __init__(self) -> None:
        self.target = ""
        self._open = asyncio.Event()
        self._open.set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server | None = None

    async def listen(self) -> str:
        """Returns the address."""
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        return f"tcp://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def hang_up(self) -> None:
        """Both ends see their connection close; the next one is passed on as before."""
        for writer in list(self._writers):
            writer.transport.abort()

    def hush(self) -> None:
        """Drop everything silently."""
        self._open.clear()

    def resume(self) -> None:
        """What was held back is passed on."""
        self._open.set()

    def close(self) -> None:
        self.hang_up()
        if self._server is not None:
            self._server.close()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # A loop that ends while a connection waits to be passed on is no fault of the run.
        with contextlib.suppress(OSError, asyncio.CancelledError):
            await self._open.wait()
            target = urlsplit(self.target)
            there, back = await asyncio.open_connection(target.hostname, target.port)
            self._writers |= {writer, back}
            await asyncio.gather(self._pass(reader, back), self._pass(there, writer))
            self._writers -= {back}
        self._writers.discard(writer)
        writer.transport.abort()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One direction, until either end is gone: then the other is told."""
        with contextlib.suppress(OSError):
            while data := await reader.read(PIECE_BYTES):
                await self._open.wait()
                writer.write(data)
                await writer.drain()
        writer.transport.abort()
