"""A run on several hosts, with keys: each process is started by hand, as `flowrt run` and a user would."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from flowrt.recipes.config import RunConfig
from flowrt.recipes.config_io import defaults, parse, to_toml
from flowrt.recipes.run_dir import address_file
from tests.integration.conftest import wait_until

ROOT = Path(__file__).parents[2]
FLOWRT = Path(sys.executable).with_name("flowrt")
TORCHRUN = FLOWRT.with_name("torchrun")
CONTROLLER, ROLLOUT, TRAINER = 1, 2, 3
HOSTS = (CONTROLLER, ROLLOUT, TRAINER)
ABSENT_S = 15.0  # how long a role may have nobody; more than a cut lasts
ON_HOSTS = ("--controller.bind", "tcp://*:0")
"""What the default job needs beyond its defaults."""
SMALL = (
    *ON_HOSTS,
    *("--prompts-per-step", "8", "--group-size", "4", "--data.eval-prompts", "0", "--rollout.workers", "1"),
    *("--algorithm.kl.coef", "0", "--checkpoint.every", "0", "--supervisor.role-vacancy-timeout-s", str(ABSENT_S)),
)


def tiny() -> RunConfig:
    """A model that knows nothing."""
    base = defaults("arithmetic")
    return dataclasses.replace(
        base,
        build=dataclasses.replace(base.build, hidden_size=64, layers=1, heads=2, intermediate_size=128),
        sft=dataclasses.replace(base.sft, steps=0, answer_only_steps=0),
    )


def make_keys_and_model(folder: Path, built: RunConfig) -> tuple[Path, Path]:
    """Keys, and the model of this configuration."""
    subprocess.run([str(FLOWRT), "keys", str(folder / "keys")], check=True, timeout=60, capture_output=True)
    config = dataclasses.replace(built, run_dir=str(folder))
    (folder / "config.toml").write_text(to_toml(config))
    words = [sys.executable, "-m", "flowrt.launcher.build_model", "--config", str(folder / "config.toml")]
    subprocess.run(words, check=True, timeout=300, capture_output=True)
    return folder / "keys", folder / "model"


class Run:
    """A controller that listens on host 1; who else there is, and where, the test says.

    With ``alone`` the directory of the run is that of the controller only: for all others it is empty.
    """

    def __init__(
        self,
        hosts: Any,
        folder: Path,
        keys: Path,
        model: Path,
        steps: int,
        *flags: str,
        job: tuple[str, ...] = SMALL,
        alone: bool = False,
    ) -> None:
        self._hosts = hosts
        self._logs = folder / "logs"
        self._logs.mkdir()
        self.dir = folder / "here" / "run"
        self.dir.mkdir(parents=True)
        self._lacking = (self.dir.parent,) if alone else ()
        config = dataclasses.replace(parse([*job, *flags]), run_dir=str(self.dir), model=str(model), steps=steps)
        toml = folder / "here" / "config.toml"
        toml.write_text(to_toml(config))
        self._environment = {"FLOWRT_KEYS": str(keys), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self._start(CONTROLLER, "controller", [sys.executable, f"{ROOT}/launch/controller.py", "--config", str(toml)])
        wait_until(address_file(self.dir).is_file, 60.0, self.words)
        self.address = address_file(self.dir).read_text().strip()

    def python(self, host: int, name: str, *words: str) -> None:
        """Start ``python WORDS`` with the controller's address behind them."""
        self._start(host, name, [sys.executable, *words, "--controller", self.address], self._lacking)

    def torchrun(self, host: int, name: str, *words: str) -> None:
        """Start ``torchrun WORDS`` with the controller's address behind them."""
        self._start(host, name, [str(TORCHRUN), *words, "--controller", self.address], self._lacking)

    def staff(self) -> None:
        """A source and a reward worker beside the controller, a rollout worker and a trainer on a host each."""
        self.python(CONTROLLER, "source", "-m", "flowrt.roles.source")
        self.python(CONTROLLER, "reward", "-m", "flowrt.roles.reward")
        one = ("--standalone", "--nproc-per-node", "1")
        self.torchrun(ROLLOUT, "rollout", *one, f"{ROOT}/workers/rollout.py")
        self.torchrun(TRAINER, "trainer", *one, f"{ROOT}/workers/trainer.py")

    def status(self) -> dict[str, Any]:
        """What ``flowrt status`` says on the controller's host."""
        words = [*self._hosts.on(CONTROLLER), str(FLOWRT), "status", str(self.dir), "--json"]
        asked = subprocess.run(words, check=True, timeout=60, capture_output=True, env=os.environ | self._environment)
        return dict(json.loads(asked.stdout))

    def words(self) -> str:
        paths = sorted(self._logs.glob("*.log"))
        return "\n".join(f"--- {path.name}\n{path.read_text(errors='replace')[-1500:]}" for path in paths)

    def said(self, name: str) -> str:
        """The whole log of a process."""
        return (self._logs / f"{name}.log").read_text(errors="replace")

    def steps(self) -> int:
        path = self.dir / "metrics.jsonl"
        return len(path.read_text().splitlines()) if path.is_file() else 0

    def wait_for_steps(self, count: int) -> None:
        wait_until(lambda: self.steps() >= count or self._over(), 180.0, self.words)
        assert self.steps() >= count, self.words()

    def wait_for_word(self, name: str, word: str, deadline_s: float) -> None:
        """Return when a process has said that."""
        wait_until(lambda: word in self.said(name), deadline_s, self.words)

    def code(self, deadline_s: float) -> int:
        """How the controller left."""
        return self.left("controller", deadline_s)

    def left(self, name: str, deadline_s: float) -> int:
        """How a process left, which it must have by the deadline."""
        process = self.processes[name]
        wait_until(lambda: process.poll() is not None, deadline_s, lambda: f"{name} is there: {self.words()}")
        return int(process.returncode)

    def all_leave_well(self, deadline_s: float) -> None:
        """Every process leaves with exit code 0."""
        codes = {name: self.left(name, deadline_s) for name in self.processes}
        assert set(codes.values()) == {0}, (codes, self.words())

    def summary(self) -> dict[str, Any]:
        return dict(json.loads((self.dir / "summary.json").read_text()))

    def _over(self) -> bool:
        return self.processes["controller"].poll() is not None

    def _start(self, host: int, name: str, words: list[str], lacking: tuple[Path, ...] = ()) -> None:
        self.processes[name] = self._hosts.start(host, words, self._logs / f"{name}.log", self._environment, lacking)
