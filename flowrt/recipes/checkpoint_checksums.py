"""Checksums of a checkpoint: written before the checkpoint gets its name, compared before it is loaded.

``checksums.json`` has the size in bytes and the CRC-32 of each file. Bytes lost or changed by a disk or a copy are not
detected otherwise: safetensors validates the header of a file, not its numbers.
"""

import json
import zlib
from pathlib import Path

from flowrt.errors import ConfigError
from flowrt.recipes.run_dir import checkpoint_dir, checkpoint_steps
from flowrt.runtime.files import atomic_write

NAME = "checksums.json"
BLOCK_BYTES = 1 << 22


def write_checksums(directory: Path) -> None:
    """Write the checksums of every file in the directory. Raises OSError if a file cannot be read or written."""
    files = sorted(path for path in directory.rglob("*") if path.is_file() and path.name != NAME)
    sums = {str(path.relative_to(directory)): [path.stat().st_size, _crc32(path)] for path in files}
    atomic_write(directory / NAME, json.dumps(sums, indent=1) + "\n")


def damage(directory: Path) -> str:
    """The first damaged file of a checkpoint and its damage, as text; empty if every file is as it was written."""
    try:
        sums = json.loads((directory / NAME).read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        return f"{NAME} cannot be read ({str(error).partition(chr(10))[0]})"
    if not isinstance(sums, dict) or not sums:
        return f"{NAME} is damaged"
    for name, expected in sums.items():
        path = directory / name
        try:
            actual = [path.stat().st_size, _crc32(path)]
        except OSError as error:
            return f"{name} cannot be read ({error.strerror})"
        if actual != expected:
            return f"{name} has other bytes than were written"
    return ""


def check_newest(run_dir: Path) -> None:
    """Raise ConfigError if the newest checkpoint of a run, if there is one, is damaged; see `check_checkpoint`."""
    if steps := checkpoint_steps(run_dir):
        check_checkpoint(run_dir, steps[-1])


def check_checkpoint(run_dir: Path, step: int) -> None:
    """Raise ConfigError if the checkpoint after ``step`` steps is damaged; the message names the newest intact one."""
    checkpoint = checkpoint_dir(run_dir, step)
    problem = damage(checkpoint)
    if not problem:
        return
    earlier = [checkpoint_step for checkpoint_step in checkpoint_steps(run_dir) if checkpoint_step < step]
    intact = next((saved for saved in reversed(earlier) if not damage(checkpoint_dir(run_dir, saved))), None)
    if intact is None:
        fix = "there is no intact one before it: restore it from a copy, or start again in another run directory"
    else:
        fix = (
            f"{checkpoint_dir(run_dir, intact).name} before it is intact: remove {checkpoint.name} to resume from that"
        )
    raise ConfigError(f"checkpoint {checkpoint} is damaged: {problem}; {fix}")


def _crc32(path: Path) -> int:
    total = 0
    with path.open("rb") as file:
        while block := file.read(BLOCK_BYTES):
            total = zlib.crc32(block, total)
    return total
