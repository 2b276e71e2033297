"""The state of a training engine on disk: named tensors, by torch.distributed.checkpoint into safetensors files.

Nothing in these files is code: numbers are tensors too. (By default torch.distributed.checkpoint pickles.)
"""

import warnings
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from flowrt.errors import EngineError

CPU_RNG = "rng.cpu"
FILE_BYTES = 25 * 10**7
"""A file is put together in memory before it is written, in up to twice its size."""


def files_of(sizes: Mapping[str, int], file_bytes: int) -> dict[str, int]:
    """In which file, from 1 on, each name goes: in order, at most so many bytes a file, or one that is larger alone."""
    files: dict[str, int] = {}
    file, filled = 1, 0
    for name, size in sizes.items():
        if filled and filled + size > file_bytes:
            file, filled = file + 1, 0
        files[name] = file
        filled += size
    return files


def write_tensors(directory: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write these tensors, whole, into a directory that exists."""
    files = files_of({name: tensor.nbytes for name, tensor in tensors.items()}, FILE_BYTES)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # this process alone writes, as it should
        save(dict(tensors), storage_writer=HuggingFaceStorageWriter(str(directory), files), no_dist=True)


def read_tensors(directory: Path) -> dict[str, torch.Tensor]:
    """What `write_tensors` wrote. Raises EngineError when it is not there, or damaged."""
    try:
        found = HuggingFaceStorageReader(str(directory)).read_metadata().state_dict_metadata
        if not found:
            raise EngineError(f"{directory} holds no state of a training engine; is the checkpoint complete?")
        tensors = {
            name: torch.empty(one.size, dtype=one.properties.dtype)
            for name, one in found.items()
            if isinstance(one, TensorStorageMetadata)
        }
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            load(tensors, storage_reader=HuggingFaceStorageReader(str(directory)), no_dist=True)
    except (OSError, SafetensorError, ValueError, CheckpointException) as error:
        reason = str(error).strip().partition("\n")[0]
        raise EngineError(f"the state of a training engine in {directory} cannot be read: {reason}") from error
    return tensors


def gather_rng() -> dict[str, torch.Tensor]:
    """The state of the CPU's random numbers on every rank, by name; the ranks meet."""
    mine = torch.get_rng_state()
    if not dist.is_initialized():
        return {f"{CPU_RNG}.0": mine}
    states = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(states, mine)
    return {f"{CPU_RNG}.{rank}": state for rank, state in enumerate(states)}


def restore_rng(tensors: Mapping[str, torch.Tensor]) -> None:
    """Take up this rank's random numbers where they were; a rank that was not there keeps its own."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    state = tensors.get(f"{CPU_RNG}.{rank}")
    if state is not None:
        torch.set_rng_state(state)
