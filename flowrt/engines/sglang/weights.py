"""Weight transfer to an SGLang server: as a checkpoint, within requests, or by broadcast over a group.

- A snapshot is staged while the server generates; loading it, which interrupts generation, is short.
- A transfer is not retried here. After an error the server may have part of the weights; the caller handles this.
"""

import asyncio
import uuid
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import torch
from torch.distributed import PrefixStore, ProcessGroup, ProcessGroupGloo

from flowrt.engines.options import SglangOptions
from flowrt.engines.server.client import Call, ServerClient
from flowrt.engines.server.dialect import Staged, WeightTransfer
from flowrt.engines.server.layout import Layout, Parameter
from flowrt.engines.server.weights import DiskWeights
from flowrt.engines.sglang import protocol
from flowrt.engines.sglang.checksums import ExpectedChecksums
from flowrt.engines.sglang.tensor_pickles import serialized
from flowrt.errors import EngineError
from flowrt.ranks.rendezvous import serve_tcp_store
from flowrt.runtime.addresses import Endpoint, source_address
from flowrt.runtime.waits import blocking, wait_any
from flowrt.transport.weights.snapshot import Snapshot

LEAVE_TIMEOUT_S = 5.0


def weight_transfer(
    options: SglangOptions, can: protocol.Capabilities, layout: Layout, *, ranks: int, has_checksums: bool
) -> WeightTransfer:
    """The configured transfer.

    Args:
        options: options of the server.
        can: capabilities of the server.
        layout: layout of the snapshots.
        ranks: number of server processes that hold weights.
        has_checksums: whether the server's checksums can be computed here.
    """
    update_s = options.update_s

    async def load(client: ServerClient, directory: str, version: int, flush: bool) -> None:
        await run_calls(client, protocol.load_from_disk(directory, version, flush=flush), update_s)

    transfer: WeightTransfer
    match options.weights:
        case "disk":
            transfer = DiskWeights(layout, options.stage, "rollout.sglang", load)
        case "tensor":
            transfer = TensorWeights(layout, can, ranks, update_s)
        case "broadcast":
            transfer = BroadcastWeights(layout, can, ranks, options)
    return CheckedWeights(transfer, layout, update_s) if has_checksums else transfer


async def run_calls(client: ServerClient, calls: Sequence[Call], deadline_s: float) -> None:
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


async def _end(client: ServerClient, deadline_s: float) -> None:
    with suppress(EngineError):  # the first error is the one to report
        await client.post(protocol.end_session(), deadline_s)


class CheckedWeights:
    """Another transfer, with the server's checksums compared after each load."""

    def __init__(self, transfer: WeightTransfer, layout: Layout, deadline_s: float) -> None:
        self._transfer = transfer
        self._layout = layout
        self._deadline_s = deadline_s

    async def stage(self, client: ServerClient, snapshot: Snapshot) -> Staged:
        checksums = ExpectedChecksums(self._layout, snapshot)
        await asyncio.to_thread(checksums.prepare)
        return _StagedAndChecked(await self._transfer.stage(client, snapshot), checksums, self._deadline_s)

    async def close(self, client: ServerClient) -> None:
        await self._transfer.close(client)


@dataclass(frozen=True, slots=True)
class _StagedAndChecked:
    """A staged snapshot, and the checksums of a server that has loaded it."""

    staged: Staged
    checksums: ExpectedChecksums
    deadline_s: float

    async def load(self, client: ServerClient, *, flush: bool) -> None:
        await self.staged.load(client, flush=flush)
        await asyncio.to_thread(self.checksums.check, await client.post(protocol.checksum(), self.deadline_s))

    def close(self) -> None:
        self.staged.close()


class TensorWeights:
    """Tensors within requests: works with a server on any host, slow for large models."""

    def __init__(self, layout: Layout, can: protocol.Capabilities, ranks: int, deadline_s: float) -> None:
        self._layout = layout
        self._can = can
        self._ranks = ranks
        self._deadline_s = deadline_s

    async def stage(self, client: ServerClient, snapshot: Snapshot) -> Staged:  # noqa: ARG002
        buckets = await asyncio.to_thread(self._serialize, snapshot)
        return _StagedRequests(buckets, self._can, self._ranks, snapshot.version, self._deadline_s)

    async def close(self, client: ServerClient) -> None: ...

    def _serialize(self, snapshot: Snapshot) -> list[str]:
        return [
            serialized([(parameter.name, view) for parameter, view in bucket])
            for bucket in self._layout.buckets(snapshot)
        ]


@dataclass(frozen=True, slots=True)
class _StagedRequests:
    """Serialized buckets."""

    buckets: list[str]
    can: protocol.Capabilities
    ranks: int
    version: int
    deadline_s: float

    async def load(self, client: ServerClient, *, flush: bool) -> None:
        calls = protocol.load_from_tensors(self.can, self.buckets, self.ranks, self.version, flush=flush)
        await run_calls(client, calls, self.deadline_s)

    def close(self) -> None: ...


class BroadcastWeights:
    """Broadcast of whole buckets over a group of this worker (rank 0) and the server's processes."""

    def __init__(self, layout: Layout, can: protocol.Capabilities, ranks: int, options: SglangOptions) -> None:
        self.can = can
        self._layout = layout
        self._ranks = ranks
        self._options = options
        self._group: _Group | None = None

    async def stage(self, client: ServerClient, snapshot: Snapshot) -> Staged:
        return _StagedBroadcast(self, await self._joined(client), snapshot)

    async def close(self, client: ServerClient) -> None:
        if self._group is not None:
            with suppress(EngineError):  # a server that has ended has no group
                await client.post(protocol.leave_group(self._group.name), LEAVE_TIMEOUT_S)
            self._group = None

    async def send(self, client: ServerClient, calls: Sequence[Call], staged: "_StagedBroadcast") -> None:
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

    def parameters(self, snapshot: Snapshot) -> list[list[Parameter]]:
        """The parameters of each bucket."""
        return [[parameter for parameter, _ in bucket] for bucket in self._layout.buckets(snapshot)]

    async def _joined(self, client: ServerClient) -> "_Group":
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

    async def load(self, client: ServerClient, *, flush: bool) -> None:
        parameters, version = self.transfer.parameters(self.snapshot), self.snapshot.version
        calls = protocol.load_from_broadcast(self.transfer.can, parameters, self.group.name, version, flush=flush)
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
