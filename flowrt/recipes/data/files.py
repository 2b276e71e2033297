"""From a path to the rows of a data set.

| path | read as |
|---|---|
| file `*.parquet` | Parquet |
| file `*.arrow` | Arrow stream |
| file `*.csv`, `*.tsv` | a table of text, whose first line has the names of the columns |
| any other file | JSON Lines, or a JSON array if it begins with `[` |
| directory with `dataset_dict.json` | the split's directory, written by `datasets` (`save_to_disk`) |
| directory with `state.json` | the Arrow files that it names (`save_to_disk`) |
| directory with a directory named after the split | that directory |
| other directory | files of the split, in it or in its `data/` (a snapshot of a data set on the Hub), or all files if \
none is named after a split |

Text may be gzipped (`*.jsonl.gz`). A Parquet or Arrow file is recognised by its first bytes, too.

The name of a split begins the name of a file, or follows a separator in it: `test.jsonl`, `math-test-00000.parquet`.
"""

import gzip
import json
import re
import zlib
from collections.abc import Mapping
from itertools import chain
from pathlib import Path

from flowrt.errors import ConfigError
from flowrt.recipes.data.arrow import arrow_rows, parquet_rows
from flowrt.recipes.data.base import Rows, Shards
from flowrt.recipes.data.converted import array_rows, table_rows
from flowrt.recipes.data.file_kinds import ARROW_FILE, BOM, HEAD_BYTES, PARQUET, check_json, check_text
from flowrt.recipes.data.json_lines import GZIP_MAGIC, JsonLines

TABLES = {".csv": ",", ".tsv": "\t"}
"""Endings of tables, and what is between their fields."""
SUFFIXES = (
    (".parquet", ".jsonl", ".jsonl.gz", ".arrow"),
    (".csv", ".csv.gz", ".tsv", ".tsv.gz"),
    (".json", ".json.gz"),
)
"""Endings of the files of rows in a directory; of several groups the first one that there is."""
DESCRIPTIONS = re.compile(r"(dataset_infos?|dataset_dict|state|.*config|.*_infos?|metadata|package(-lock)?)\.json")
"""Names of JSON files that are no rows: they describe a data set, or belong to a program."""
HELD_OUT_SPLITS = ("test", "testing", "validation", "valid", "val", "dev", "eval", "evaluation")
"""Names of splits that are not trained on: those of which evaluations read the first one that there is."""
SPLITS = ("train", "training", *HELD_OUT_SPLITS)
"""Names of splits by which files are recognised."""
MAX_NAMES = 8


def open_rows(path: Path, split: str = "train") -> Rows:
    """The rows of a data file or directory.

    Args:
        path: file or directory.
        split: the split that is read from a directory.

    Raises ConfigError if the path or the split does not exist, cannot be read, or has no rows.
    """
    try:
        if not path.exists():
            raise ConfigError(f"data file {path} does not exist; give one with --data")
        if not (path.is_dir() or path.is_file()):
            raise ConfigError(
                f"data file {path} is not a regular file; each worker reads it, so it must be a file of rows"
            )
        parts = [_open(file) for file in data_files(path, split)]
    except OSError as error:
        raise ConfigError(f"data file {path} cannot be read: {error.strerror or error}") from error
    rows = parts[0] if len(parts) == 1 else Shards(parts)
    if not len(rows):
        raise ConfigError(f"data file {path} is empty; it needs at least one row")
    return rows


def data_files(path: Path, split: str) -> list[Path]:
    """The files that `open_rows` reads. Raises ConfigError if a directory does not have the split."""
    return _files(path, split) if path.is_dir() else [path]


def held_out_split(path: Path, split: str) -> str:
    """The split of a path that an evaluation reads.

    Args:
        path: file or directory.
        split: ``eval.split``; empty: the first of `HELD_OUT_SPLITS` that the directory has.

    Raises ConfigError if a directory has splits, and none of these.
    """
    try:
        known = _splits(path) if path.is_dir() else []
    except OSError as error:
        raise ConfigError(f"data file {path} cannot be read: {error.strerror or error}") from error
    chosen = split or next((name for name in HELD_OUT_SPLITS if name in known), "")
    if known and chosen not in known:
        lacking = f"no split {split!r}" if split else "no split test or validation to evaluate"
        raise ConfigError(f"data file {path} has {lacking}; it has {_some(known)}: name one with eval.split")
    return chosen or HELD_OUT_SPLITS[0]


def _splits(directory: Path) -> list[str]:
    """The splits of a directory; empty if its rows are not divided into splits."""
    if (directory / "dataset_dict.json").is_file():
        return _saved_splits(directory)
    if (directory / "state.json").is_file():
        return []
    for folder in (directory, directory / "data"):
        if files := _row_files(folder):
            return [name for name in SPLITS if any(_is_named(file, name) for file in files)]
        if found_in := [name for name in SPLITS if _row_files(folder / name)]:
            return found_in
    return []


