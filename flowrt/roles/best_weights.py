"""The best weights of a run by a result of evaluations (``checkpoint.best``), in "best" in the run directory.

- The trainer keeps a snapshot of each version that is evaluated until its results are known, and writes this snapshot,
  because the weights in the engine are of a later version by then.
- A directory gets its name when it is complete and its checksum is that of the version. Then best.json lists it, and
  directories that are not listed any more are deleted. If a process is killed at any point, best.json still lists
  complete directories only.
- A resumed run goes back to a checkpoint. So the best versions up to the newest checkpoint are kept, too.
"""

import asyncio
import json
import logging
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from flowrt.client.session import Session
from flowrt.engines.exported_model import ADAPTER, complete
from flowrt.engines.hf import parameter_shapes
from flowrt.errors import EngineError
from flowrt.protocol.messages import Evaluated
from flowrt.recipes.config import RunConfig
from flowrt.recipes.run_dir import best_dir, checkpoint_steps, model_dir
from flowrt.roles.checkpoints import disk_errors
from flowrt.roles.evaluation import MAX_WAITING
from flowrt.runtime.files import atomic_write, delete_directory, fsync, fsync_tree, partial_path
from flowrt.transport.weights.snapshot import Snapshot

log = logging.getLogger("flowrt")
WEIGHTS = "model.safetensors"
OMITTED = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf", "*.index.json", ADAPTER, "adapter_*")
"""Files of the initial model that are not copied, because they contain weights, or belong to an adapter."""
LIST = "best.json"


@dataclass(frozen=True, slots=True)
class Listed:
    """A version among the best."""

    version: int
    value: float
    checksum: int
    """CRC-32 of the version as it was published."""


def read_list(run_dir: Path) -> list[Listed]:
    """The versions in best.json whose directories exist, best first; empty if it cannot be read."""
    try:
        listed = [Listed(**load) for load in json.loads((run_dir / "best" / LIST).read_text())]
    except (OSError, ValueError, TypeError):
        return []
    return [entry for entry in listed if best_dir(run_dir, entry.version).is_dir()]


def to_keep(listed: list[Listed], keep: int, saved_step: int) -> list[Listed]:
    """The ``keep`` best versions, and the ``keep`` best of those up to ``saved_step``; best first.

    The latter are those that a run resumed from its checkpoint of ``saved_step`` has.
    """
    order = sorted(listed, key=lambda entry: (-entry.value, entry.version))
    resumable = [entry for entry in order if entry.version <= saved_step]
    kept = {entry.version for entry in (*order[:keep], *resumable[:keep])}
    return [entry for entry in order if entry.version in kept]


class BestDirectory:
    """The directory "best" of a run."""

    def __init__(self, config: RunConfig, layout: Mapping[str, torch.Tensor], first_step: int) -> None:
        """Delete what a killed trainer left, and versions after ``first_step``, from which the run continues.

        ``layout`` has the published weights in their order; only shapes and dtypes are read.

        Raises EngineError if their shapes are not those of the parameters of the run's model.
        """
        self._config = config
        self._run_dir = Path(config.run_dir)
        shapes = parameter_shapes(model_dir(config))
        if [tensor.shape for tensor in layout.values()] != list(shapes.values()):
            raise EngineError(
                f"the trainer's weights are not the parameters of {model_dir(config)}; leave out checkpoint.best"
            )
        self._layout = {
            name: (shape, tensor.dtype) for (name, shape), tensor in zip(shapes.items(), layout.values(), strict=True)
        }
        (self._run_dir / "best").mkdir(mode=0o700, exist_ok=True)
        self._set_list([entry for entry in self.listed() if entry.version <= first_step])

    def listed(self) -> list[Listed]:
        """The versions that are kept, best first."""
        return read_list(self._run_dir)

    def prune(self) -> None:
        """Delete versions that were kept only for a resume and are not needed any more."""
        self._set_list(self.listed())

    def write(self, snapshot: Snapshot, value: float) -> None:
        """Write a version with this result, and delete versions that are not among the best any more.

        Raises EngineError if writing fails, or the checksum of the files is not that of the version.
        """
        path = best_dir(self._run_dir, snapshot.version)
        partial, checksum = partial_path(path), snapshot.checksum()
        with disk_errors(f"the best weights {path}", f"free disk space, then flowrt resume {self._run_dir}"):
            shutil.rmtree(partial, ignore_errors=True)
            source = model_dir(self._config)
            shutil.copytree(source, partial, ignore=shutil.ignore_patterns(*OMITTED))
            complete(partial, source, self._config.data.chat_template)
            _set_dtype(partial / "config.json", next(iter(self._layout.values()))[1])
            tensors = {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in self._layout.items()}
            snapshot.restore(tensors)
            save_file(tensors, partial / WEIGHTS, metadata={"format": "pt"})
            stored = load_file(partial / WEIGHTS)
            actual = Snapshot.take(snapshot.version, {name: stored[name] for name in self._layout}).checksum()
            if actual != checksum:
                raise EngineError(f"{partial / WEIGHTS} has checksum {actual}, version {snapshot.version} {checksum}")
            new = Listed(snapshot.version, value, checksum)
            atomic_write(partial / "version.json", json.dumps(asdict(new)) + "\n")
            fsync_tree(partial)
            if path.exists():  # left by an earlier attempt, and not listed
                delete_directory(path)
            partial.rename(path)
            fsync(path.parent)
            self._set_list([*(entry for entry in self.listed() if entry.version != new.version), new])

    def _set_list(self, listed: list[Listed]) -> None:
        """Write best.json, then delete all directories that it does not list."""
        saved = max(checkpoint_steps(self._run_dir), default=0)
        kept = to_keep(listed, self._config.checkpoint.keep_best, saved)
        directory = self._run_dir / "best"
        atomic_write(directory / LIST, json.dumps([asdict(entry) for entry in kept], indent=1) + "\n")
        fsync(directory)
        names = {best_dir(self._run_dir, entry.version).name for entry in kept}
        for path in [*directory.glob("step-*"), *directory.glob(".step-*")]:
            if path.name not in names:
                shutil.rmtree(path)


