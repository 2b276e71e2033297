"""Weights & Biases: metrics by step, samples as tables; offline unless a key is set."""

import hashlib
import importlib.util
import json
import os
import tomllib
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from threading import Thread
from time import monotonic
from typing import Any, Literal, get_args

import msgspec

from flowrt.errors import ConfigError
from flowrt.observability.exporters.exported_names import STEP, exported_numbers, exported_shares
from flowrt.observability.exporters.sink import Line, Sink
from flowrt.recipes.run_dir import CONFIG, run_name
from flowrt.runtime.files import atomic_write, private_directory
from flowrt.runtime.waits import join_thread

MODULE = "wandb"
MISSING = f"exporting to W&B needs {MODULE}; install it: pip install 'flowrt[wandb]'"
FINISH_S = 30.0
"""Seconds that W&B may take to finish; then it is abandoned, and the offline file has all that was logged."""
SAVE_S = 1.0
"""Seconds between two notes of what was logged."""
UNFLUSHED_BYTES = 64 << 10
"""The last bytes that were logged may be lost when all processes are killed: W&B writes blocks of 32 KiB. What is in
them is not noted yet, and logged again by the next process."""
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
    for arg in get_args(Mode):
        if arg == named:
            chosen: Mode = arg
            return chosen
    raise ConfigError(f"{MODE_VARIABLE} is {named!r}; use one of {', '.join(get_args(Mode))}")


@dataclass(slots=True)
class WandbProgress:
    """What was logged to a W&B run so far; a file next to those of W&B keeps it for later processes."""

    place: tuple[str, ...]
    """Mode, entity and project, in which nothing was logged if the file names others."""
    logs: int = 0
    """Number of calls of ``log``: the W&B step of the next one."""
    last_step: int = -1
    steps_until_s: float = -1.0
    """End of the last step, on the run clock."""
    shares_until_s: float = -1.0
    """End of the last step whose shares of time were logged."""

    @classmethod
    def read(cls, path: Path, place: tuple[str, ...]) -> "WandbProgress":
        """The progress in a file; none without a file, or with one of another place."""
        try:
            progress = msgspec.json.decode(path.read_bytes(), type=cls)
        except (OSError, msgspec.DecodeError):
            return cls(place)
        return progress if progress.place == place else cls(place)


