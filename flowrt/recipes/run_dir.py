"""The layout of a run directory."""

import json
import re
from pathlib import Path

from flowrt.errors import ConfigError
from flowrt.recipes.config import RunConfig
from flowrt.recipes.model_files import is_adapter
from flowrt.runtime.addresses import parse_address

CONFIG = "config.toml"
"""Name of the file with the configuration of a run, in its directory."""
JOB_RUN = "run"
"""Name of the run directory in the directory of a SLURM job."""
_STEP = re.compile(r"step-(\d{6,})")


def run_name(run_dir: Path, recipe: str) -> str:
    """The name of a run for people: that of its directory.

    The run of a SLURM job is in JOB/run, whose name says nothing: its name is RECIPE-JOB.

    Args:
        run_dir: the run directory.
        recipe: of its configuration, a name or FILE.py[:NAME]; empty if it is unknown.
    """
    run_dir = run_dir.absolute()
    if run_dir.name != JOB_RUN:
        return run_dir.name
    return "-".join(part for part in (Path(recipe).name.partition(".py")[0], run_dir.parent.name) if part)


def model_dir(config: RunConfig) -> Path:
    """The directory of the initial model: the user's, or one that is built before the workers start.

    Built are the embedded model, the base model with the adapter of a user who starts from an adapter, and a model with
    other fields of config.json (``model_overrides``).
    """
    is_built = builds_model(config) or config.model_overrides
    return built_model_dir(Path(config.run_dir)) if is_built else Path(config.model)


def builds_model(config: RunConfig) -> bool:
    """Whether the initial model is built before the workers start."""
    return not config.model or is_adapter(Path(config.model))


def built_model_dir(run_dir: Path) -> Path:
    """The directory of an initial model that is built before the workers start."""
    return run_dir / "model"


def built_reference_dir(run_dir: Path) -> Path:
    """The directory of an initial reference model that is built of a base model and an adapter."""
    return run_dir / "model-reference"


def has_adapters_to_merge(config: RunConfig) -> bool:
    """Whether a model of this run is to be built of a base model and an adapter, and is not there yet."""
    return (bool(config.model) and builds_model(config) and not model_dir(config).is_dir()) or (
        bool(config.reference.model)
        and is_adapter(Path(config.reference.model))
        and not reference_model_dir(config).is_dir()
    )


def kept_model_dir(run_dir: Path) -> Path:
    """The directory of a copy of the user's model, from which a run is resumed if the original is gone."""
    return run_dir / "start"


def reference_model_dir(config: RunConfig) -> Path:
    """The directory of the initial reference model: ``reference.model``, or the initial model of the run."""
    if config.reference.model and (config.model_overrides or is_adapter(Path(config.reference.model))):
        return built_reference_dir(Path(config.run_dir))
    return Path(config.reference.model) if config.reference.model else model_dir(config)


def kept_reference_dir(run_dir: Path) -> Path:
    """The directory of a copy of ``reference.model``, from which a run is resumed if the original is gone."""
    return run_dir / "start-reference"


def reference_dir(run_dir: Path) -> Path:
    """The directory of the reference's weights of each refresh."""
    return run_dir / "reference"


def final_dir(config: RunConfig) -> Path:
    """The directory of the trained model."""
    return Path(config.trainer.final_dir) if config.trainer.final_dir else Path(config.run_dir) / "final"


def judge_file(run_dir: Path) -> Path:
    """The file with the answers of judges, which a resumed run reads instead of requesting them again."""
    return run_dir / "judge.sqlite"


def address_file(run_dir: Path) -> Path:
    """The file with the address of a listening controller; removed when the run ends."""
    return run_dir / "address"


def ranks_dir(run_dir: Path) -> Path:
    """The directory of temporary files of a trainer's torchrun on the launcher's host; removed when the run ends."""
    return run_dir / "ranks"


def read_address(run_dir: Path) -> str:
    """Read the controller's address, tcp://HOST:PORT.

    Raises FileNotFoundError if there is no such file, ConfigError if it cannot be read or is malformed.
    """
    path = address_file(run_dir)
    try:
        text = path.read_bytes().decode("ascii").strip()
    except FileNotFoundError:
        raise
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}; name the controller by tcp://HOST:PORT") from error
    try:
        parse_address(text)
    except ConfigError:
        raise ConfigError(
            f"{path} holds no address of a controller: {text[:80]!r}; name it by tcp://HOST:PORT"
        ) from None
    return text


def checkpoint_dir(run_dir: Path, step: int) -> Path:
    """The directory of the checkpoint after ``step`` steps. It has this name only while it is complete."""
    return run_dir / "checkpoints" / f"step-{step:06}"


def hf_dir(run_dir: Path, step: int) -> Path:
    """The directory of the model after ``step`` steps (``checkpoint.hf_every``). It has this name only while it is
    complete."""
    return run_dir / "hf" / f"step-{step:06}"


def best_dir(run_dir: Path, version: int) -> Path:
    """The directory of a version's weights that are kept as best. It has this name only while it is complete."""
    return run_dir / "best" / f"step-{version:06}"


def best_steps(run_dir: Path) -> list[int]:
    """The versions of the best weights, best first, from "best.json"; empty if that is missing or damaged."""
    try:
        listed = json.loads((run_dir / "best" / "best.json").read_text())
        versions = [int(entry["version"]) for entry in listed]
    except (OSError, ValueError, TypeError, KeyError):
        return []
    return [version for version in versions if best_dir(run_dir, version).is_dir()]


def checkpoint_steps(run_dir: Path) -> list[int]:
    """The steps after which there is a complete checkpoint, in ascending order."""
    return _steps_in(run_dir / "checkpoints")


def hf_steps(run_dir: Path) -> list[int]:
    """The steps after which there is a complete model of ``checkpoint.hf_every``, in ascending order."""
    return _steps_in(run_dir / "hf")


def _steps_in(directory: Path) -> list[int]:
    names = (_STEP.fullmatch(path.name) for path in directory.glob("step-*"))
    return sorted(int(name[1]) for name in names if name is not None)


def check_summary_file(run_dir: Path) -> None:
    """Raise ConfigError if summary.json is a directory: the run could not write its summary."""
    path = run_dir / "summary.json"
    if path.is_dir():
        raise ConfigError(f"{path} is a directory, where the run writes its summary; move it away")
