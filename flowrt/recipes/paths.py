"""What lies where in a run directory."""

from pathlib import Path

from flowrt.recipes.config import RunConfig


def model_dir(config: RunConfig) -> Path:
    """The checkpoint that the run starts from: the user's, or the embedded one once it is prepared."""
    return Path(config.model) if config.model else Path(config.run_dir) / "model"


def final_dir(config: RunConfig) -> Path:
    """The trained model."""
    return Path(config.trainer.final_dir) if config.trainer.final_dir else Path(config.run_dir) / "final"


def address_file(run_dir: Path) -> Path:
    """Where a controller that listens says at which address; gone when its run has ended."""
    return run_dir / "controller.address"
