"""A virtual environment with the wheel alone, and commands that run in it outside of the repository."""

import os
import re
import subprocess
import tomllib
import venv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
INSTALL_S = 1200.0
COMMAND_S = 600.0
NEWEST, OLDEST = "newest", "oldest"


@dataclass(frozen=True)
class Environment:
    """An environment with flowrt, and the directory in which its commands run.

    Attributes:
        programs: its directory of programs; the path has a space.
        work: current directory of commands; nothing of the repository is in it.
    """

    programs: Path
    work: Path

    def variables(self) -> dict[str, str]:
        """Variables of a command: no HOME, no PYTHONPATH, no locale."""
        return {"PATH": f"{self.programs}{os.pathsep}/usr/bin:/bin", "OMP_NUM_THREADS": "1", "TMPDIR": str(self.work)}

    def run(self, words: Sequence[str]) -> "subprocess.CompletedProcess[str]":
        """Run a program of the environment; its output has stdout and stderr. Raises TimeoutExpired."""
        return subprocess.run(
            [str(self.programs / words[0]), *words[1:]],
            cwd=self.work,
            env=self.variables(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=COMMAND_S,
            check=False,
        )

    def start(self, words: Sequence[str], output: Path) -> "subprocess.Popen[bytes]":
        """Start a program of the environment that writes to this file."""
        with output.open("wb") as file:
            return subprocess.Popen(
                [str(self.programs / words[0]), *words[1:]],
                cwd=self.work,
                env=self.variables(),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
            )


def make(folder: Path, wheel: Path, versions: str) -> Environment:
    """Make an environment of this Python with the wheel and no extra. Raises RuntimeError if pip fails.

    Args:
        folder: a new directory.
        wheel: of flowrt.
        versions: `NEWEST`, as pip chooses; `OLDEST`, the lower bound of each dependency exactly. torch is that of
            constraints.txt in both: other builds are gigabytes.
    """
    at, work = folder / f"{versions} environment", folder / "work"
    work.mkdir(parents=True)
    venv.create(at, with_pip=True)
    environment = Environment(at / "bin", work)
    pip = [str(at / "bin" / "python"), "-m", "pip", "--disable-pip-version-check"]
    constraints = (ROOT / "constraints.txt").read_text()
    torch = next(line for line in constraints.splitlines() if line.startswith("torch=="))
    exact = lower_bounds() if versions == OLDEST else []
    for words in (["install", torch], ["install", str(wheel), *exact], ["check"]):
        ended = subprocess.run([*pip, *words], cwd=work, capture_output=True, text=True, timeout=INSTALL_S, check=False)
        if ended.returncode:
            raise RuntimeError(f"pip {' '.join(words)}: {ended.stdout[-1000:]} {ended.stderr[-2000:]}")
        if wrong := re.search("^WARNING: .* does not provide the extra.*$", ended.stderr, re.MULTILINE):
            raise RuntimeError(wrong[0])
    return environment


def lower_bounds() -> list[str]:
    """The dependencies but torch, each at its lower bound."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return [
        requirement.replace(">=", "==")
        for requirement in project["dependencies"]
        if not requirement.startswith("torch>=")
    ]
