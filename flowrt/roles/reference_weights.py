"""Refreshed weights of the reference: files in the run directory, written by trainer rank 0, read by reference workers.

With ``reference.refresh`` N, the reference of step k * N is ``average`` times version k * N of the policy plus (1 -
``average``) times the reference of step (k - 1) * N; that of step 0 is the initial reference (``sync_ref_model`` of
TRL). A sample is scored by the refresh of the largest multiple of N that is not above the version of its first token.
This depends on the sample alone, not on when or by which worker it is scored. The file of a refresh is complete before
that version of the policy is published, so it is there when a sample needs it.
"""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from flowrt.engines.hf import load_model, named_parameters, parameter_shapes
from flowrt.errors import EngineError
from flowrt.recipes.config import RunConfig
from flowrt.recipes.run_dir import checkpoint_steps, model_dir, reference_dir, reference_model_dir
from flowrt.runtime.files import fsync, partial_path

_FILE = re.compile(r"step-(\d{6,})\.safetensors")


def refresh_step(version: int, every: int) -> int:
    """Step of the refresh that scores samples whose first token is of policy ``version``; 0: the initial reference."""
    return version // every * every if every else 0


def refresh_file(run_dir: Path, step: int) -> Path:
    """File with the reference's weights of ``step``. It has this name only when it is complete."""
    return reference_dir(run_dir) / f"step-{step:06}.safetensors"


def refresh_steps(run_dir: Path) -> list[int]:
    """Steps of the refreshes whose files exist, in ascending order."""
    names = (_FILE.fullmatch(path.name) for path in reference_dir(run_dir).glob("step-*"))
    return sorted(int(name[1]) for name in names if name is not None)


def mix(policy: torch.Tensor, before: torch.Tensor, average: float) -> torch.Tensor:
    """``average * policy + (1 - average) * before``, in float32, or in float64 if the policy is float64."""
    dtype = torch.promote_types(policy.dtype, torch.float32)
    return torch.lerp(before.to(dtype), policy.to(dtype), average)


def write_refresh(config: RunConfig, step: int, policy: Mapping[str, torch.Tensor]) -> None:
    """Write the reference of ``step``, and delete refreshes that neither this run nor a resumed one can need.

    Args:
        config: of the run; ``step`` is a multiple of its ``reference.refresh``.
        step: number of completed steps.
        policy: the weights after ``step`` steps, in the order of the model's parameters, as a training engine publishes
            them.

    Raises:
        EngineError: if the weights are not those of the model, or the previous reference is missing or damaged.
        OSError, SafetensorError: if writing fails; the caller reports it.
    """
    run_dir, average = Path(config.run_dir), config.reference.average
    shapes = parameter_shapes(model_dir(config))
    if [tensor.shape for tensor in policy.values()] != list(shapes.values()):
        raise EngineError(
            f"the trainer's weights of step {step} are not the parameters of {model_dir(config)}; set "
            "reference.refresh to 0"
        )
    named = {name: tensor.detach().cpu().contiguous() for name, tensor in zip(shapes, policy.values(), strict=True)}
    if average != 1.0:
        before = _read(config, step - config.reference.refresh)
        named = {name: mix(tensor, before[name], average) for name, tensor in named.items()}
    path = refresh_file(run_dir, step)
    path.parent.mkdir(mode=0o700, exist_ok=True)
    partial = partial_path(path)
    save_file(named, partial)
    os.chmod(partial, 0o600)
    fsync(partial)
    partial.rename(path)
    fsync(path.parent)
    delete_unneeded(config, step)


def delete_unneeded(config: RunConfig, step: int) -> None:
    """Delete refreshes older than any that samples of the run, or of one resumed from a checkpoint, can need."""
    run_dir = Path(config.run_dir)
    oldest = min([step, *checkpoint_steps(run_dir)])
    needed = refresh_step(max(oldest - config.max_staleness, 0), config.reference.refresh)
    for refresh in refresh_steps(run_dir):
        if refresh < needed:
            refresh_file(run_dir, refresh).unlink()


def resume_refreshes(config: RunConfig, step: int) -> None:
    """Delete refreshes after ``step``, from which the run continues: their policies are trained again.

    Raises EngineError if the refresh that ``step`` needs is missing.
    """
    run_dir = Path(config.run_dir)
    for refresh in refresh_steps(run_dir):
        if refresh > step:
            refresh_file(run_dir, refresh).unlink()
    needed = refresh_step(step, config.reference.refresh)
    if needed and not refresh_file(run_dir, needed).is_file():
        raise EngineError(missing(config, needed))


def missing(config: RunConfig, step: int) -> str:
    """Error message for refreshed weights of ``step`` that do not exist."""
    return (
        f"the reference's weights of step {step} are not in {refresh_file(Path(config.run_dir), step)}; trainer and "
        "reference workers need the run directory on a file system that all mount, or set reference.refresh to 0"
    )


def _read(config: RunConfig, step: int) -> dict[str, torch.Tensor]:
    """The reference's weights of ``step``, by name. Raises EngineError if they cannot be read."""
    if not step:
        initial: torch.nn.Module = load_model(reference_model_dir(config))
        return named_parameters(initial)
    path = refresh_file(Path(config.run_dir), step)
    try:
        stored: dict[str, torch.Tensor] = load_file(path)
    except FileNotFoundError:
        raise EngineError(missing(config, step)) from None
    except (OSError, SafetensorError) as error:
        raise EngineError(
            f"the reference's weights {path} cannot be read: {error}; resume from a checkpoint"
        ) from error
    return stored


class RefreshedModel:
    """A reference model that loads the weights of one refresh after the other."""

    def __init__(self, config: RunConfig, model: Any) -> None:
        """``model`` has the initial weights."""
        self._config = config
        self.model = model
        self._loaded: tuple[int, int] = (0, 0)

    def use(self, step: int) -> None:
        """Load the weights of a refresh, unless they are loaded. Raises EngineError if that fails."""
        identity = (step, self._written_ns(step))
        if identity == self._loaded:
            return
        stored = _read(self._config, step)
        parameters = named_parameters(self.model)
        if parameters.keys() != stored.keys():
            raise EngineError(
                f"the reference's weights of step {step} have other names than the model in "
                f"{reference_model_dir(self._config)}; set reference.refresh to 0"
            )
        self._loaded = (-1, -1)  # after a failure below the weights are a mixture
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(stored[name])
        self._loaded = identity

    def _written_ns(self, step: int) -> int:
        """Modification time of the file in nanoseconds, which changes when a resumed run writes it again."""
        if not step:
            return 0
        try:
            return refresh_file(Path(self._config.run_dir), step).stat().st_mtime_ns
        except FileNotFoundError:
            raise EngineError(missing(self._config, step)) from None
