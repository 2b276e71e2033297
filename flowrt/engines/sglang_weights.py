"""How a snapshot gets into an SGLang server: as a checkpoint, within requests, or by broadcast over a group.

First it is staged, while the server generates; what is left to be done then is short, and is done while it stands.
Each way is tried once; whatever fails in the middle may have left the server with half of the weights, and says so by
raising. What becomes of such a server is decided by whoever called.
"""

import asyncio
import os
import shutil
import tempfile
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import save_file
from torch.distributed import PrefixStore, ProcessGroup, ProcessGroupGloo

from flowrt.engines import sglang_protocol as said
from flowrt.engines.options import SglangOptions
from flowrt.engines.sglang_layout import Layout
from flowrt.engines.sglang_link import SglangLink
from flowrt.engines.sglang_tensors import serialized
from flowrt.errors import EngineError
from flowrt.transport.stores import store_at
from flowrt.transport.weights import Snapshot
from flowrt.waiting import blocking, first_of

CHECKPOINT = "model.safetensors"
LEAVE_S = 5.0


class Staged(Protocol):
    """A snapshot of which all is done that the server need not stand still for."""

    async def load(self, link: SglangLink, can: said.Capabilities, *, flush: bool) -> None:
        """Put all of it into the server. Raises EngineError when that failed, wherever it stands then."""
        ...

    def close(self) -> None:
        """Let go of what it holds."""
        ...


class WeightWay(Protocol):
    """One way into the server."""

    async def stage(self, link: SglangLink, snapshot: Snapshot) -> Staged:
        """Make the snapshot ready beside the server, which may generate meanwhile. Raises EngineError."""
        ...

    async def close(self, link: SglangLink) -> None:
        """Leave nothing in a server that goes on without us."""
        ...


def weight_way(options: SglangOptions, layout: Layout, ranks: int) -> WeightWay:
    """As the options say; ``ranks`` is how many processes of the server hold weights."""
    match options.weights:
        case "disk":
            return DiskWeights(layout, options.stage, options.update_s)
        case "tensor":
            return TensorWeights(layout, ranks, options.update_s)
        case "broadcast":
            return BroadcastWeights(layout, ranks, options)


async def run_calls(link: SglangLink, calls: Sequence[said.Call], deadline_s: float) -> None:
    """Make the calls of one update, in order; a session that was begun is ended however it went."""
    in_session = False
    try:
        for call in calls:
            await link.post(call, deadline_s)
            in_session = call.route == "/begin_weight_update" or (in_session and call.route != "/end_weight_update")
    except EngineError:
        if in_session:
            await _end(link, deadline_s)
        raise


async def _end(link: SglangLink, deadline_s: float) -> None:
    with suppress(EngineError):  # what went wrong before is what is told
        await link.post(said.end_session(), deadline_s)


class DiskWeights:
    """A checkpoint that the server reads. It lies in anonymous memory, of which nothing is left when this process ends.

    A server that cannot look into this process (another host, another container) needs ``stage``, a directory of both.
    """

    def __init__(self, layout: Layout, stage: str, deadline_s: float) -> None:
        self._layout = layout
        self._stage = stage
        self._deadline_s = deadline_s

    async def stage(self, link: SglangLink, snapshot: Snapshot) -> Staged:  # noqa: ARG002
        with ExitStack() as kept:
            directory = kept.enter_context(_directory(self._stage))
            file = directory / CHECKPOINT
            if not self._stage:
                kept.enter_context(_anonymous(file))
            await asyncio.to_thread(self._write, snapshot, file)
            return _Written(str(directory), snapshot.version, self._deadline_s, kept.pop_all())

    async def close(self, link: SglangLink) -> None: ...

    def _write(self, snapshot: Snapshot, file: Path) -> None:
        tensors = {one.name: view for bucket in self._layout.buckets(snapshot) for one, view in bucket}
        save_file(tensors, file, metadata={"format": "pt"})


@dataclass(frozen=True, slots=True)
class _Written:
    """A checkpoint in a directory, for as long as it is kept."""

    directory: str
    version: int
    deadline_s: float
    kept: ExitStack

    async def load(self, link: SglangLink, can: said.Capabilities, *, flush: bool) -> None:  # noqa: ARG002
        await run_calls(link, said.load_from_disk(self.directory, self.version, flush=flush), self.deadline_s)

    def close(self) -> None:
        self.kept.close()


@contextmanager
def _directory(stage: str) -> Iterator[Path]:
    if stage and not Path(stage).is_dir():
        raise EngineError(f"rollout.sglang.stage is {stage!r}, which is no directory of this host; make it first")
    directory = Path(tempfile.mkdtemp(prefix="flowrt-weights-", dir=stage or None))
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


@contextmanager
def _anonymous(file: Path) -> Iterator[None]:
    """Make ``file`` a name of memory that no name keeps alive."""
    descriptor = os.memfd_create("flowrt-weights", os.MFD_CLOEXEC)
    try:
        file.symlink_to(f"/proc/{os.getpid()}/fd/{descriptor}")
        yield
    finally:
        os.close(descriptor)


