"""State of the sharded training engine on disk: each rank writes its shards; readable on any number of ranks.

Files are safetensors, without pickles. Tensor names are those of `TorchTrainer`, whose files can be read too.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from flowrt.engines.training.optimizer import optimizer_state
from flowrt.engines.training.saved_state import CPU_RNG, FILE_BYTES, files_of, number_tensors, numbers_of
from flowrt.errors import EngineError, WaitExpired, first_line
from flowrt.ranks.barrier import RankBarrier

MOMENTS = ("exp_avg", "exp_avg_sq")


class ShardBarrier:
    """A barrier of ranks that have written or read their shards. Keeps its error, which torch would replace."""

    def __init__(self) -> None:
        self._expired: WaitExpired | None = None

    def enter(self, what: str) -> None:
        """Wait for all ranks; ``what`` names the event in errors. Raises WaitExpired if a rank is lost."""
        try:
            RankBarrier("shards").arrive(what)
        except WaitExpired as expired:
            self._expired = expired  # torch waits for the other ranks next, and fails with a less specific error
            raise

    @contextmanager
    def restore_error(self) -> Iterator[None]:
        """Raise the barrier's WaitExpired in place of torch's RuntimeError."""
        try:
            yield
        except RuntimeError:
            if self._expired:
                raise self._expired from None
            raise


class Writer(HuggingFaceStorageWriter):
    """Waits for slower ranks before torch's own collective, which would time out."""

    barrier: ShardBarrier

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        try:
            return super().write_data(plan, planner)
        finally:
            self.barrier.enter("all shards to be written")


class Reader(HuggingFaceStorageReader):
    """Waits for slower ranks before torch's own collective, which would time out."""

    barrier: ShardBarrier

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        try:
            return super().read_data(plan, planner)
        finally:
            self.barrier.enter("all shards to be read")


def save(
    directory: Path,
    shards: Mapping[str, torch.Tensor],
    optimizer: torch.optim.Optimizer,
    steps: int,
    *,
    numbers: Mapping[str, float],
) -> None:
    """Write the state. Collective; the files of all ranks are written when this returns.

    Args:
        directory: exists and is empty; the same on all ranks.
        shards: trained parameters by name.
        optimizer: AdamW over them.
        steps: number of completed steps.
        numbers: numbers of an adaptive algorithm, equal on all ranks.

    Raises WaitExpired if a rank is lost, and OSError, SafetensorError or CheckpointException if writing fails.
    """
    state = _tensors(shards, optimizer)
    ranks = dist.get_world_size()
    sizes = {name: tensor.nbytes for name, tensor in state.items()}  # of full tensors
    common = {"steps": torch.tensor(steps), **number_tensors(numbers)}
    sizes |= dict.fromkeys((*common, *(_rng(rank) for rank in range(ranks))), 0)
    state[_rng(dist.get_rank())] = torch.get_rng_state()
    if dist.get_rank() == 0:
        state |= common
    writer = Writer(str(directory), files_of(sizes, ranks * FILE_BYTES), save_distributed=True)
    writer.barrier = ShardBarrier()
    with writer.barrier.restore_error():
        dcp.save(state, storage_writer=writer)


def load(
    directory: Path,
    shards: Mapping[str, torch.Tensor],
    optimizer: torch.optim.Optimizer,
    *,
    numbers: Mapping[str, float],
) -> tuple[int, dict[str, float]]:
    """Read the state into the shards and the optimiser. Collective.

    Returns the number of completed steps, and the numbers of the checkpoint, for the names in ``numbers`` that it has.

    Raises EngineError if the directory has no such state, or the state of another model, and WaitExpired if a rank is
    lost.
    """
    try:
        known = HuggingFaceStorageReader(str(directory)).read_metadata().state_dict_metadata
        if "steps" not in known:
            raise EngineError(f"{directory} holds no state of a training engine; is the checkpoint complete?")
        state = _tensors(shards, optimizer)
        for name, tensor in state.items():
            saved = known.get(name)
            if name.startswith("model.") and not (
                isinstance(saved, TensorStorageMetadata) and saved.size == tensor.shape
            ):
                raise EngineError(f"{directory} holds the state of another model; was the run's model changed?")
        own_rng = _rng(dist.get_rank())
        state |= {"steps": torch.tensor(0), own_rng: torch.get_rng_state(), **number_tensors(numbers)}
        state = {name: tensor for name, tensor in state.items() if name in known}
        reader = Reader(str(directory))
        reader.barrier = ShardBarrier()
        with reader.barrier.restore_error():
            dcp.load(state, storage_reader=reader)
    except (OSError, SafetensorError, ValueError, CheckpointException) as error:
        raise EngineError(
            f"the state of a training engine in {directory} cannot be read: {first_line(error)}"
        ) from error
    if own_rng in state:
        torch.set_rng_state(state[own_rng])
    steps = int(state["steps"])
    for shard in shards.values():
        optimizer.state[shard]["step"].fill_(float(steps))
    return steps, numbers_of(state)


def _tensors(shards: Mapping[str, torch.Tensor], optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """The live tensors by name. Creates missing optimiser state as the first step would."""
    state: dict[str, torch.Tensor] = {}
    for name, shard in shards.items():
        moments = optimizer.state[shard]
        if not moments:
            zeros = {moment: torch.zeros_like(shard.detach()) for moment in MOMENTS}
            moments.update(optimizer_state(shard, {"step": torch.tensor(0.0), **zeros}))
        state[f"model.{name}"] = shard.detach()
        state |= {f"optimizer.{name}.{moment}": moments[moment] for moment in MOMENTS}
    return state


def _rng(rank: int) -> str:
    """Name of a rank's random state; a rank without a saved state keeps its current state."""
    return f"{CPU_RNG}.{rank}"
