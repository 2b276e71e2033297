"""Weights for a server as a checkpoint file, in anonymous memory or in a shared directory."""

import asyncio
import os
import shutil
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import save_file

from flowrt.engines.server.client import ServerClient
from flowrt.engines.server.dialect import Staged
from flowrt.engines.server.layout import Layout
from flowrt.errors import EngineError
from flowrt.transport.weights.snapshot import Snapshot

CHECKPOINT = "model.safetensors"
Load = Callable[[ServerClient, str, int, bool], Awaitable[None]]
"""Loads the checkpoint in a directory: (client, directory, version, flush). Raises EngineError."""


class DiskWeights:
    """A checkpoint file that the server reads, in anonymous memory, which is freed when this process ends.

    Args:
        layout: layout of the snapshots.
        stage: a directory that worker and server can access, for a server on another host or in another container;
            empty: anonymous memory of this process.
        table: table of the server's options, for errors: rollout.sglang.
        load: loads the file into the server.
    """

    def __init__(self, layout: Layout, stage: str, table: str, load: Load) -> None:
        self._layout = layout
        self._stage = stage
        self._table = table
        self._load = load

    async def stage(self, client: ServerClient, snapshot: Snapshot) -> Staged:  # noqa: ARG002
        with ExitStack() as resources:
            directory = resources.enter_context(_directory(self._stage, self._table))
            file = directory / CHECKPOINT
            if not self._stage:
                resources.enter_context(_anonymous(file))
            await asyncio.to_thread(self._write, snapshot, file)
            return _StagedCheckpoint(str(directory), snapshot.version, self._load, resources.pop_all())

    async def close(self, client: ServerClient) -> None: ...

    def _write(self, snapshot: Snapshot, file: Path) -> None:
        tensors = {parameter.name: view for bucket in self._layout.buckets(snapshot) for parameter, view in bucket}
        save_file(tensors, file, metadata={"format": "pt"})


@dataclass(frozen=True, slots=True)
class _StagedCheckpoint:
    """A checkpoint in a directory that exists until ``resources`` are closed."""

    directory: str
    version: int
    loader: Load
    resources: ExitStack

    async def load(self, client: ServerClient, *, flush: bool) -> None:
        await self.loader(client, self.directory, self.version, flush)

    def close(self) -> None:
        self.resources.close()


@contextmanager
def _directory(stage: str, table: str) -> Iterator[Path]:
    if stage and not Path(stage).is_dir():
        raise EngineError(f"{table}.stage is {stage!r}, which is no directory of this host; make it first")
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
