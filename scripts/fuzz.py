"""Random messages against the codec, the controller's core, and a live controller that accepts the sender's key.

python scripts/fuzz.py --minutes 3 --seed 7      prints what was sent; stops at the first finding, with its seed
"""

import argparse
import asyncio
import resource
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import zmq

sys.path.insert(0, str(Path(__file__).parents[1]))  # for tests.simulation, which is not installed

from flowrt import api
from flowrt.errors import RemoteProtocolError
from flowrt.net.curve_keys import WorkerKeys, worker_keys, write_keys
from flowrt.protocol import messages as m
from flowrt.protocol.codec import decode, encode
from tests.simulation.core_driver import CoreDriver
from tests.simulation.fuzz_targets import MOST_MEMBERS, SPEAKERS, deliver
from tests.simulation.message_fuzzer import NAMES, MessageFuzzer
from tests.simulation.scenario import grpo_dataflow

ROUND_S = 10.0
MEGABYTES = 400


def codec(noise: MessageFuzzer, counts: Counter[str], end_s: float) -> None:
    while time.monotonic() < end_s:
        for _ in range(100):
            counts["to the codec"] += 1
            try:
                message = decode(noise.data())
            except RemoteProtocolError:
                counts["refused by the codec"] += 1
                continue
            encode(message)


def core(noise: MessageFuzzer, counts: Counter[str], end_s: float) -> None:
    while time.monotonic() < end_s:
        driver = CoreDriver(members=2, groups_per_step=2)
        if noise.random.random() < 0.5:
            driver = CoreDriver()
            driver.ready_to_train()
        messages: list[m.Message] = [noise.message() for _ in range(5)]
        for _ in range(40):
            message = noise.changed(noise.random.choice(messages)) if noise.random.random() < 0.5 else noise.message()
            if isinstance(message, m.Offer) and message.members > MOST_MEMBERS:
                continue
            counts["to the core"] += 1
            if not deliver(driver, noise.random.choice(SPEAKERS), message):
                counts["refused by the core"] += 1
            if driver.core.ended:
                break


async def live(noise: MessageFuzzer, counts: Counter[str], end_s: float) -> None:
    """Messages of peers with a valid key, of which half join; after a run that a message ends, start another."""
    while time.monotonic() < end_s:
        with tempfile.TemporaryDirectory() as folder:
            write_keys(Path(folder) / "keys", [])
            policies = api.Policies(api.StrictLag(1), api.Fifo(), api.TokenBudget(1), api.DelayedUpdate())
            settings = api.Settings(steps=4)
            flow = grpo_dataflow(reference=False)
            async with api.controller(flow, settings, policies, Path(folder), keys=Path(folder) / "keys") as at:
                keys = worker_keys(Path(folder) / "keys", "worker")
                while at[0].ended is None and time.monotonic() < end_s:
                    await one_peer(at[0], at[1], keys, noise, counts)


async def one_peer(
    server: api.Server, address: str, keys: WorkerKeys, noise: MessageFuzzer, counts: Counter[str]
) -> None:
    with zmq.Context() as context, context.socket(zmq.DEALER) as peer:
        peer.setsockopt(zmq.LINGER, 0)
        peer.setsockopt_string(zmq.CURVE_SERVERKEY, keys.controller)
        peer.setsockopt_string(zmq.CURVE_PUBLICKEY, keys.own.public)
        peer.setsockopt_string(zmq.CURVE_SECRETKEY, keys.own.secret)
        peer.connect(address)
        name = noise.random.choice(NAMES[:6])
        if noise.random.random() < 0.5:
            peer.send(
                encode(m.Hello(protocol=m.PROTOCOL, worker=name, role=name[:-1], host="host", pid=1, lanes=("gloo",)))
            )
        seen = server.refused_messages
        for _ in range(200):
            counts["to a live controller"] += 1
            peer.send(noise.data() if noise.random.random() < 0.1 else encode(noise.message()))
        peer.send(b"\xc1")
        for _ in range(500):
            await asyncio.sleep(0.01)
            if server.refused_messages > seen or server.ended is not None:
                return
    raise AssertionError("the controller did not answer garbage for 5 s")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=3.0)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    counts: Counter[str] = Counter()
    end_s, seed = time.monotonic() + 60 * arguments.minutes, arguments.seed
    failures: list[str] = []
    while time.monotonic() < end_s:
        sys.stdout.write(f"seed {seed}: {dict(counts)}\n")
        until_s = min(end_s, time.monotonic() + ROUND_S)
        codec(MessageFuzzer(seed), counts, until_s - 0.6 * ROUND_S)
        core(MessageFuzzer(seed), counts, until_s - 0.3 * ROUND_S)
        with asyncio.Runner() as runner:
            loop = runner.get_loop()
            loop.set_exception_handler(lambda _, context: failures.append(f"{context.get('exception')!r} in the loop"))
            runner.run(live(MessageFuzzer(seed), counts, until_s))
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
        if failures or peak > MEGABYTES:
            sys.stdout.write(f"FOUND with seed {seed}: {failures[:3] or f'{peak} MB of memory'}\n")
            return 1
        seed += 1
    sys.stdout.write(f"nothing found: {dict(counts)}, at most {peak} MB\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
