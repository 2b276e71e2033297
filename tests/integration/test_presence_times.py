"""When a worker joins and leaves: the event log and the attribution of time have the same times."""

import asyncio
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from flowrt import api
from flowrt.controller.attribution.causes import KINDS
from flowrt.controller.core import Core
from flowrt.controller.server.server import Server
from flowrt.protocol import messages as m
from flowrt.protocol.codec import encode
from flowrt.runtime.waits import pause
from tests.integration.test_sessions import FLOW, POLICIES, Stranger

READING_S = 0.01


class CountingClock:
    """A clock that advances with each reading: two readings for one event are two times."""

    def __init__(self) -> None:
        self._readings = 0

    def now(self) -> float:
        self._readings += 1
        return READING_S * self._readings


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


async def test_a_join_and_a_departure_have_one_time(tmp_path: Path) -> None:
    core = Core(api.Settings(steps=2, groups_per_step=1), FLOW, POLICIES)
    server = Server(core, "", tmp_path, heartbeat_s=60.0, request_timeout_s=60.0, clock=CountingClock())
    address = server.bind("tcp://127.0.0.1:0")
    async with server.running():
        for how in ("leaves", "disconnects", "is malformed", "is dismissed"):
            worker = Stranger(address)
            worker.send(encode(m.Hello(protocol=m.PROTOCOL, worker=how, role=how, host="h", pid=1, lanes=("gloo",))))
            assert isinstance(await worker.receive(), m.Welcome)
            match how:
                case "leaves":
                    worker.send(encode(m.Leave("")))
                case "disconnects":
                    worker.close()
                case "is malformed":
                    worker.send(b"\xc1")
                case "is dismissed":
                    worker.send(encode(m.StepCompleted(0, ())))
            async with asyncio.timeout(60):
                while how in server.status()["workers"]:
                    await pause(0.01)
            if how != "disconnects":
                worker.close()
    present_s: defaultdict[str, float] = defaultdict(float)
    for event in lines(tmp_path / "events.jsonl"):
        if event["kind"] in ("joined", "gone"):
            present_s[event["worker"]] += event["wall_s"] * (-1 if event["kind"] == "joined" else 1)
    [step] = lines(tmp_path / "attribution.jsonl")
    attributed_s = {role: sum(of[kind] for kind in KINDS) for role, of in step["roles"].items()}
    assert attributed_s == pytest.approx(present_s, abs=READING_S / 10)
