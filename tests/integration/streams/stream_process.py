"""The processes of these tests: they read commands on standard input and write answers, both as JSON lines."""

import asyncio
import contextlib
import ctypes
import json
import os
import sys
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from flowrt import api
from flowrt.client.sample_tensors import Batch
from flowrt.errors import FlowError, RemoteProtocolError

CONNECT_TIMEOUT_S = 60.0


def reply(**answer: Any) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


async def next_command() -> str:
    """The next line from the test; empty when the test has closed the pipe."""
    line: str = await asyncio.to_thread(sys.stdin.readline)
    return line.strip()


def rss_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def row(prompt: int, length: int) -> torch.Tensor:
    return torch.full((length,), float(prompt))


def with_wrong_type(rows: list[torch.Tensor], how: str) -> list[torch.Tensor]:
    """Rows that no column here accepts: of another dtype, or with an extra dimension."""
    return [tensor.unsqueeze(0) if how == "row2d" else tensor.double() for tensor in rows] if how else rows


def assert_rows_complete(batch: Batch) -> None:
    """Each row of a batch has the tensors and tags that its producer gave it."""
    for index, prompt in enumerate(batch.grant.prompts):
        for column in batch.tensors.values():
            assert column[index].unique().tolist() in ([float(prompt)], []), f"row {prompt} has {column[index]}"
        for name, values in batch.inline.items():
            assert values[index] == float(prompt), f"row {prompt} has {name} {values[index]}"


class SessionPeer:
    """Executes commands with its session, one at a time."""

    def __init__(self, session: api.Session) -> None:
        self.session = session
        self.batch: Batch | None = None

    @property
    def held(self) -> Batch:
        assert self.batch is not None
        return self.batch

    async def offer(
        self,
        prompts: list[int],
        length: int = 1,
        members: int = 1,
        flow: str = "rows",
        columns: tuple[str, ...] = ("data",),
        tags: tuple[str, ...] = ("tag",),
        shared: bool = False,
        wrong: str = "",
        **options: Any,
    ) -> dict[str, Any]:
        rows = with_wrong_type([row(prompt, length) for prompt in prompts], wrong)
        if shared:
            rows = list(torch.cat(rows).split(length))
        numbers = [float(prompt) for prompt in prompts for _ in range(members)]
        opened = await self.session.offer_many(
            flow, prompts, 0, members, dict.fromkeys(columns, rows), dict.fromkeys(tags, numbers), **options
        )
        return {"opened": None if opened is None else [opened.start, len(opened)]}

    async def pull(self, stage: str = "read", slots: int = 1, **options: Any) -> dict[str, Any]:
        self.batch = None
        self.batch = await self.session.pull(stage, slots, **options)
        assert_rows_complete(self.batch)
        grant = self.batch.grant
        return {
            "prompts": grant.prompts,
            "slots": grant.slots,
            "members": grant.members,
            "lease": grant.lease,
            "attempts": grant.attempts,
            "closed": grant.closed,
        }

    async def commit(
        self,
        stage: str = "read",
        only: list[int] | None = None,
        lengths: dict[str, int] | None = None,
        inline: tuple[str, ...] = (),
        spans: bool = False,
        wrong: str = "",
    ) -> dict[str, Any]:
        """Commit the rows of the held batch at these places; tensors and numbers have the value of the prompt."""
        places = range(len(self.held)) if only is None else only
        prompts = [self.held.grant.prompts[place] for place in places]
        columns = {name: [row(prompt, length) for prompt in prompts] for name, length in (lengths or {}).items()}
        columns = {name: with_wrong_type(rows, wrong) for name, rows in columns.items()}
        refused = await self.session.commit(
            stage,
            [self.held.slots[place] for place in places],
            [self.held.leases[place] for place in places],
            columns,
            {name: [float(prompt) for prompt in prompts] for name in inline},
            [(0, 1)] * len(prompts) if spans else (),
        )
        return {"refused": refused}

    async def give_back(self, stage: str = "read") -> dict[str, Any]:
        self.session.give_back(stage, self.held)
        return {}

    async def lost(self, stage: str, reason: str) -> dict[str, Any]:
        self.session.lost(stage, self.held.slots, self.held.leases, reason)
        return {}

    async def applied(self) -> dict[str, Any]:
        self.session.params.applied("policy", 0)
        return {}

    async def exhausted(self, flow: str = "rows") -> dict[str, Any]:
        self.session.exhausted(flow)
        return {}

    async def step_done(self, step: int) -> dict[str, Any]:
        self.session.step_done(step, {})
        return {}

    async def measure(self) -> dict[str, Any]:
        """Memory of this process after all messages sent to it: a rejected request is answered after them."""
        with contextlib.suppress(RemoteProtocolError):
            await self.session.pull("nothing", 1)
        tensors, size = self.session.store.statistics()
        return {"rss": rss_bytes(), "tensors": tensors, "bytes": size}

    async def hold(self, seconds: float) -> dict[str, Any]:
        """Compute in one call that never releases the interpreter lock: no thread runs Python meanwhile."""
        reply(holds=True)
        ctypes.PyDLL(None).usleep(int(seconds * 1e6))
        return {"held": seconds}

    async def forget_batch(self) -> dict[str, Any]:
        self.batch = None
        return {}

    async def produce(
        self, rows: int, at_once: int, first: int = 0, end: bool = True, mark_at: int = 0, **offer: Any
    ) -> dict[str, Any]:
        """Offer rows from ``first`` on, ``at_once`` at a time; then the flow is exhausted. Reports RSS at a mark."""
        for start in range(first, first + rows, at_once):
            if mark_at and start == mark_at:
                reply(marked=rss_bytes())
            await self.offer(list(range(start, min(start + at_once, first + rows))), **offer)
        if end:
            self.session.exhausted("rows")
        return await self.measure()

    async def consume(
        self,
        stage: str = "read",
        slots: int = 64,
        ahead: bool = True,
        leave_after: int = 0,
        spans: bool = False,
        mark_at: int = 0,
    ) -> dict[str, Any]:
        """Read a stage to its end, or ``leave_after`` batches of it. Reports the prompts, or RSS at a mark."""
        prompts: list[int] = []
        rows = 0
        batches = api.stream(self.session, stage, slots, ahead)
        async for number, batch in _count(batches):
            assert_rows_complete(batch)
            assert batch.grant.spans == (((0, 1),) * len(batch) if spans else ())
            if not mark_at:
                prompts += batch.grant.prompts
            elif rows < mark_at <= rows + len(batch):
                reply(marked=rss_bytes())
            rows += len(batch)
            if number == leave_after:
                break
        await batches.aclose()
        return {"prompts": prompts, "rows": rows, **await self.measure()}

    async def run_stage(self, stage: str, slots: int, lengths: dict[str, int], **commit: Any) -> dict[str, Any]:
        """Commit tensors and numbers for each row of a stage, to its end."""
        rows = 0
        while not (await self.pull(stage, slots))["closed"]:
            assert (await self.commit(stage, None, lengths, **commit))["refused"] == ()
            rows += len(self.held)
        return {"rows": rows}


