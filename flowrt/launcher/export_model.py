"""``flowrt export RUN --hf DIR``: write the model of a checkpoint of a run, or its best weights, for transformers."""

import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from flowrt.errors import ConfigError, EngineError, first_line
from flowrt.launcher.resume import stored_config, with_own_models
from flowrt.recipes.checkpoint_checksums import check_checkpoint
from flowrt.recipes.config import RunConfig
from flowrt.recipes.run_dir import best_dir, best_steps, checkpoint_dir, checkpoint_steps, model_dir
from flowrt.runtime.files import check_parent, fsync_tree, os_error_text, partial_path


@dataclass(frozen=True, slots=True)
class ModelExport:
    """What to write, and where."""

    run_dir: Path
    directory: Path
    step: int | None = None
    """None: the newest checkpoint."""
    best: bool = False
    """The best weights, in place of a checkpoint."""


def saved_weights(run_dir: Path, step: int | None, *, best: bool) -> tuple[int, Path]:
    """The version of saved weights, and their directory: of a checkpoint, or of the best weights.

    Args:
        run_dir: of the run.
        step: of the checkpoint; None: the newest one.
        best: the best weights, in place of a checkpoint.

    Raises ConfigError if there are no such weights, or the checkpoint is damaged.
    """
    if best:
        steps = best_steps(run_dir)
        if not steps:
            raise ConfigError(f"run {run_dir} has no best weights; set checkpoint.best in a run to keep them")
        return steps[0], best_dir(run_dir, steps[0])
    steps = checkpoint_steps(run_dir)
    if not steps:
        raise ConfigError(
            f"run {run_dir} has no checkpoint, of which checkpoint.every is the interval; models that it has written "
            "are in final/ and hf/"
        )
    wanted = max(steps) if step is None else step
    if wanted not in steps:
        there_is = ", ".join(map(str, steps))
        raise ConfigError(f"run {run_dir} has no checkpoint after {wanted} steps; there is: {there_is}")
    check_checkpoint(run_dir, wanted)
    return wanted, checkpoint_dir(run_dir, wanted)


def check_export(options: ModelExport) -> tuple[RunConfig, int, Path]:
    """The configuration of the run, the version of the weights and their directory.

    Raises ConfigError for a run, a step or a directory that cannot be used.
    """
    run_dir, directory = options.run_dir.absolute(), options.directory.absolute()
    config = with_own_models(stored_config(run_dir), run_dir)
    version, weights = saved_weights(run_dir, options.step, best=options.best)
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ConfigError(f"--hf {options.directory} is not an empty directory; name a new one")
    check_parent(options.directory)
    if not (model_dir(config) / "config.json").is_file():
        raise ConfigError(
            f"{model_dir(config)}, the model that run {run_dir} started from, is not there, and its configuration and "
            "tokenizer are needed; put it back"
        )
    return config, version, weights


def export_model(options: ModelExport) -> int:
    """Write the model; returns its version. Raises ConfigError, with nothing written, for bad input or a full disk."""
    import transformers
    from safetensors import SafetensorError

    from flowrt.engines.exported_model import complete, write_checkpoint

    config, version, weights = check_export(options)
    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    directory = options.directory.absolute()
    partial = partial_path(directory)
    shutil.rmtree(partial, ignore_errors=True)  # left by a killed process
    try:
        if options.best:
            shutil.copytree(weights, partial, ignore=shutil.ignore_patterns("version.json"))
        else:
            source, trainer = model_dir(config), config.trainer
            write_checkpoint(
                weights,
                source,
                partial,
                lora=trainer.lora,
                base=model_dir(stored_config(options.run_dir.absolute())),
                wanted=trainer.final_dtype,
                file_gb=trainer.file_gb,
            )
            complete(partial, source, config.data.chat_template)
        fsync_tree(partial)
        with suppress(FileNotFoundError):
            directory.rmdir()  # empty
        partial.rename(directory)
    except (OSError, SafetensorError, EngineError) as error:
        raise ConfigError(f"--hf {options.directory} cannot be written: {_sentence(error)}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return version


def _sentence(error: Exception) -> str:
    return os_error_text(error) if isinstance(error, OSError) else first_line(error)
