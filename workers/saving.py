"""Checkpoints of the trainer: written aside, made certain, renamed, and only then are older ones taken away."""

import asyncio
import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist
from flowrt.workers.together import Together
from safetensors import SafetensorError
from torch.distributed.checkpoint.api import CheckpointException

from flowrt.client.session import Session
from flowrt.engines.checkpoint import load_tokenizer
from flowrt.engines.protocols import TrainEngine
from flowrt.errors import EngineError
from flowrt.recipes.config import RunConfig
from flowrt.recipes.paths import checkpoint_dir, checkpoint_steps, kept_model_dir, model_dir

log = logging.getLogger("flowrt")


class Checkpoints:
    """Saves and loads the state of a training engine; every rank has one, and they act together."""

    def __init__(self, session: Session, config: RunConfig, engine: TrainEngine, ranks: Together) -> None:
        self._session = session
        self._ranks = ranks
        self._config = config
        self._engine = engine
        self._run_dir = Path(config.run_dir)
        self._saved = session.welcome.position.step  # the steps of the newest one
        self._leads = not dist.is_initialized() or dist.get_rank() == 0

    async def load(self) -> int:
        """Take up the checkpoint that the controller goes on from, if there is one; returns the steps that are done."""
        step = self._session.welcome.position.step
        if step:
            with self._session.timeline.busy("load"), self._ranks.excused():
                whole = checkpoint_dir(self._run_dir, step)
                await self._ranks.call(lambda: self._engine.load(whole), f"checkpoint {step}")
            log.info("going on after step %d", step - 1)
        return step

    async def save_if_due(self, step: int) -> None:
        """Save if ``step`` steps are done and one is due after so many."""
        if self._config.checkpoint.every and step % self._config.checkpoint.every == 0:
            await self.save(step)

    async def save(self, step: int) -> None:
        """Save the state after ``step`` steps, unless it is saved already, or no checkpoints are wanted."""
        if step == self._saved or not self._config.checkpoint.every:
            return
        whole = checkpoint_dir(self._run_dir, step)
        # Disks take as long as they take, and rank 0 does most of it alone.
        then = f"those before it are whole: make room, then flowrt resume {self._run_dir}"
        with self._session.timeline.busy("save"), naming(f"checkpoint {whole}", then), self._ranks.excused():
            aside = whole.with_name(f".{whole.name}.part")
            if self._leads:
                await asyncio.to_thread(self._make_room, aside)
            if dist.is_initialized():
                await self._ranks.call(dist.barrier, f"room for checkpoint {step}")
            await self._ranks.call(lambda: self._engine.save(aside), f"checkpoint {step}")
            if self._leads:
                await asyncio.to_thread(self._complete, aside)
                # A checkpoint must never know of a step of which the ledger does not.
                await self._session.saved(step)
                await asyncio.to_thread(self._publish, aside, whole)
        self._saved = step

    def _make_room(self, aside: Path) -> None:
        """An empty directory; what earlier lives of the run left unfinished goes."""
        aside.parent.mkdir(exist_ok=True)
        for left in aside.parent.glob(".step-*"):
            shutil.rmtree(left)
        aside.mkdir()
        if self._config.model:
            keep_model(Path(self._config.model), kept_model_dir(self._run_dir))

    def _complete(self, aside: Path) -> None:
        load_tokenizer(model_dir(self._config)).save_pretrained(aside)
        make_certain(aside)

    def _publish(self, aside: Path, whole: Path) -> None:
        aside.rename(whole)
        for named_in in (whole.parent, self._run_dir):  # the first checkpoint has a new directory around it
            sync(named_in)
        for step in checkpoint_steps(self._run_dir)[: -self._config.checkpoint.keep]:
            old = checkpoint_dir(self._run_dir, step)
            gone = old.with_name(f".{old.name}.old")
            old.rename(gone)  # first: half of a checkpoint must not look like one
            shutil.rmtree(gone)


@contextmanager
def naming(what: str, then: str) -> Iterator[None]:
    """What the disk refuses becomes an EngineError: what cannot be written, why, and what to do ``then``."""
    try:
        yield
    except (OSError, SafetensorError, CheckpointException) as error:
        first = next(iter(error.failures.values()))[0] if isinstance(error, CheckpointException) else error
        reason = str(first).strip().partition("\n")[0]
        raise EngineError(f"{what} cannot be written: {reason}; {then}") from error


def keep_model(model: Path, kept: Path) -> None:
    """Keep the model that the run started from in the run directory, as links to its files where that is possible."""
    if kept.exists() or kept.resolve() == model.resolve():
        return
    aside = kept.with_name(f".{kept.name}.part")
    shutil.rmtree(aside, ignore_errors=True)
    shutil.copytree(model, aside, copy_function=_link_or_copy)
    make_certain(aside)
    aside.rename(kept)
    sync(kept.parent)


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(os.path.realpath(source), target)
    except OSError:  # another file system, or one without links
        shutil.copy2(source, target)


def make_certain(directory: Path) -> None:
    """All that is in it is on the disk when this returns: a machine that loses its power then loses none of it."""
    for path in directory.rglob("*"):
        sync(path)
    sync(directory)


def sync(path: Path) -> None:
    """What this file holds, or which names this directory has, is on the disk when this returns."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
