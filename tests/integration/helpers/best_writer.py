"""Writes successive versions of a model as the best weights until killed: a child of test_best_weights_killed."""

from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from flowrt.engines.hf import load_model, named_parameters
from flowrt.recipes.config_io import defaults
from flowrt.roles.best_weights import BestDirectory
from flowrt.transport.weights.snapshot import Snapshot


def weights_of(layout: dict[str, torch.Tensor], version: int) -> dict[str, torch.Tensor]:
    """The weights of a version: a function of its number."""
    return {name: torch.full_like(tensor, version / 7) for name, tensor in layout.items()}


def write_all(run_dir: Path, model: Path, first: int, written: Connection) -> None:
    """Write the versions after ``first``, and send the number of each."""
    torch.set_num_threads(1)
    base = defaults("arithmetic")
    config = replace(base, run_dir=str(run_dir), model=str(model))
    layout = named_parameters(load_model(model))
    directory = BestDirectory(config, layout, first)
    version = first
    while True:
        version += 1
        directory.write(Snapshot.take(version, weights_of(layout, version)), float(version))
        written.send(version)
