"""Exporters of the user: a class in a Python file, FILE.py:CLASS."""

import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from flowrt.errors import ConfigError
from flowrt.observability.exporters.sink import Line, Sink
from flowrt.runtime.user_module import called, load_module

METHODS = ("step", "samples", "close")


class OwnExporter(Sink):
    """Calls the methods of an instance of the user's class."""

    def __init__(self, spec: str) -> None:
        """Load the class and create an instance. Raises ConfigError if that fails or a method is missing."""
        self._exporter = _load(spec)

    def step(self, line: Line) -> None:
        self._exporter.step(dict(line))

    def samples(self, rows: Sequence[Line]) -> None:
        self._exporter.samples([dict(row) for row in rows])

    def event(self, line: Line) -> None:
        self._call("event", dict(line))

    def rewound(self, step: int) -> None:
        self._call("rewound", step)

    def close(self) -> str:
        self._exporter.close()
        return ""

    def _call(self, name: str, value: object) -> None:
        method: Callable[[object], None] | None = getattr(self._exporter, name, None)
        if method is not None:
            method(value)


def _load(spec: str) -> Any:
    path, _, name = spec.rpartition(":")
    file = Path(path)
    if not file.is_file():
        raise ConfigError(f"exporters has {spec!r}, and there is no Python file {path!r}; correct it")
    module = called("exporter", path, "while the file was loaded", lambda: load_module(path, f"_exporter_{file.stem}"))
    kind = getattr(module, name, None)
    if not inspect.isclass(kind):
        raise ConfigError(f"exporters has {spec!r}, and {path} has no class {name}")
    exporter = called("exporter", path, f"while {name} was made", kind)
    if missing := [method for method in METHODS if not callable(getattr(exporter, method, None))]:
        raise ConfigError(f"exporter {spec} has no method {missing[0]}; it needs {', '.join(METHODS)}")
    return exporter
