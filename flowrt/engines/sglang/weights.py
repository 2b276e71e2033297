"""Weight transfer to an SGLang server: as a checkpoint, within requests, or by broadcast over a group.

- A snapshot is staged while the server generates; loading it, which interrupts generation, is short.
- A transfer is not retried here. After an error the server may have part of the weights; the caller handles this.
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
from urllib.parse import urlsplit

import torch
from safetensors.torch import save_file
from torch.distributed import PrefixStore, ProcessGroup, ProcessGroupGloo

from flowrt.engines.options import SglangOptions
from flowrt.engines.sglang import protocol
from flowrt.engines.sglang.client import SglangClient
from flowrt.engines.sglang.layout import Layout
from flowrt.engines.sglang.tensor_pickles import serialized
from flowrt.errors import EngineError
from flowrt.ranks.rendezvous import serve_tcp_store
from flowrt.runtime.addresses import Endpoint, source_address
from flowrt.runtime.waits import blocking, wait_any
from flowrt.transport.weights.snapshot import Snapshot

CHECKPOINT = "model.safetensors"
LEAVE_TIMEOUT_S = 5.0


class Staged(Protocol):
    """A snapshot that is ready to be loaded."""

    async def load(self, client: SglangClient, can: protocol.Capabilities, *, flush: bool) -> None:
        """Load the snapshot into the server, and flush the server's cache if ``flush``.

        Raises EngineError if loading fails; the server may then have part of the weights.
        """
        ...

    def close(self) -> None:
        """Free the resources of the staged snapshot."""
        ...


class WeightTransfer(Protocol):
    """A transfer of weights to one server."""

    async def stage(self, client: SglangClient, snapshot: Snapshot) -> Staged:
        """Prepare the snapshot while the server generates. Raises EngineError if the preparation fails."""
        ...

    async def close(self, client: SglangClient) -> None:
        """Remove this worker's state, such as a group, from a server that continues to run."""
        ...


def weight_transfer(options: SglangOptions, layout: Layout, ranks: int) -> WeightTransfer:
    """The configured transfer.

    Args:
        options: options of the server.
        layout: layout of the snapshots.
        ranks: number of server processes that hold weights.
    """
    match options.weights:
        case "disk":
            return DiskWeights(layout, options.stage, options.update_s)
        case "tensor":
            return TensorWeights(layout, ranks, options.update_s)
        case "broadcast":
            return BroadcastWeights(layout, ranks, options)


async def run_calls(client: SglangClient, calls: Sequence[protocol.Call], deadline_s: float) -> None:
    """Make the calls of one update in order, each within ``deadline_s`` seconds.

    Raises EngineError if a call fails; a session that was begun is then ended.
    """
    in_session = False
    try:
        for call in calls:
            await client.post(call, deadline_s)
            in_session = call.route == "/begin_weight_update" or (in_session and call.route != "/end_weight_update")
    except EngineError:
        if in_session:
            await _end(client, deadline_s)
        raise


async def _end(client: SglangClient, deadline_s: float) -> None:
    with suppress(EngineError):  # the first error is the one to report
        await client.post(protocol.end_session(), deadline_s)


class DiskWeights:
    """A checkpoint file that the server reads, in anonymous memory, which is freed when this process ends.

    A server on another host or in another container needs ``stage``, a directory that worker and server can access.
    """

    def __init__(self, layout: Layout, stage: str, deadline_s: float) -> None:
        self._layout = layout
        self._stage = stage
        self._deadline_s = deadline_s

    async def stage(self, client: SglangClient, snapshot: Snapshot) -> Staged:  # noqa: ARG002
        with ExitStack() as resources:
            directory = resources.enter_context(_directory(self._stage))
            file = directory / CHECKPOINT
            if not self._stage:
                resources.enter_context(_anonymous(file))
            await asyncio.to_thread(self._write, snapshot, file)
            return _StagedCheckpoint(str(directory), snapshot.version, self._deadline_s, resources.pop_all())

    async def close(self, client: SglangClient) -> None: ...

    def _write(self, snapshot: Snapshot, file: Path) -> None:
        tensors = {parameter.name: view for bucket in self._layout.buckets(snapshot) for parameter, view in bucket}
        save_file(tensors, file, metadata={"format": "pt"})


@dataclass(frozen=True, slots=True)
class _StagedCheckpoint:
    """A checkpoint in a directory that exists until ``resources`` are closed."""

    directory: str
    version: int
    deadline_s: float
    resources: ExitStack

    async def load(self, client: SglangClient, can: protocol.Capabilities, *, flush: bool) -> None:  # noqa: ARG002
        await run_calls(client, protocol.load_from_disk(self.directory, self.version, flush=flush), self.deadline_s)

    def close(self) -> None:
        self.resources.close()


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
    """Make ``file`` a symbolic link to anonymous memory, which exists until the end of this block."""
    descriptor = os.memfd_create("flowrt-weights", os.MFD_CLOEXEC)
    try:
        file.symlink_to(f"/proc/{os.getpid()}/fd/{descriptor}")
        yield
    finally:
        os.close(descriptor)


class TensorWeights:
    """Tensors within requests: works with a server on any host, slow for large models."""

    def __init__(self, layout: Layout, ranks: int, deadline_s: float) -> None:
        self._layout = layout
        self._ranks = ranks
        self._deadline_s = deadline_s

    async def stage(self, client: SglangClient, snapshot: Snapshot) -> Staged:  # noqa: ARG002
        buckets = await asyncio.to_thread(self._serialize, snapshot)
        return _StagedRequests(buckets, self._ranks, snapshot.version, self._deadline_s)

    async def close(self, client: SglangClient) -> None: ...

    def _serialize(self, snapshot: Snapshot) -> list[str]:
        return [
            serialized([(parameter.name, view) for parameter, view in bucket])
            for bucket in self._layout.buckets(snapshot)
        ]


