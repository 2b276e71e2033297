"""Digests of the data files and the files of reward functions of a run, to tell whether they are those of its start."""

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path

from flowrt.recipes.config import RunConfig
from flowrt.recipes.data.files import data_files, held_out_split
from flowrt.recipes.data_sets import set_data
from flowrt.recipes.eval_names import eval_data_sets
from flowrt.rewards.reward_names import parse_functions

READ_BYTES = 64 << 20
"""Bytes that are read of a data set: of a larger one, blocks that are evenly distributed over its files."""
BLOCKS = 64
"""Number of blocks of a file that is not read whole."""


def input_digests(config: RunConfig) -> tuple[str, ...]:
    """``DIGEST PATH`` of the data sets and of the files of reward functions; a path has a digest once.

    Raises ConfigError if a directory of data does not have the split of the run.
    """
    return tuple(f"{digest} {path}" for path, digest in _digests(config).items())


def changed_inputs(config: RunConfig) -> list[str]:
    """A sentence for each file of this host that is not the one of the start (``input_digests``).

    Raises as `input_digests`.
    """
    before = {path: digest for digest, _, path in (line.partition(" ") for line in config.input_digests)}
    now = _digests(config) if before else {}
    return [
        f"{path} is not the file of the start of the run: its content has changed; the run goes on with what it is now"
        for path, digest in now.items()
        if before.get(path, digest) != digest and Path(path).exists()
    ]


def _digests(config: RunConfig) -> Mapping[str, str]:
    files = dict(_data_sets(config))
    functions = {function.path: [Path(function.path)] for function in parse_functions(config.reward.functions)}
    return {path: _digest(of) for path, of in {**files, **functions}.items() if path}


def _data_sets(config: RunConfig) -> Iterator[tuple[str, list[Path]]]:
    data = config.data
    if data.path:
        yield data.path, data_files(Path(data.path), data.split)
    for data_set in data.sets:
        yield data_set.path, data_files(Path(data_set.path), set_data(data, data_set).split)
    for data_set in eval_data_sets(config).values():
        path = Path(data_set.path)
        yield data_set.path, data_files(path, held_out_split(path, data_set.split or config.eval.split))


def _digest(files: list[Path]) -> str:
    """SHA-256 of the sizes of files and of up to `READ_BYTES` of their content, the first 16 hexadecimal digits."""
    sha = hashlib.sha256()
    for file in files:
        try:
            _add(sha, file, READ_BYTES // len(files))
        except OSError:
            sha.update(b"cannot be read")
    return sha.hexdigest()[:16]


def _add(sha: "hashlib._Hash", file: Path, limit: int) -> None:
    size = file.stat().st_size
    sha.update(b"%d " % size)
    with file.open("rb") as opened:
        if size <= limit:
            sha.update(opened.read())
            return
        for block in range(BLOCKS):
            opened.seek((size - limit // BLOCKS) * block // (BLOCKS - 1))
            sha.update(opened.read(limit // BLOCKS))
