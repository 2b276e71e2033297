"""A user's algorithm (FILE.py:NAME) before a run starts: a process of its own says what it needs.

The launcher and the controller do not import torch, and a user's file may hang, exit or crash.
"""

import dataclasses
import json
import subprocess
import sys

from flowrt.errors import ConfigError
from flowrt.recipes.algorithms import is_own
from flowrt.recipes.config import RunConfig
from flowrt.recipes.guards import check_guards

LOAD_S = 120.0
"""Deadline for importing torch and the user's file."""
MAX_ERROR_CHARS = 1000


def with_own_needs(config: RunConfig) -> RunConfig:
    """The configuration with what the user's algorithm needs; a preset's is returned as it is.

    Raises ConfigError if the file cannot be loaded, does not return in time, or defines no algorithm.
    """
    name = config.algorithm.name
    if not is_own(name):
        return config
    try:
        ended = subprocess.run(
            [sys.executable, "-m", "flowrt.roles.algorithm", name],
            capture_output=True,
            text=True,
            timeout=LOAD_S,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(f"algorithm {name} was not loaded within {LOAD_S:.0f} s; correct it") from None
    needs = _last_line(ended.stdout)
    if "error" in needs:
        raise ConfigError(str(needs["error"]))
    if "reference" not in needs:
        output = (ended.stderr or ended.stdout).strip()[-MAX_ERROR_CHARS:]
        raise ConfigError(f"algorithm {name} ended its process with code {ended.returncode}: {output or 'no output'}")
    metrics = needs.get("metrics")
    check_guards(config, metrics if isinstance(metrics, list) else [])
    algorithm = dataclasses.replace(config.algorithm, own_reference=needs["reference"] is True)
    return dataclasses.replace(config, algorithm=algorithm)


def _last_line(output: str) -> dict[str, object]:
    """The object in the last line; the user's file may print others."""
    try:
        needs = json.loads(output.strip().rpartition("\n")[2])
    except ValueError:
        return {}
    return needs if isinstance(needs, dict) else {}