@dataclass(frozen=True, slots=True)
class _StagedRequests:
    """Serialized buckets."""

    buckets: list[str]
    ranks: int
    version: int
    deadline_s: float

    async def load(self, client: SglangClient, can: protocol.Capabilities, *, flush: bool) -> None:
        calls = protocol.load_from_tensors(can, self.buckets, self.ranks, self.version, flush=flush)
        await run_calls(client, calls, self.deadline_s)

    def close(self) -> None: ...


class BroadcastWeights:
    """Broadcast of whole buckets over a group of this worker (rank 0) and the server's processes."""

    def __init__(self, layout: Layout, ranks: int, options: SglangOptions) -> None:
        self._layout = layout
        self._ranks = ranks
        self._options = options
        self._group: _Group | None = None

    async def stage(self, client: SglangClient, snapshot: Snapshot) -> Staged:
        return _StagedBroadcast(self, await self._joined(client), snapshot)

    async def close(self, client: SglangClient) -> None:
        if self._group is not None:
            with suppress(EngineError):  # a server that has ended has no group
                await client.post(protocol.leave_group(self._group.name), LEAVE_TIMEOUT_S)
            self._group = None

    async def send(self, client: SglangClient, calls: Sequence[protocol.Call], staged: "_StagedBroadcast") -> None:
        """Make the calls and broadcast the buckets that they announce. Raises EngineError if either fails."""
        sending = asyncio.create_task(asyncio.to_thread(staged.group.broadcast, staged.snapshot.buckets))
        try:
            await run_calls(client, calls, self._options.update_s)
            await sending
        except EngineError:
            self._group = None  # the ranks of the group may be at different buckets
            raise
        finally:
            sending.add_done_callback(_ignore_result)

    def parameters(self, snapshot: Snapshot) -> list[list[protocol.Parameter]]:
        """The parameters of each bucket."""
        return [[parameter for parameter, _ in bucket] for bucket in self._layout.buckets(snapshot)]

    async def _joined(self, client: SglangClient) -> "_Group":
        if self._group is None:
            options = self._options
            host = options.host or _source_address(client.url)
            group = _Group(host, self._ranks, options.update_s)
            join = protocol.join_group(group.name, host, group.port, 1 + self._ranks)
            connecting = [
                asyncio.create_task(asyncio.to_thread(group.connect)),
                asyncio.create_task(client.post(join, options.update_s)),
            ]
            for task in connecting:
                task.add_done_callback(_ignore_result)
            while pending := [task for task in connecting if not task.done()]:
                done = await wait_any(pending, options.update_s, f"all ranks of group {group.name}", client.url)
                for finished in done:
                    finished.result()  # if one fails, the other never completes
            self._group = group
        return self._group


@dataclass(frozen=True, slots=True)
class _StagedBroadcast:
    """A group that all ranks have joined, and the snapshot to send."""

    transfer: BroadcastWeights
    group: "_Group"
    snapshot: Snapshot

    async def load(self, client: SglangClient, can: protocol.Capabilities, *, flush: bool) -> None:
        parameters, version = self.transfer.parameters(self.snapshot), self.snapshot.version
        calls = protocol.load_from_broadcast(can, parameters, self.group.name, version, flush=flush)
        await self.transfer.send(client, calls, self)

    def close(self) -> None: ...


def _source_address(url: str) -> str:
    """The address of this host from which it reaches a server. Raises EngineError if there is no route."""
    parts = urlsplit(url)
    try:
        return source_address(Endpoint(parts.hostname or "", parts.port or 80))[1]
    except OSError as error:
        raise EngineError(
            f"no address of this host from which {url} is reached: {error}; name it with rollout.sglang.host"
        ) from error


def _ignore_result(done: asyncio.Future[Any]) -> None:
    """Mark an exception as retrieved: a thread inside gloo may end long after the update has failed."""
    if not done.cancelled():
        done.exception()


class _Group:
    """This worker's side of a group. Store keys have the prefixes that torch uses in the server."""

    def __init__(self, host: str, ranks: int, deadline_s: float) -> None:
        self.name = f"flowrt-{uuid.uuid4().hex[:12]}"
        self._size = 1 + ranks
        self._host = host
        self._deadline = timedelta(seconds=deadline_s)
        try:
            self._store = serve_tcp_store(host, self._deadline, self._size)
        except (OSError, RuntimeError) as error:
            raise EngineError(
                f"no address for a broadcast: rollout.sglang.host {host!r} must be this host's: {error}"
            ) from error
        self.port = self._store.port
        self._group: ProcessGroup | None = None

    def connect(self) -> None:
        """Wait for the server's ranks. Raises EngineError if they do not join in time."""
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [ProcessGroupGloo.create_device(hostname=self._host)]
        options._timeout = self._deadline
        keys = PrefixStore("cpu/", PrefixStore(f"{self.name}/", PrefixStore(self.name, self._store)))
        try:
            self._group = ProcessGroupGloo(keys, 0, self._size, options)  # type: ignore[assignment]
        except RuntimeError as error:
            raise EngineError(f"the server did not join group {self.name}: {error}") from error

    def broadcast(self, buckets: Sequence[torch.Tensor]) -> None:
        """Send the buckets to all ranks of the server. Raises EngineError if a rank is lost."""
        assert self._group is not None
        try:
            for bucket in buckets:
                sent = self._group.broadcast(bucket, 0)
                blocking(sent.wait, self._deadline.total_seconds(), "weights to be broadcast", "the SGLang server")
        except RuntimeError as error:
            raise EngineError(f"the broadcast of weights over group {self.name} failed: {error}") from error
