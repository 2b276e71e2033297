"""Weights & Biases: metrics by step, samples as tables; offline unless a key is set."""

import hashlib
import importlib.util
import os
import tomllib
from collections.abc import Sequence
from pathlib import Path
from threading import Thread
from typing import Any, Literal, get_args

from flowrt.errors import ConfigError
from flowrt.observability.exporters.feed import numbers
from flowrt.observability.exporters.sink import Line, Sink
from flowrt.recipes.run_dir import CONFIG
from flowrt.runtime.waits import join_thread

MODULE = "wandb"
MISSING = f"exporting to W&B needs {MODULE}; install it: pip install 'flowrt[wandb]'"
FINISH_S = 30.0
"""Seconds that W&B may take to finish; then it is abandoned, and the offline file has all that was logged."""
MAX_SAMPLES = 200
"""Maximum number of rows of the table of samples of the last steps."""
COLUMNS = ("step", "prompt", "member", "reward", "tokens", "finish", "reason", "prompt_text", "completion")
KEY_VARIABLE, MODE_VARIABLE = "WANDB_API_KEY", "WANDB_MODE"


def check() -> None:
    """Raise ConfigError if wandb is not installed."""
    if importlib.util.find_spec(MODULE) is None:
        raise ConfigError(MISSING)


Mode = Literal["online", "offline", "disabled", "shared"]


def mode() -> Mode:
    """The mode in WANDB_MODE; if that is not set, online with an API key and offline without one.

    Raises ConfigError for an unknown mode.
    """
    named = os.environ.get(MODE_VARIABLE, "")
    if not named:
        return "online" if os.environ.get(KEY_VARIABLE) else "offline"
    for one in get_args(Mode):
        if one == named:
            found: Mode = one
            return found
    raise ConfigError(f"{MODE_VARIABLE} is {named!r}; use one of {', '.join(get_args(Mode))}")


class WandbRun(Sink):
    """One W&B run."""

    def __init__(self, run_dir: Path, directory: Path) -> None:
        """Start the W&B run, with its files in ``directory``. Raises ConfigError without wandb or for a wrong mode."""
        check()
        import wandb

        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._wandb = wandb
        self._directory = directory
        self._mode = mode()
        name = run_dir.absolute().name
        settings = wandb.Settings(
            console="off",
            x_disable_stats=True,
            x_disable_meta=True,
            x_save_requirements=False,
            disable_git=True,
            silent=True,
            save_code=False,
        )
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "flowrt"),
            name=name,
            id=f"{hashlib.sha256(str(run_dir.absolute()).encode()).hexdigest()[:12]}-{os.getpid()}",
            dir=str(directory),
            mode=self._mode,
            config=_config(run_dir),
            settings=settings,
        )
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")
        self._recent: list[Line] = []
        self._last_step = 0

    def step(self, line: Line) -> None:
        self._last_step = line["step"]
        self._run.log({"step": line["step"], **dict(numbers(line))})

    def shares(self, line: Line) -> None:
        seconds = {
            f"time/{role}/{cause}": value
            for role, found in line.get("roles", {}).items()
            for cause, value in found.items()
            if cause != "workers"
        }
        self._run.log({"step": line["step"], **seconds})

    def samples(self, rows: Sequence[Line]) -> None:
        if rows[0]["eval_name"]:  # samples of one evaluation: a separate table
            self._run.log(
                {"step": self._last_step, f"samples/{rows[0]['eval_name']}-{rows[0]['step']:06d}": self._table(rows)}
            )
        else:
            self._recent = [*self._recent, *rows][-MAX_SAMPLES:]

    def rewound(self, step: int) -> None:
        self._run.log({"step": step, "rewound": 1})

    def close(self) -> str:
        if self._recent:
            self._run.log({"step": self._last_step, f"samples/step-{self._last_step:06d}": self._table(self._recent)})
        where = Path(self._run.dir).parent
        failures: list[str] = []
        ending = Thread(target=_end, args=(self._run, failures), daemon=True)
        ending.start()
        has_ended = join_thread(ending, FINISH_S)
        how = f"; upload it with: wandb sync {where}" if self._mode == "offline" else ""
        if not has_ended:
            return f"W&B did not end within {FINISH_S:.0f} s; all that was logged is in {where}: wandb sync {where}"
        if failures:
            return f"the end of W&B failed ({failures[0]}); what was logged is in {where}: wandb sync {where}"
        return f"W&B run ({self._mode}) in {where}{how}"

    def _table(self, rows: Sequence[Line]) -> Any:
        data = [[_cell(row[column]) for column in COLUMNS] for row in rows]
        return self._wandb.Table(columns=list(COLUMNS), data=data)


def _end(run: Any, failures: list[str]) -> None:
    try:
        run.finish()
    except Exception as error:  # noqa: BLE001 (whatever it is, the offline file is there)
        failures.append(f"{type(error).__name__}: {error}")


def _cell(value: object) -> object:
    """The value of a cell; numbers as float, so that a column has one type."""
    return float(value) if isinstance(value, int | float) else value


def _config(run_dir: Path) -> dict[str, Any]:
    try:
        return tomllib.loads((run_dir / CONFIG).read_text())
    except (OSError, ValueError):
        return {}
