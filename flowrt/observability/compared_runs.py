"""Other runs, whose curves the page of a run draws with its own, and the settings in which they differ."""

from collections.abc import Mapping, Sequence
from itertools import compress
from pathlib import Path
from typing import Any

from flowrt.errors import ConfigError
from flowrt.observability.run_reader import RunReader, flat, read_config
from flowrt.observability.series import Axis

MAX_COMPARED = 5
"""Maximum number of runs besides the first one: one for each further colour of the page."""


RUN_DIR = "run_dir"


class ComparedRuns:
    """Readers of other runs; used by one thread at a time."""

    def __init__(self, run_dir: Path, others: Sequence[Path]) -> None:
        """Read the directories.

        Args:
            run_dir: the run that the others are compared with.
            others: directories of the other runs.

        Raises ConfigError if one is not a run directory, is given twice or is ``run_dir``, and for more than 5.
        """
        if len(others) > MAX_COMPARED:
            raise ConfigError(f"{len(others)} runs to compare with are too many: the page draws {MAX_COMPARED} others")
        taken = {run_dir.resolve()}
        for path in others:
            if path.resolve() in taken:
                raise ConfigError(f"{path} cannot be compared with itself; name each run once")
            taken.add(path.resolve())
        self._run_dirs = run_dir, *others
        self._readers = [RunReader(path) for path in others]
        short = [path.absolute().name for path in (run_dir, *others)]
        self.names = tuple(
            name if short.count(name) == 1 else str(path) for path, name in zip(others, short[1:], strict=True)
        )
        """For each run, the name of its directory, or its path if several directories have this name."""

    def series(self, axis: Axis, low: float, high: float, points: int) -> dict[str, Any]:
        """The curves of each run between two steps or times, with its name and state; see `Series.window`."""
        runs = []
        for name, reader in zip(self.names, self._readers, strict=True):
            reader.read_new()
            window = reader.series_window(axis, low, high, points)
            runs.append({"name": name, "state": reader.run()["state"], **window})
        return {"runs": runs}

    def differences(self) -> dict[str, Any]:
        """The settings in which the runs differ, as ``settings``; see `differing`."""
        return {"settings": differing([read_config(path)[1] for path in self._run_dirs])}


def differing(configs: Sequence[Mapping[str, Any]]) -> list[list[Any]]:
    """The settings that are not the same in all configurations, in the order in which they are written.

    Returns for each setting its name and its values in these configurations; None in a configuration without it. The
    directory of the run is left out, as it always differs; an empty configuration, which cannot be read, is not
    compared.
    """
    tables = [dict(flat(config)) for config in configs]
    names = dict.fromkeys(name for table in tables for name in table)
    rows = [(name, [table.get(name) for table in tables]) for name in names if name != RUN_DIR]
    is_read = [bool(table) for table in tables]
    return [[name, *values] for name, values in rows if len(set(map(repr, compress(values, is_read)))) > 1]
