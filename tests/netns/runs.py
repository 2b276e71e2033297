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
ROLE_VACANCY_TIMEOUT_S = 15.0  # longer than a link is cut
ON_HOSTS = ("--controller.bind", "tcp://*:0")
"""What the default job needs beyond its defaults."""
SMALL = (
    *ON_HOSTS,
    *("--prompts-per-step", "8", "--group-size", "4", "--data.eval-prompts", "0", "--rollout.workers", "1"),
    *(
        "--algorithm.kl.coef",
        "0",
        "--checkpoint.every",
        "0",
        "--supervisor.role-vacancy-timeout-s",
        str(ROLE_VACANCY_TIMEOUT_S),
    ),
)


def tiny_model() -> RunConfig:
    """The configuration of an untrained model of minimal size."""
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
    command = [sys.executable, "-m", "flowrt.launcher.build_model", "--config", str(folder / "config.toml")]
    subprocess.run(command, check=True, timeout=300, capture_output=True)
    return folder / "keys", folder / "model"


class Run:
    """A controller on host 1; the test starts the other processes.

    With ``unshared`` only the controller sees the run directory; for all other processes it is empty.
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
        unshared: bool = False,
    ) -> None:
        self._hosts = hosts
        self._logs = folder / "logs"
        self._logs.mkdir()
        self.dir = folder / "here" / "run"
        self.dir.mkdir(parents=True)
        self._hidden = (self.dir.parent,) if unshared else ()
        config = dataclasses.replace(parse([*job, *flags]), run_dir=str(self.dir), model=str(model), steps=steps)
        toml = folder / "here" / "config.toml"
        toml.write_text(to_toml(config))
        self._environment = {"FLOWRT_KEYS": str(keys), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self._start(CONTROLLER, "controller", [sys.executable, f"{ROOT}/launch/controller.py", "--config", str(toml)])
        wait_until(address_file(self.dir).is_file, 60.0, self.logs)
        self.address = address_file(self.dir).read_text().strip()

    def python(self, host: int, name: str, *command: str) -> None:
        """Start ``python COMMAND --controller ADDRESS``."""
        self._start(host, name, [sys.executable, *command, "--controller", self.address], self._hidden)

    def torchrun(self, host: int, name: str, *command: str) -> None:
        """Start ``torchrun COMMAND --controller ADDRESS``."""
        self._start(host, name, [str(TORCHRUN), *command, "--controller", self.address], self._hidden)

    def start_roles(self) -> None:
        """Start source and reward on the controller's host, a rollout worker and a trainer on a host each."""
        self.python(CONTROLLER, "source", "-m", "flowrt.roles.source")
        self.python(CONTROLLER, "reward", "-m", "flowrt.roles.reward")
        options = ("--standalone", "--nproc-per-node", "1")
        self.torchrun(ROLLOUT, "rollout", *options, f"{ROOT}/workers/rollout.py")
        self.torchrun(TRAINER, "trainer", *options, f"{ROOT}/workers/trainer.py")

    def status(self) -> dict[str, Any]:
        """The output of ``flowrt status`` on the controller's host."""
        command = [*self._hosts.on(CONTROLLER), str(FLOWRT), "status", str(self.dir), "--json"]
        result = subprocess.run(
            command, check=True, timeout=60, capture_output=True, env=os.environ | self._environment
        )
        return dict(json.loads(result.stdout))

    def logs(self) -> str:
        """The end of every log."""
        paths = sorted(self._logs.glob("*.log"))
        return "\n".join(f"--- {path.name}\n{path.read_text(errors='replace')[-1500:]}" for path in paths)

    def log(self, name: str) -> str:
        """The whole log of a process."""
        return (self._logs / f"{name}.log").read_text(errors="replace")

    def steps(self) -> int:
        path = self.dir / "metrics.jsonl"
        return len(path.read_text().splitlines()) if path.is_file() else 0

    def wait_for_steps(self, count: int) -> None:
        wait_until(lambda: self.steps() >= count or self._has_ended(), 180.0, self.logs)
        assert self.steps() >= count, self.logs()

    def wait_for_log(self, name: str, text: str, deadline_s: float) -> None:
        """Wait until the log of a process contains the text."""
        wait_until(lambda: text in self.log(name), deadline_s, self.logs)

    def controller_exit_code(self, deadline_s: float) -> int:
        """The exit code of the controller, which must end by the deadline."""
        return self.exit_code("controller", deadline_s)

    def exit_code(self, name: str, deadline_s: float) -> int:
        """The exit code of a process, which must end by the deadline."""
        process = self.processes[name]
        wait_until(lambda: process.poll() is not None, deadline_s, lambda: f"{name} still runs: {self.logs()}")
        return int(process.returncode)

    def assert_all_succeed(self, deadline_s: float) -> None:
        """Every process ends with exit code 0 by the deadline."""
        codes = {name: self.exit_code(name, deadline_s) for name in self.processes}
        assert set(codes.values()) == {0}, (codes, self.logs())

    def summary(self) -> dict[str, Any]:
        return dict(json.loads((self.dir / "summary.json").read_text()))

    def _has_ended(self) -> bool:
        return self.processes["controller"].poll() is not None

    def _start(self, host: int, name: str, command: list[str], hidden: tuple[Path, ...] = ()) -> None:
        self.processes[name] = self._hosts.start(host, command, self._logs / f"{name}.log", self._environment, hidden)
