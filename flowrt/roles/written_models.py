"""Models that a trainer writes for transformers: the trained one, and one every ``checkpoint.hf_every`` steps.

A directory has its name only while it is complete. What a directory has: `flowrt.engines.exported_model`.
"""

import asyncio
import logging
import shutil
import socket
from pathlib import Path

import torch.distributed as dist

from flowrt.client.session import Session
from flowrt.engines.base import TrainEngine
from flowrt.engines.exported_model import complete
from flowrt.ranks.barrier import RankCollectives
from flowrt.recipes.config import RunConfig
from flowrt.recipes.run_dir import final_dir, hf_dir, hf_steps, model_dir
from flowrt.roles.checkpoints import disk_errors
from flowrt.runtime.files import delete_directory, fsync, fsync_tree, partial_path, replace_directory

log = logging.getLogger("flowrt")


class WrittenModels:
    """Writes the models of a run. All methods are collective: every rank calls them."""

    def __init__(self, session: Session, config: RunConfig, engine: TrainEngine, ranks: RankCollectives) -> None:
        self._session = session
        self._config = config
        self._engine = engine
        self._ranks = ranks
        self._run_dir = Path(config.run_dir)
        self._is_leader = not dist.is_initialized() or dist.get_rank() == 0

    async def resume(self, step: int) -> None:
        """Delete models after ``step``, from which the run continues, and what a killed trainer left."""
        if self._is_leader:
            await asyncio.to_thread(self._prune, step)

    async def write_if_due(self, step: int) -> None:
        """Write the model after ``step`` steps if one is due, and delete those over ``checkpoint.keep``.

        Raises EngineError if writing fails.
        """
        every = self._config.checkpoint.hf_every
        if every and step % every == 0:
            await self._write(hf_dir(self._run_dir, step), f"the model of step {step}")
            await self.resume(step)

    async def write_final(self) -> None:
        """Write the trained model. The last step is checkpointed before, unless checkpoints are disabled.

        Raises EngineError if writing fails.
        """
        await self._write(final_dir(self._config), "the trained model")

    async def _write(self, path: Path, what: str) -> None:
        with self._session.timeline.busy("save"), self._ranks.exempt():
            await self._ranks.call(lambda: self._replace(path, what), what)

    def _replace(self, path: Path, what: str) -> None:
        partial = partial_path(path)
        can_resume = bool(self._config.checkpoint.every)
        fix = f"free disk space, then flowrt resume {self._run_dir}" if can_resume else "there is no checkpoint"
        with disk_errors(f"{what} {path}", fix):
            if self._is_leader:
                path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                shutil.rmtree(partial, ignore_errors=True)  # left by a killed process
            self._engine.export(partial)
            if self._is_leader:
                complete(partial, model_dir(self._config), self._config.data.chat_template)
                fsync_tree(partial)
                replace_directory(partial, path)
                fsync(path.parent)
        if self._is_leader:
            log.info("%s is %s on host %s", what, path, socket.gethostname())

    def _prune(self, step: int) -> None:
        for left in (self._run_dir / "hf").glob(".step-*"):
            shutil.rmtree(left)
        kept = [hf_step for hf_step in hf_steps(self._run_dir) if hf_step <= step][-self._config.checkpoint.keep :]
        for hf_step in hf_steps(self._run_dir):
            if hf_step not in kept:
                delete_directory(hf_dir(self._run_dir, hf_step))
