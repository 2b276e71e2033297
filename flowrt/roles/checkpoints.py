"""Checkpoints of the trainer: written to a temporary directory, synced, renamed; old ones are deleted last."""

import asyncio
import json
import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist
from safetensors import SafetensorError
from torch.distributed.checkpoint.api import CheckpointException

from flowrt.client.session import Session
from flowrt.engines.base import TrainEngine
from flowrt.engines.hf import weight_bytes
from flowrt.errors import EngineError, first_line
from flowrt.ranks.barrier import RankCollectives
from flowrt.recipes.checkpoint_checksums import check_checkpoint, write_checksums
from flowrt.recipes.config import RunConfig
from flowrt.recipes.model_files import TRAINER_STATE, is_adapter
from flowrt.recipes.run_dir import (
    checkpoint_dir,
    checkpoint_steps,
    kept_model_dir,
    kept_reference_dir,
    model_dir,
    reference_model_dir,
)
from flowrt.runtime.files import delete_directory, fsync, fsync_tree, partial_path
from flowrt.runtime.time_limits import state_s

log = logging.getLogger("flowrt")


class Checkpoints:
    """Saves and loads the state of a training engine. All methods are collective: every rank calls them."""

    def __init__(self, session: Session, config: RunConfig, engine: TrainEngine, ranks: RankCollectives) -> None:
        self._session = session
        self._ranks = ranks
        self._config = config
        self._engine = engine
        self._run_dir = Path(config.run_dir)
        self._limit_s = state_s(weight_bytes(model_dir(config)))
        self._saved_step = session.welcome.position.step  # step of the newest checkpoint
        self._is_leader = not dist.is_initialized() or dist.get_rank() == 0

    async def load(self) -> int:
        """Load the checkpoint from which the controller resumes, if there is one.

        Returns the number of completed steps (0 without a checkpoint). Raises EngineError if it cannot be loaded.
        """
        step = self._session.welcome.position.step
        if step:
            with (
                self._session.timeline.busy("load"),
                self._session.progress.expected(self._limit_s),
                self._ranks.exempt(),
            ):
                directory = checkpoint_dir(self._run_dir, step)
                if self._is_leader:
                    await asyncio.to_thread(check_checkpoint, self._run_dir, step)
                await self._ranks.call(lambda: self._engine.load(directory), f"checkpoint {step}")
            log.info("resuming after step %d", step - 1)
        return step

    async def save_if_due(self, step: int) -> None:
        """Save if a checkpoint is due after ``step`` completed steps. Raises EngineError if writing fails."""
        if self._config.checkpoint.every and step % self._config.checkpoint.every == 0:
            await self.save(step)

    async def save(self, step: int) -> None:
        """Save the state after ``step`` completed steps.

        Does nothing if that state is already saved or checkpoints are disabled. Raises EngineError if writing fails.
        """
        if step == self._saved_step or not self._config.checkpoint.every:
            return
        final = checkpoint_dir(self._run_dir, step)
        partial = partial_path(final)
        fix = f"earlier checkpoints are complete: free disk space, then flowrt resume {self._run_dir}"
        # Exempt from rank_timeout_s: writing time depends on the disk, and rank 0 does most of it alone.
        with (
            self._session.timeline.busy("save"),
            self._session.progress.expected(self._limit_s),
            disk_errors(f"checkpoint {final}", fix),
            self._ranks.exempt(),
        ):
            if self._is_leader:
                await asyncio.to_thread(self._prepare, partial)
            if dist.is_initialized():
                await self._ranks.call(dist.barrier, f"the directory of checkpoint {step}")
            await self._ranks.call(lambda: self._engine.save(partial), f"checkpoint {step}")
            if self._is_leader:
                await asyncio.to_thread(self._complete, partial, step)
                # Ledger first: a checkpoint must never be ahead of it.
                await self._session.saved(step)
                await asyncio.to_thread(self._publish, partial, final)
        self._saved_step = step

    def _prepare(self, partial: Path) -> None:
        """Create the directory, and delete incomplete checkpoints of earlier attempts."""
        partial.parent.mkdir(exist_ok=True)
        for incomplete in partial.parent.glob(".step-*"):
            shutil.rmtree(incomplete)
        partial.mkdir()
        own = self._run_dir.resolve()  # with the models that were built
        if (model := self._source(self._config.model, model_dir(self._config))).resolve().parent != own:
            keep_model(model, kept_model_dir(self._run_dir))
        if given := self._config.reference.model:
            model = self._source(given, reference_model_dir(self._config))
            if model.resolve().parent != own:
                keep_model(model, kept_reference_dir(self._run_dir))

    def _source(self, given: str, used: Path) -> Path:
        """The directory with the files of a model: with ``model_overrides`` the one in use has links to them."""
        links = given and self._config.model_overrides and not is_adapter(Path(given))
        return Path(given) if links else used

    def _complete(self, partial: Path, step: int) -> None:
        about = {
            "what": "the state of a trainer, to resume a run from, and not a model",
            "step": step,
            "engine": self._config.trainer.engine,
            "a model of it": f"flowrt export RUN --hf DIR --step {step}",
        }
        (partial / TRAINER_STATE).write_text(json.dumps(about, indent=1) + "\n")
        write_checksums(partial)
        fsync_tree(partial)

    def _publish(self, partial: Path, final: Path) -> None:
        partial.rename(final)
        for parent in (final.parent, self._run_dir):  # the first checkpoint also creates final.parent
            fsync(parent)
        for step in checkpoint_steps(self._run_dir)[: -self._config.checkpoint.keep]:
            delete_directory(checkpoint_dir(self._run_dir, step))


@contextmanager
def disk_errors(what: str, fix: str) -> Iterator[None]:
    """Convert write errors of the block to EngineError: ``what`` cannot be written, the reason, and the ``fix``."""
    try:
        yield
    except (OSError, SafetensorError, CheckpointException) as error:
        first = next(iter(error.failures.values()))[0] if isinstance(error, CheckpointException) else error
        raise EngineError(f"{what} cannot be written: {first_line(first)}; {fix}") from error


def keep_model(model: Path, kept: Path) -> None:
    """Copy the run's initial model to ``kept`` in the run directory, as hard links where the file system allows it."""
    if kept.exists() or kept.resolve() == model.resolve():
        return
    partial = partial_path(kept)
    shutil.rmtree(partial, ignore_errors=True)
    shutil.copytree(model, partial, copy_function=_link_or_copy)
    fsync_tree(partial)
    partial.rename(kept)
    fsync(kept.parent)


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(os.path.realpath(source), target)
    except OSError:  # another file system, or one without links
        shutil.copy2(source, target)
