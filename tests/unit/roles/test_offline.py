"""The web is never needed, whoever starts a worker: Hugging Face's libraries are told so before they are loaded."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from flowrt.ids import ROLES

VARIABLE = "HF_HUB_OFFLINE"
LOOK = """
import os, runpy, sys

class Look:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "transformers", "huggingface_hub"):
            sys.stdout.write(os.environ.get("HF_HUB_OFFLINE", "nothing"))
            sys.stdout.flush()
            os._exit(0)

sys.meta_path.insert(0, Look())
del sys.argv[0]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""
STARTS = [
    *[("flowrt.cli", "worker", role) for role in ROLES],
    *[(f"flowrt.roles.{role}",) for role in ROLES],
    ("flowrt.runtime.parent_death", "flowrt.roles.trainer"),
    ("flowrt.launcher.build_model",),
]


def told(start: tuple[str, ...], **said: str) -> str:
    """What a process that is begun like this says to Hugging Face's libraries, or to torch if that comes first."""
    around = {name: value for name, value in os.environ.items() if name != VARIABLE} | said
    words = [sys.executable, "-c", LOOK, *start]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=60, env=around, cwd=Path(__file__).parents[3])
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


@pytest.mark.parametrize("start", STARTS, ids=" ".join)
def test_a_worker_looks_nothing_up_on_the_web(start: tuple[str, ...]) -> None:
    assert told(start) == "1"


def test_whoever_wants_it_otherwise_may_say_so() -> None:
    assert told(("flowrt.cli", "worker", "reward"), HF_HUB_OFFLINE="0") == "0"