def _set_dtype(path: Path, dtype: torch.dtype) -> None:
    """Write the dtype of the weights, in which transformers loads them, to a config.json."""
    table = json.loads(path.read_text())
    table.pop("torch_dtype", None)  # of transformers 4
    path.write_text(json.dumps(table | {"dtype": str(dtype).removeprefix("torch.")}, indent=2) + "\n")


class BestWeights:
    """Keeps and writes the best weights of a run, on the leader of the trainer's ranks."""

    def __init__(self, session: Session, config: RunConfig, directory: BestDirectory) -> None:
        self._session = session
        self._config = config
        self._directory = directory
        self._name, _, self._metric = config.checkpoint.best.partition("/")
        self._snapshots: dict[int, Snapshot] = {}
        self._newest: Snapshot | None = None

    def keep(self, snapshot: Snapshot) -> None:
        """Keep a published version: until its results are known if it is evaluated, else until the next version.

        The session keeps the newest version too, so that this takes no additional memory.
        """
        interval, version = self._config.eval.interval, snapshot.version
        self._newest = snapshot  # if training ends here, this version is the last, which is evaluated
        if not (version == 0 or (interval and version % interval == 0)):
            return
        self._snapshots[version] = snapshot
        # The oldest versions are being evaluated; of the others, only the newest can still be evaluated.
        running = 1 + (MAX_WAITING if self._config.eval.overlap == "wait" else 0)
        for unneeded in sorted(self._snapshots)[running:-1]:
            del self._snapshots[unneeded]

    async def run(self) -> None:
        """Write the best weights as results arrive, until no evaluation follows.

        Raises EngineError if writing fails.
        """
        while True:
            for result in await self._session.unless_ended(self._session.evaluations.take_next()):
                if not result.name:
                    await asyncio.to_thread(self._directory.prune)
                    return
                if result.name == self._name:
                    await self._take(result)

    async def _take(self, result: Evaluated) -> None:
        snapshot, value = self._snapshots.pop(result.version, None), dict(result.numbers).get(self._metric)
        if snapshot is None and self._newest is not None and self._newest.version == result.version:
            snapshot = self._newest
        listed = self._directory.listed()
        if value is None or any(other.version == result.version for other in listed):
            return
        if sum(other.value >= value for other in listed) >= self._config.checkpoint.keep_best:
            return
        if snapshot is None:
            log.warning("version %d is among the best, and its weights are not kept any more", result.version)
            return
        with self._session.timeline.busy("save"):
            await asyncio.to_thread(self._directory.write, snapshot, value)
        log.info("version %d is among the best: %s is %.4g", result.version, self._config.checkpoint.best, value)