class WandbRun(Sink):
    """One W&B run, which later processes for the same run continue: its id follows from the start of the run.

    WANDB_RUN_ID and WANDB_NAME set another id and name.
    """

    def __init__(self, run_dir: Path, directory: Path, steps: str = "") -> None:
        """Set up; W&B begins with the first step. Raises ConfigError without wandb or for a wrong mode.

        Args:
            run_dir: the run directory.
            directory: of the files of W&B.
            steps: the range of steps that will be passed on, which is a W&B run of its own; empty: all.
        """
        check()
        self._run_dir = run_dir.absolute()
        self._directory = directory
        self._steps = steps
        self._mode = mode()
        self._project = os.environ.get("WANDB_PROJECT", "flowrt")
        self._started = str(self._run_dir)  # what identifies the run: its first event, in any directory
        self._run: Any = None
        self._recent: list[Line] = []
        self._saved_s = monotonic()
        self._logged_bytes = 0
        self._unflushed: deque[tuple[int, WandbProgress]] = deque()  # the bytes logged, and the progress then

    @cached_property
    def id(self) -> str:
        """Of the W&B run; it is derived when the first event of the run has been passed on."""
        digest = hashlib.sha256(f"{self._started} {self._steps}".encode()).hexdigest()
        return os.environ.get("WANDB_RUN_ID") or digest[:12]

    @cached_property
    def _progress(self) -> WandbProgress:
        return WandbProgress.read(self._progress_path, (self._mode, os.environ.get("WANDB_ENTITY", ""), self._project))

    @property
    def _progress_path(self) -> Path:
        return self._directory / "wandb" / f"flowrt-{self.id}.json"

    @property
    def steps_until_s(self) -> float:
        return self._progress.steps_until_s

    @property
    def shares_until_s(self) -> float:
        return self._progress.shares_until_s

    def event(self, line: Line) -> None:
        if line["kind"] == "started":
            self._started = json.dumps(line, sort_keys=True)

    def step(self, line: Line) -> None:
        progress = self._progress
        if line["step"] <= progress.last_step:  # the run was rolled back while no process followed it
            self.rewound(line["step"])
        progress.last_step, progress.steps_until_s = line["step"], line["wall_s"]
        self._log(line["step"], exported_numbers(line))

    def shares(self, line: Line) -> None:
        self._progress.shares_until_s = line["to_s"]
        self._log(line["step"], exported_shares(line))

    def samples(self, rows: Sequence[Line]) -> None:
        if rows[0]["eval_name"]:  # samples of one evaluation: a separate table
            self._log_table(f"{rows[0]['eval_name']}-{rows[0]['step']:06d}", rows)
        else:
            self._recent = [*self._recent, *rows][-MAX_SAMPLES:]

    def rewound(self, step: int) -> None:
        self._progress.last_step = step - 1
        self._log(step, {"rewound": 1})

    def close(self) -> str:
        if self._recent:
            self._log_table(f"step-{self._progress.last_step:06d}", self._recent)
        if self._run is None:
            return f"W&B run {self.id} has all steps" if self._progress.logs else ""
        where = Path(self._run.dir).parent
        failures: list[str] = []
        ending = Thread(target=_end, args=(self._run, failures), daemon=True)
        ending.start()
        has_ended = join_thread(ending, FINISH_S)
        sync = f"wandb sync {self._directory / 'wandb'}/*-{self.id}"
        if not has_ended:
            return f"W&B did not end within {FINISH_S:.0f} s; all that was logged is in {where}: {sync}"
        if failures:
            return f"the end of W&B failed ({failures[0]}); what was logged is in {where}: {sync}"
        self._save(self._progress)
        how = f"; upload it with: {sync}" if self._mode == "offline" else ""
        return f"W&B run {self.id} ({self._mode}) in {where}{how}"

    def _log(self, step: int, values: Mapping[str, Any]) -> None:
        """Log values of a step. Steps of W&B count the calls, over all processes: they may only increase."""
        if self._run is None:
            self._run = self._begun()
        self._run.log({STEP: step, **values}, step=None if self._mode == "shared" else self._progress.logs)
        self._progress.logs += 1
        self._logged_bytes += len(str(values))
        self._unflushed.append((self._logged_bytes, replace(self._progress)))
        flushed: WandbProgress | None = None
        while self._unflushed[0][0] <= self._logged_bytes - UNFLUSHED_BYTES:
            _, flushed = self._unflushed.popleft()
        if flushed is not None and monotonic() - self._saved_s > SAVE_S:
            self._save(flushed)

    def _save(self, progress: WandbProgress) -> None:
        atomic_write(self._progress_path, msgspec.json.encode(progress).decode())
        self._saved_s = monotonic()

    def _begun(self) -> Any:
        """The W&B run, begun or continued."""
        import wandb

        private_directory(self._progress_path.parent)
        config = _config(self._run_dir)
        name = run_name(self._run_dir, str(config.get("recipe", "")))
        run = wandb.init(
            project=self._project,
            name=os.environ.get("WANDB_NAME") or (f"{name} steps {self._steps}" if self._steps else name),
            id=self.id,
            resume="allow",
            dir=str(self._directory),
            mode=self._mode,
            config=config,
            allow_val_change=True,
            settings=wandb.Settings(
                console="off",
                x_disable_stats=True,
                x_disable_meta=True,
                x_save_requirements=False,
                disable_git=True,
                silent=True,
                save_code=False,
            ),
        )
        run.define_metric(STEP, hidden=True)
        run.define_metric("*", step_metric=STEP)
        self._progress.logs = max(self._progress.logs, run.starting_step)
        return run

    def _log_table(self, name: str, rows: Sequence[Line]) -> None:
        import wandb

        data = [[_cell(row[column]) for column in COLUMNS] for row in rows]
        self._log(max(self._progress.last_step, 0), {f"samples/{name}": wandb.Table(columns=list(COLUMNS), data=data)})


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
