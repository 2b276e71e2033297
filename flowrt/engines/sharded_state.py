"""A sharded training engine's state as safetensors, each rank its shards; read again on any number of ranks.

Nothing in these files is code. Their names are those of `TorchTrainer`, whose files can be read here too.
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

from flowrt.engines.roll_call import RollCall
from flowrt.engines.state import CPU_RNG, FILE_BYTES, files_of
from flowrt.errors import EngineError, WaitExpired

MOMENTS = ("exp_avg", "exp_avg_sq")


class Meeting:
    """Of ranks that have done their part of a checkpoint; it keeps the words of whoever waited there in vain."""

    def __init__(self) -> None:
        self._expired: WaitExpired | None = None

    def enter(self, what: str) -> None:
        try:
            RollCall("shards").here(what)
        except WaitExpired as expired:
            self._expired = expired  # torch takes it to the other ranks: it waits for them, too, and fails with less
            raise

    @contextmanager
    def named(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError:
            if self._expired:
                raise self._expired from None
            raise


class Writer(HuggingFaceStorageWriter):
    """Ranks are not equally fast at their shards: they wait for each other before torch has them meet."""

    met: Meeting

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        try:
            return super().write_data(plan, planner)
        finally:
            self.met.enter("all shards to be written")


class Reader(HuggingFaceStorageReader):
    """The same."""

    met: Meeting

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        try:
            return super().read_data(plan, planner)
        finally:
            self.met.enter("all shards to be read")


def save(directory: Path, shards: Mapping[str, torch.Tensor], optimizer: torch.optim.Optimizer, steps: int) -> None:
    """Write the state; all ranks take part, and have written when this returns."""
    state = _tensors(shards, optimizer)
    ranks = dist.get_world_size()
    sizes = {name: tensor.nbytes for name, tensor in state.items()}  # of which each rank has a part
    sizes |= dict.fromkeys(("steps", *(_rng(rank) for rank in range(ranks))), 0)
    state[_rng(dist.get_rank())] = torch.get_rng_state()
    if dist.get_rank() == 0:
        state["steps"] = torch.tensor(steps)
    writer = Writer(str(directory), files_of(sizes, ranks * FILE_BYTES), save_distributed=True)
    writer.met = Meeting()
    with writer.met.named():
        dcp.save(state, storage_writer=writer)


def load(directory: Path, shards: Mapping[str, torch.Tensor], optimizer: torch.optim.Optimizer) -> int:
    """Read the state into the shards and the optimiser; returns the steps it was saved after. All ranks take part.

    Raises EngineError when the directory holds no such state, or that of another model.
    """
    try:
        known = HuggingFaceStorageReader(str(directory)).read_metadata().state_dict_metadata
        if "steps" not in known:
            raise EngineError(f"{directory} holds no state of a training engine; is the checkpoint complete?")
        state = _tensors(shards, optimizer)
        for name, tensor in state.items():
            there = known.get(name)
            if name.startswith("model.") and not (
                isinstance(there, TensorStorageMetadata) and there.size == tensor.shape
            ):
                raise EngineError(f"{directory} holds the state of another model; was the run's model changed?")
        mine = _rng(dist.get_rank())
        state |= {"steps": torch.tensor(0), mine: torch.get_rng_state()}
        state = {name: tensor for name, tensor in state.items() if name in known}
        reader = Reader(str(directory))
        reader.met = Meeting()
        with reader.met.named():
            dcp.load(state, storage_reader=reader)
    except (OSError, SafetensorError, ValueError, CheckpointException) as error:
        reason = str(error).strip().partition("\n")[0]
        raise EngineError(f"the state of a training engine in {directory} cannot be read: {reason}") from error
    if mine in state:
        torch.set_rng_state(state[mine])
    steps = int(state["steps"])
    for shard in shards.values():
        optimizer.state[shard]["step"].fill_(float(steps))
    return steps


def _tensors(shards: Mapping[str, torch.Tensor], optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """The tensors themselves, by name; the optimiser's exist from here on, as it would make them in its first step."""
    state: dict[str, torch.Tensor] = {}
    for name, shard in shards.items():
        moments = optimizer.state[shard]
        if not moments:
            moments["step"] = torch.tensor(0.0)
            moments.update({moment: torch.zeros_like(shard.detach()) for moment in MOMENTS})
        state[f"model.{name}"] = shard.detach()
        state |= {f"optimizer.{name}.{moment}": moments[moment] for moment in MOMENTS}
    return state


def _rng(rank: int) -> str:
    """Random numbers belong to a rank; one that was not there before keeps its own."""
    return f"{CPU_RNG}.{rank}"
