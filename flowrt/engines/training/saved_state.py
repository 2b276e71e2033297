"""State of a training engine on disk: named tensors in safetensors files, written by torch.distributed.checkpoint.

Scalars are tensors too, so no pickle is needed (the default of torch.distributed.checkpoint).
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

from flowrt.errors import EngineError, first_line

CPU_RNG = "rng.cpu"
MODEL = "model."
"""Prefix of the names of the model's parameters and buffers."""
NUMBER = "algorithm."
"""Prefix of the numbers of an adaptive algorithm."""
FILE_BYTES = 25 * 10**7
"""Maximum file size. A file is assembled in memory before it is written, which takes up to twice its size."""


def files_of(sizes: Mapping[str, int], file_bytes: int) -> dict[str, int]:
    """File number (from 1) of each tensor name, given sizes in bytes.

    Files are filled in order with at most ``file_bytes`` bytes each; a larger tensor has a file of its own.
    """
    files: dict[str, int] = {}
    file = 1
    filled = 0
    for name, size in sizes.items():
        if filled and filled + size > file_bytes:
            file += 1
            filled = 0
        files[name] = file
        filled += size
    return files


def write_tensors(directory: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write full tensors into an existing directory; not collective, called in one process."""
    files = files_of({name: tensor.nbytes for name, tensor in tensors.items()}, FILE_BYTES)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # intended: only this process writes
        save(dict(tensors), storage_writer=HuggingFaceStorageWriter(str(directory), files), no_dist=True)


def read_tensors(directory: Path, prefix: str = "") -> dict[str, torch.Tensor]:
    """The tensors that `write_tensors` wrote whose names begin with ``prefix``, on the CPU, by name.

    Shards of several ranks are put together. Raises EngineError if the files are missing or damaged.
    """
    try:
        stored = HuggingFaceStorageReader(str(directory)).read_metadata().state_dict_metadata
        if not stored:
            raise EngineError(f"{directory} holds no state of a training engine; is the checkpoint complete?")
        tensors = {
            name: torch.empty(entry.size, dtype=entry.properties.dtype)
            for name, entry in stored.items()
            if isinstance(entry, TensorStorageMetadata) and name.startswith(prefix)
        }
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            load(tensors, storage_reader=HuggingFaceStorageReader(str(directory)), no_dist=True)
    except (OSError, SafetensorError, ValueError, CheckpointException) as error:
        raise EngineError(
            f"the state of a training engine in {directory} cannot be read: {first_line(error)}"
        ) from error
    return tensors


def number_tensors(numbers: Mapping[str, float]) -> dict[str, torch.Tensor]:
    """Numbers of an adaptive algorithm as float64 tensors of a checkpoint, without rounding."""
    return {f"{NUMBER}{name}": torch.tensor(value, dtype=torch.float64) for name, value in numbers.items()}


def numbers_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """Inverse of `number_tensors`; other tensors are ignored."""
    return {name.removeprefix(NUMBER): float(tensor) for name, tensor in tensors.items() if name.startswith(NUMBER)}


def gather_rng() -> dict[str, torch.Tensor]:
    """The CPU random state of every rank, by name. Collective."""
    own = torch.get_rng_state()
    if not dist.is_initialized():
        return {f"{CPU_RNG}.0": own}
    states = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(states, own)
    return {f"{CPU_RNG}.{rank}": state for rank, state in enumerate(states)}


def restore_rng(tensors: Mapping[str, torch.Tensor]) -> None:
    """Restore this rank's CPU random state; if the checkpoint has none for this rank, nothing changes."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    state = tensors.get(f"{CPU_RNG}.{rank}")
    if state is not None:
        torch.set_rng_state(state)
