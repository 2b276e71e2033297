"""``flowrt drain WORKER``: let a worker leave a running job without losing a sample."""

import asyncio

from rich.console import Console

from flowrt.client.connection import Connection
from flowrt.errors import EXIT_OK, WaitExpired
from flowrt.launcher.observer import connected, find_keys, locate, statuses
from flowrt.net.curve_keys import WorkerKeys
from flowrt.protocol import messages as m
from flowrt.runtime.waits import wait_until

CONNECT_S = 10.0


def drain(worker: str, run: str, keys: str, within_s: float, console: Console) -> int:
    """Drain a worker and wait until it has left; returns the exit code.

    Args:
        worker: the worker's name.
        run: the directory of a run, or the address of its controller.
        keys: directory of keys; empty: those of the run, or of the environment.
        within_s: time limit for the worker to leave, in seconds.
        console: what the result is printed to.

    Raises ConfigError if the controller rejects the drain, WaitExpired if the worker has not left in time.
    """
    address, run_dir = locate(run)
    asyncio.run(_drain(address, find_keys(keys, run_dir), worker, within_s))
    console.print(f"{worker} has left the run", highlight=False)
    return EXIT_OK


async def _drain(address: str, keys: WorkerKeys | None, worker: str, within_s: float) -> None:
    async with connected(address, keys, CONNECT_S, address) as connection:
        connection.send(m.Follow((worker,), unjoined=()))
        connection.send(m.Drain(1, worker))
        try:
            await wait_until(_wait_absent(connection, worker), within_s, f"{worker} to leave", worker)
        except WaitExpired:
            raise WaitExpired(
                f"{worker} is draining, but other workers still need its data after {within_s:.0f} s; it leaves when "
                "they have it"
            ) from None


async def _wait_absent(connection: Connection, worker: str) -> None:
    async for status in statuses(connection):
        if worker not in status.get("followed", {"present": [worker]})["present"]:
            return
