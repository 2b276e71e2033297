"""A user's algorithm (FILE.py:NAME) before a run starts: a process of its own says what it needs.

The launcher and the controller do not import torch, and a user's file may hang, exit or crash.
"""

import dataclasses

from flowrt.recipes.algorithms import is_own
from flowrt.recipes.config import RunConfig
from flowrt.recipes.guards import check_guards
from flowrt.runtime.file_process import ask

LOAD_S = 120.0
"""Deadline for importing torch and the user's file."""


def with_own_needs(config: RunConfig) -> RunConfig:
    """The configuration with what the user's algorithm needs; a preset's is returned as it is.

    Raises ConfigError if the file cannot be loaded, does not return in time, or defines no algorithm.
    """
    name = config.algorithm.name
    if not is_own(name):
        return config
    needs = ask("flowrt.roles.algorithm", [name], f"algorithm {name.rpartition(':')[0]}", LOAD_S)
    metrics = needs.get("metrics")
    check_guards(config, metrics if isinstance(metrics, list) else [])
    algorithm = dataclasses.replace(config.algorithm, own_reference=needs.get("reference") is True)
    return dataclasses.replace(config, algorithm=algorithm)
