"""The cost of CURVE: round trips over flowrt's links, with keys and without, by turns.

python bench/curve.py [--quick] [--json PATH]
"""

import asyncio
import statistics
import sys
import tempfile
import time
from pathlib import Path

from common.children import Child, cpu_s, reply
from common.harness import Bench, Figures, Options, Samples

from flowrt.net.curve_keys import controller_keys, worker_keys, write_keys
from flowrt.net.link import ClientLink, ServerLink
from flowrt.protocol import messages as m
from flowrt.runtime.event_loop import run_loop

MESSAGES: dict[str, m.Message] = {
    "pull": m.Pull(request=1, stage="rollout", slots=1, tokens=0, step=-1),
    "commit_1000": m.Committed(1, tuple(range(1000)), ""),
}
TRIPS, WARM, REPEATS = 4000, 400, 5


async def serve(keys: str) -> None:
    """Echo every message until stdin ends."""

    def echo(peer: bytes, message: m.Message) -> None:
        link.send(peer, message)

    link = ServerLink(
        echo,
        lambda *_: None,
        lambda: None,
        controller_keys(Path(keys)) if keys else None,
    )
    reply(link.bind("tcp://127.0.0.1:0"))
    ended = asyncio.Event()
    asyncio.get_running_loop().add_reader(sys.stdin, ended.set)
    await ended.wait()
    link.close()


async def trips(address: str, keys: str, message: m.Message) -> list[float]:
    """Seconds of each round trip, one after the other."""
    came: asyncio.Queue[float] = asyncio.Queue()
    link = ClientLink(
        lambda _: came.put_nowait(time.perf_counter()),
        lambda _: came.put_nowait(float("nan")),
        worker_keys(Path(keys), "worker") if keys else None,
    )
    link.connect(address)
    seconds = []
    for _ in range(WARM + TRIPS):
        start_s = time.perf_counter()
        link.send(message)
        seconds.append(await came.get() - start_s)
    link.close()
    return seconds[WARM:]


def links(options: Options) -> Figures:
    """Round trips of a small and of a large message, with keys and without, by turns."""
    samples = Samples()
    with tempfile.TemporaryDirectory() as folder:
        write_keys(Path(folder) / "keys", [])
        for _ in range(1 if options.quick else REPEATS):
            for way, keys in (("plain", ""), ("curve", f"{folder}/keys")):
                server = Child("curve.py", "serve", keys)
                address = server.wait_ready()
                for name, message in MESSAGES.items():
                    before_s = cpu_s(server.pid)
                    seconds = run_loop(trips(address, keys, message))
                    spent_s = cpu_s(server.pid) - before_s
                    samples.add(f"{name}_{way}_p50_us", 1e6 * statistics.median(seconds))
                    samples.add(f"{name}_{way}_server_us", 1e6 * spent_s / (WARM + TRIPS))
                server.leave()
    return samples.medians()


BENCH = Bench(about=__doc__, parts={"links": links})

if __name__ == "__main__":
    if sys.argv[1:2] == ["serve"]:
        run_loop(serve(sys.argv[2]))
    else:
        sys.exit(BENCH.main())