async def _count(batches: Any) -> Any:
    number = 0
    async for batch in batches:
        number += 1
        yield number, batch


async def session_peer(address: str, name: str, role: str) -> None:
    session = await api.connect(address, name, role, CONNECT_TIMEOUT_S)
    reply(connected=name)
    peer = SessionPeer(session)
    watcher = asyncio.create_task(leave(session))
    while line := await next_command():
        command: dict[str, Any] = json.loads(line)
        try:
            reply(**await getattr(peer, command.pop("do"))(**command))
        except FlowError as error:
            reply(error=type(error).__name__, text=str(error))
    if watcher.cancel():
        await session.close()


async def leave(session: api.Session) -> None:
    """Close the session when the controller ends the run; later commands are answered with an error."""
    try:
        await session.wait_stopped()
    except FlowError:
        await session.close()


async def controller(run_dir: str, stages: list[str], **settings: Any) -> None:
    """A controller of a stream of rows with tensor ``data`` and number ``tag``, read by these stages."""
    columns = (api.Column("data", "float32", "group"),)
    flow = api.Dataflow(columns, tuple(api.Stage(name, ("data", "tag"), ()) for name in stages), tags=("tag",))
    policies = api.Policies(api.StrictLag(0), api.Fifo(), api.GroupCount(1), api.DelayedUpdate())
    async with api.controller(flow, api.Settings(**settings), policies, Path(run_dir)) as (server, address):
        reply(address=address)
        while await next_command():
            table = server._core.state.table
            reply(rss=rss_bytes(), rows=table.rows.total(), leases=len(table.leases), groups=len(table.groups))


async def dataset(address: str, workers: int, slots: int, leave_after: int = 0) -> None:
    """Read a stage through a DataLoader; reports the tags read and the remaining threads and processes."""
    dataset = api.StreamDataset(address, "read", slots)
    rows = iter(DataLoader(dataset, batch_size=None, num_workers=workers))
    seen = []
    for item in rows:
        assert item["data"].unique().tolist() == [item["tag"]]
        seen.append(int(item["tag"]))
        if len(seen) == leave_after:
            break
    del rows
    reply(prompts=seen, **left_over())
    await next_command()


def left_over() -> dict[str, Any]:
    """Processes and Python threads besides this one."""
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return {"children": children, "threads": [thread.name for thread in threading.enumerate()]}


ROLES: dict[str, Callable[..., Coroutine[Any, Any, None]]] = {
    "session_peer": session_peer,
    "controller": controller,
    "dataset": dataset,
}