class TensorWeights:
    """Tensors within the requests: simple, any host, and slow for large models."""

    def __init__(self, layout: Layout, ranks: int, deadline_s: float) -> None:
        self._layout = layout
        self._ranks = ranks
        self._deadline_s = deadline_s

    async def stage(self, link: SglangLink, snapshot: Snapshot) -> Staged:  # noqa: ARG002
        buckets = await asyncio.to_thread(self._serialize, snapshot)
        return _Serialized(buckets, self._ranks, snapshot.version, self._deadline_s)

    async def close(self, link: SglangLink) -> None: ...

    def _serialize(self, snapshot: Snapshot) -> list[str]:
        return [serialized([(one.name, view) for one, view in bucket]) for bucket in self._layout.buckets(snapshot)]


@dataclass(frozen=True, slots=True)
class _Serialized:
    """Buckets in the words of the requests that carry them."""

    buckets: list[str]
    ranks: int
    version: int
    deadline_s: float

    async def load(self, link: SglangLink, can: said.Capabilities, *, flush: bool) -> None:
        calls = said.load_from_tensors(can, self.buckets, self.ranks, self.version, flush=flush)
        await run_calls(link, calls, self.deadline_s)

    def close(self) -> None: ...


class BroadcastWeights:
    """Rank 0 of a group whose other ranks are the server's processes; buckets go out as they are, end to end."""

    def __init__(self, layout: Layout, ranks: int, options: SglangOptions) -> None:
        self._layout = layout
        self._ranks = ranks
        self._options = options
        self._group: _Group | None = None

    async def stage(self, link: SglangLink, snapshot: Snapshot) -> Staged:
        return _Met(self, await self._joined(link), snapshot)

    async def close(self, link: SglangLink) -> None:
        if self._group is not None:
            with suppress(EngineError):  # a server that is gone has no group
                await link.post(said.leave_group(self._group.name), LEAVE_S)
            self._group = None

    async def send(self, link: SglangLink, calls: Sequence[said.Call], met: "_Met") -> None:
        """Make the calls, and broadcast what they announce."""
        sending = asyncio.create_task(asyncio.to_thread(met.group.broadcast, met.snapshot.buckets))
        try:
            await run_calls(link, calls, self._options.update_s)
            await sending
        except EngineError:
            self._group = None  # its ranks may stand at different buckets
            raise
        finally:
            sending.add_done_callback(_seen)

    def parameters(self, snapshot: Snapshot) -> list[list[said.Parameter]]:
        """Of each bucket, what it is made of."""
        return [[one for one, _ in bucket] for bucket in self._layout.buckets(snapshot)]

    async def _joined(self, link: SglangLink) -> "_Group":
        if self._group is None:
            options = self._options
            group = _Group(options.host, self._ranks, options.update_s)
            join = said.join_group(group.name, options.host, group.port, 1 + self._ranks)
            meeting = [
                asyncio.create_task(asyncio.to_thread(group.meet)),
                asyncio.create_task(link.post(join, options.update_s)),
            ]
            for task in meeting:
                task.add_done_callback(_seen)
            while pending := [one for one in meeting if not one.done()]:
                met = await first_of(pending, options.update_s, f"all of group {group.name}", link.url)
                for one in met:
                    one.result()  # when one fails, the other waits in vain
            self._group = group
        return self._group


@dataclass(frozen=True, slots=True)
class _Met:
    """A group in which all are there, and what is to be sent to it."""

    way: BroadcastWeights
    group: "_Group"
    snapshot: Snapshot

    async def load(self, link: SglangLink, can: said.Capabilities, *, flush: bool) -> None:
        parameters, version = self.way.parameters(self.snapshot), self.snapshot.version
        calls = said.load_from_broadcast(can, parameters, self.group.name, version, flush=flush)
        await self.way.send(link, calls, self)

    def close(self) -> None: ...


def _seen(done: asyncio.Future[Any]) -> None:
    """A thread inside gloo comes back by the group's own deadline; what it says then is of no interest."""
    if not done.cancelled():
        done.exception()


class _Group:
    """This worker's end. The prefixes are those that the server's torch gives the keys of the rendezvous."""

    def __init__(self, host: str, ranks: int, deadline_s: float) -> None:
        self.name = f"flowrt-{uuid.uuid4().hex[:12]}"
        self._size = 1 + ranks
        self._host = host
        self._deadline = timedelta(seconds=deadline_s)
        try:
            self._store = store_at(host, self._deadline, self._size)
        except (OSError, RuntimeError) as error:
            raise EngineError(
                f"no address for a broadcast: rollout.sglang.host {host!r} must be this host's: {error}"
            ) from error
        self.port = self._store.port
        self._group: ProcessGroup | None = None

    def meet(self) -> None:
        """Wait for the server's ranks."""
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [ProcessGroupGloo.create_device(hostname=self._host)]
        options._timeout = self._deadline
        keys = PrefixStore("cpu/", PrefixStore(f"{self.name}/", PrefixStore(self.name, self._store)))
        try:
            self._group = ProcessGroupGloo(keys, 0, self._size, options)  # type: ignore[assignment]
        except RuntimeError as error:
            raise EngineError(f"the server did not join group {self.name}: {error}") from error

    def broadcast(self, buckets: Sequence[torch.Tensor]) -> None:
        assert self._group is not None
        try:
            for bucket in buckets:
                sent = self._group.broadcast(bucket, 0)
                blocking(sent.wait, self._deadline.total_seconds(), "weights to be broadcast", "the SGLang server")
        except RuntimeError as error:
            raise EngineError(f"the broadcast of weights over group {self.name} broke off: {error}") from error
