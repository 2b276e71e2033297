"""What the processes of these tests do: they read orders on standard input and write answers, JSON lines both."""

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
from flowrt.client.samples import Batch
from flowrt.errors import FlowError, RemoteProtocolError

DONE_S = 60.0


def reply(**answer: Any) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


async def next_command() -> str:
    """The next line from the test; empty when the test has gone."""
    line: str = await asyncio.to_thread(sys.stdin.readline)
    return line.strip()


def rss_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def row(prompt: int, length: int) -> torch.Tensor:
    return torch.full((length,), float(prompt))


def spoilt(rows: list[torch.Tensor], how: str) -> list[torch.Tensor]:
    """Rows that no column here takes: of another dtype, or with a dimension too many."""
    return [one.unsqueeze(0) if how == "row2d" else one.double() for one in rows] if how else rows


def assert_whole(batch: Batch) -> None:
    """Each row of a batch has its own tensors and tags, those that its producer gave it."""
    for index, prompt in enumerate(batch.grant.prompts):
        for column in batch.tensors.values():
            assert column[index].unique().tolist() in ([float(prompt)], []), f"row {prompt} has {column[index]}"
        for name, values in batch.inline.items():
            assert values[index] == float(prompt), f"row {prompt} has {name} {values[index]}"


class SessionPeer:
    """Does with its session what it is told to, one order at a time."""

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
        rows = spoilt([row(prompt, length) for prompt in prompts], wrong)
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
        assert_whole(self.batch)
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
        makes: dict[str, int] | None = None,
        inline: tuple[str, ...] = (),
        spans: bool = False,
        wrong: str = "",
    ) -> dict[str, Any]:
        """Of the batch that is held, the rows at these places; tensors and numbers are those of the prompt."""
        places = range(len(self.held)) if only is None else only
        prompts = [self.held.grant.prompts[place] for place in places]
        columns = {name: [row(prompt, length) for prompt in prompts] for name, length in (makes or {}).items()}
        columns = {name: spoilt(rows, wrong) for name, rows in columns.items()}
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
        """Memory of this process, after all that it was sent so far: the answer to a request comes behind that."""
        with contextlib.suppress(RemoteProtocolError):
            await self.session.pull("nothing", 1)
        tensors, size = self.session.store.statistics()
        return {"rss": rss_bytes(), "tensors": tensors, "bytes": size}

    async def hold(self, seconds: float) -> dict[str, Any]:
        """Compute in one call that never lets go of the interpreter: no Python runs meanwhile, on no thread."""
        reply(holds=True)
        ctypes.PyDLL(None).usleep(int(seconds * 1e6))
        return {"held": seconds}

    async def forget_batch(self) -> dict[str, Any]:
        self.batch = None
        return {}

    async def produce(
        self, rows: int, at_once: int, first: int = 0, end: bool = True, mark_at: int = 0, **offer: Any
    ) -> dict[str, Any]:
        """All rows from ``first`` on, so many at once; then the flow is exhausted. Says RSS at a mark."""
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
        """The stage to its end, or until so many batches were seen. Says the prompts, or RSS at a mark."""
        prompts: list[int] = []
        rows = 0
        batches = api.stream(self.session, stage, slots, ahead)
        async for number, batch in _count(batches):
            assert_whole(batch)
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

    async def make(self, stage: str, slots: int, makes: dict[str, int], **commit: Any) -> dict[str, Any]:
        """The stage to its end: its tensors and numbers for each row."""
        rows = 0
        while not (await self.pull(stage, slots))["closed"]:
            assert (await self.commit(stage, None, makes, **commit))["refused"] == ()
            rows += len(self.held)
        return {"rows": rows}


async def _count(batches: Any) -> Any:
    number = 0
    async for batch in batches:
        number += 1
        yield number, batch


async def session_peer(address: str, name: str, role: str) -> None:
    session = await api.connect(address, name, role, DONE_S)
    reply(here=name)
    commanded = SessionPeer(session)
    leaving = asyncio.create_task(leave(session))
    while line := await next_command():
        order: dict[str, Any] = json.loads(line)
        try:
            reply(**await getattr(commanded, order.pop("do"))(**order))
        except FlowError as error:
            reply(error=type(error).__name__, text=str(error))
    if leaving.cancel():
        await session.close()


async def leave(session: api.Session) -> None:
    """When the controller ends the run, say goodbye at once; orders that still come are answered with an error."""
    try:
        await session.wait_stopped()
    except FlowError:
        await session.close()


async def controller(run_dir: str, stages: list[str], **settings: Any) -> None:
    """A controller of a stream of rows, each with tensor ``data`` and number ``tag``, read by these stages."""
    columns = (api.Column("data", "float32", "group"),)
    flow = api.Dataflow(columns, tuple(api.Stage(name, ("data", "tag"), ()) for name in stages), tags=("tag",))
    policies = api.Policies(api.StrictLag(0), api.Fifo(), api.GroupCount(1), api.DelayedUpdate())
    async with api.controller(flow, api.Settings(**settings), policies, Path(run_dir)) as (server, address):
        reply(address=address)
        while await next_command():
            table = server._core.state.table
            reply(rss=rss_bytes(), rows=table.rows.total(), leases=len(table.leases), groups=len(table.groups))


async def dataset(address: str, workers: int, slots: int, leave_after: int = 0) -> None:
    """Read a stage through a DataLoader; says the tags seen and what is left of threads and processes."""
    dataset = api.StreamDataset(address, "read", slots)
    rows = iter(DataLoader(dataset, batch_size=None, num_workers=workers))
    seen = []
    for one in rows:
        assert one["data"].unique().tolist() == [one["tag"]]
        seen.append(int(one["tag"]))
        if len(seen) == leave_after:
            break
    del rows
    reply(prompts=seen, **left_over())
    await next_command()


def left_over() -> dict[str, Any]:
    """Processes and Python threads besides this one."""
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return {"children": children, "threads": [one.name for one in threading.enumerate()]}


ROLES: dict[str, Callable[..., Coroutine[Any, Any, None]]] = {
    "session_peer": session_peer,
    "controller": controller,
    "dataset": dataset,
}