def _open(file: Path) -> Rows:
    head = _head(file)
    name = file.name.lower()
    if name.endswith(".parquet") or head.startswith(PARQUET):
        return parquet_rows(file)
    if name.endswith(".arrow") or head.startswith(ARROW_FILE):
        return arrow_rows(file)
    check_text(file, head)
    table = Path(name.removesuffix(".gz")).suffix
    if table in TABLES:
        return table_rows(file, TABLES[table])
    check_json(file, head)
    return array_rows(file) if head.removeprefix(BOM).lstrip().startswith(b"[") else JsonLines(file)


def _head(file: Path) -> bytes:
    """The first bytes of a file, unpacked; empty if they cannot be."""
    with file.open("rb") as opened:
        head = opened.read(HEAD_BYTES)
        if not head.startswith(GZIP_MAGIC):
            return head
        opened.seek(0)
        try:
            return gzip.GzipFile(fileobj=opened).read(HEAD_BYTES)
        except (gzip.BadGzipFile, EOFError, zlib.error):
            return b""  # `unpacked` says why


def _files(directory: Path, split: str) -> list[Path]:
    """The files of rows of a directory, in order."""
    if (directory / "dataset_dict.json").is_file():
        names = _saved_splits(directory)
        if split not in names or not (directory / split).is_dir():
            raise ConfigError(f"data file {directory} has no split {split!r} (data.split); it has {_some(names)}")
        return _files(directory / split, split)
    if (directory / "state.json").is_file():
        return _saved_files(directory)
    for folder in (directory, directory / "data"):
        if files := _row_files(folder):
            return _of_split(folder, files, split)
        if _row_files(folder / split):
            return _files(folder / split, split)
    configurations = sorted(child.name for child in directory.iterdir() if child.is_dir() and _row_files(child))
    if configurations and all(name in SPLITS for name in configurations):
        raise ConfigError(f"data file {directory} has no split {split!r} (data.split); it has {_some(configurations)}")
    if configurations:
        raise ConfigError(
            f"data file {directory} is a directory of several data sets ({_some(configurations)}); name one"
        )
    raise ConfigError(
        f"data file {directory} is a directory without files of rows ({', '.join(chain(*SUFFIXES))}); name a file, a "
        "directory that datasets has saved, or a snapshot of a data set"
    )


def _saved_splits(directory: Path) -> list[str]:
    """The splits of a directory that `datasets.DatasetDict.save_to_disk` has written."""
    splits = _json(directory / "dataset_dict.json").get("splits")
    return [str(name) for name in splits] if isinstance(splits, list) else []


def _saved_files(directory: Path) -> list[Path]:
    """The files of a directory that `datasets.Dataset.save_to_disk` has written."""
    state = _json(directory / "state.json")
    entries = state.get("_data_files")
    names = (
        [entry.get("filename") for entry in entries if isinstance(entry, Mapping)] if isinstance(entries, list) else []
    )
    if state.get("_indices_files") or not names or not all(isinstance(name, str) for name in names):
        raise ConfigError(f"data file {directory / 'state.json'} does not list the files of the rows; save it again")
    files = [directory / Path(str(name)).name for name in names]
    for file in files:
        if not file.is_file():
            raise ConfigError(f"data file {file} does not exist, and state.json names it; is the copy complete?")
    return files


def _of_split(folder: Path, files: list[Path], split: str) -> list[Path]:
    """The files of the split; all files if none is named after a split."""
    own = [file for file in files if _is_named(file, split)]
    others = [name for name in SPLITS if any(_is_named(file, name) for file in files)]
    if not own and others:
        raise ConfigError(f"data file {folder} has no files of split {split!r} (data.split); it has {_some(others)}")
    return _of_one_kind(folder, own or files)


def _of_one_kind(folder: Path, chosen: list[Path]) -> list[Path]:
    """These files. Raises ConfigError if they are not all in the same format."""
    kinds = {next(suffix for suffix in chain(*SUFFIXES) if file.name.lower().endswith(suffix)) for file in chosen}
    if len(kinds) > 1:
        raise ConfigError(f"data file {folder} has files of several kinds ({', '.join(sorted(kinds))}); name one file")
    return chosen


def _is_named(file: Path, split: str) -> bool:
    return re.search(rf"(?:^|[-._ 0-9]){re.escape(split)}[-._ 0-9]", file.name) is not None


def _row_files(folder: Path) -> list[Path]:
    """The files of rows of a directory, sorted; none if it does not exist."""
    files = [file for file in sorted(folder.glob("*")) if not DESCRIPTIONS.fullmatch(file.name) and file.is_file()]
    by_suffix = ([file for file in files if file.name.lower().endswith(suffixes)] for suffixes in SUFFIXES)
    return next(filter(None, by_suffix), [])


def _json(file: Path) -> Mapping[str, object]:
    try:
        value = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"data file {file} is not JSON; save the data set again") from error
    return value if isinstance(value, Mapping) else {}


def _some(names: list[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:MAX_NAMES]) or "none"
    return shown + (", …" if len(names) > MAX_NAMES else "")
