"""Workers are offline: HF_HUB_OFFLINE is set before Hugging Face libraries load, however a worker starts."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from flowrt.ids import ROLES

VARIABLE = "HF_HUB_OFFLINE"
PROBE = """
import os, runpy, sys

class ImportProbe:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "transformers", "huggingface_hub"):
            sys.stdout.write(os.environ.get("HF_HUB_OFFLINE", "unset"))
            sys.stdout.flush()
            os._exit(0)

sys.meta_path.insert(0, ImportProbe())
del sys.argv[0]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""
ENTRY_POINTS = [
    *[("flowrt.cli", "worker", role) for role in ROLES],
    *[(f"flowrt.roles.{role}",) for role in ROLES],
    ("flowrt.runtime.parent_death", "flowrt.roles.trainer"),
    ("flowrt.launcher.build_model",),
]


def offline_value(entry_point: tuple[str, ...], **variables: str) -> str:
    """The value of HF_HUB_OFFLINE when a process first imports torch or a Hugging Face library."""
    environment = {name: value for name, value in os.environ.items() if name != VARIABLE} | variables
    command = [sys.executable, "-c", PROBE, *entry_point]
    completed = subprocess.run(
        command, capture_output=True, text=True, timeout=600, env=environment, cwd=Path(__file__).parents[3]
    )
    assert completed.returncode == 0, completed.stderr
    return completed.stdout


@pytest.mark.parametrize("entry_point", ENTRY_POINTS, ids=" ".join)
def test_every_entry_point_sets_the_offline_variable_before_imports(entry_point: tuple[str, ...]) -> None:
    assert offline_value(entry_point) == "1"


def test_a_value_in_the_environment_overrides_the_offline_default() -> None:
    assert offline_value(("flowrt.cli", "worker", "reward"), HF_HUB_OFFLINE="0") == "0"
