"""What lies where in a run directory."""

import os
import re
from pathlib import Path

from flowrt.recipes.config import RunConfig

_STEP = re.compile(r"step-(\d{6,})")


def model_dir(config: RunConfig) -> Path:
    """The checkpoint that the run starts from: the user's, or the embedded one once it is prepared."""
    return Path(config.model) if config.model else Path(config.run_dir) / "model"


def kept_model_dir(run_dir: Path) -> Path:
    """A copy of the user's model, for runs that are resumed when the original has gone."""
    return run_dir / "start"


def final_dir(config: RunConfig) -> Path:
    """The trained model."""
    return Path(config.trainer.final_dir) if config.trainer.final_dir else Path(config.run_dir) / "final"


def address_file(run_dir: Path) -> Path:
    """Where a controller that listens says at which address; gone when its run has ended."""
    return run_dir / "address"


def checkpoint_dir(run_dir: Path, step: int) -> Path:
    """The state after so many steps. It has this name only while it is whole."""
    return run_dir / "checkpoints" / f"step-{step:06}"


def checkpoint_steps(run_dir: Path) -> list[int]:
    """The steps after which there is a whole checkpoint, in ascending order."""
    names = (_STEP.fullmatch(path.name) for path in (run_dir / "checkpoints").glob("step-*"))
    return sorted(int(name[1]) for name in names if name is not None)


def write_whole(path: Path, text: str) -> None:
    """Write a file aside, then rename: it is there whole, or as it was. Nobody else may read it."""
    aside = path.with_name(f".{path.name}.part")
    aside.unlink(missing_ok=True)
    with os.fdopen(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)
    aside.rename(path)


def private(directory: Path) -> None:
    """Make a directory, or take one that is there, that its owner alone can look into."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    directory.chmod(0o700)
