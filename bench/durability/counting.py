"""Counts every token that the torch engine generates, in files that outlive the processes.

The engine class is changed in the process of the benchmark, from which all processes of its runs are forked. What is
counted does not depend on what journals say: a token counts as lost if it was generated and is in no sample that was
trained at the end.
"""

import mmap
import os
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flowrt.engines.torch.rollout import TorchRollout

_ROW = struct.Struct("<Qdd")


@dataclass(frozen=True, slots=True)
class Generated:
    """Tokens of one process, and when the first and the last were generated, on the monotonic clock."""

    tokens: int
    first_s: float
    last_s: float

    @property
    def per_s(self) -> float:
        return self.tokens / max(self.last_s - self.first_s, 1e-9)


class TokenCounter:
    """Installs itself in the engine class; the files of a run are in ``folder``."""

    def __init__(self) -> None:
        self.folder = Path()
        self.step_s = 0.0
        """Added to each decode step: a tiny model takes the time of a large one, without its work."""
        self._file: mmap.mmap | None = None
        self._pid = 0

    def install(self) -> None:
        """Count the tokens of all engines of this process and those forked from it."""
        right: Callable[..., None] = TorchRollout._sample_rows
        counter = self

        def counted(engine: TorchRollout, rows: slice, logits_RV: Any) -> None:
            right(engine, rows, logits_RV)
            counter.add(rows.stop - rows.start)

        setattr(TorchRollout, "_sample_rows", counted)  # noqa: B010 (its signature is another one to mypy)

    def add(self, tokens: int) -> None:
        """Count tokens of this process."""
        if self._file is None or self._pid != os.getpid():
            self._pid = os.getpid()
            self.folder.mkdir(exist_ok=True)
            with (self.folder / str(self._pid)).open("wb+") as file:
                file.truncate(_ROW.size)
                self._file = mmap.mmap(file.fileno(), _ROW.size)
        if self.step_s:
            time.sleep(self.step_s)
        before, first_s, _ = _ROW.unpack(self._file[:])
        now = time.monotonic()
        self._file[:] = _ROW.pack(before + tokens, first_s or now, now)

    def read(self, folder: Path) -> dict[int, Generated]:
        """What each process of a run has generated so far, by process id."""
        generated = {}
        for path in folder.iterdir() if folder.is_dir() else ():
            if len(data := path.read_bytes()) == _ROW.size:
                generated[int(path.name)] = Generated(*_ROW.unpack(data))
        return generated
