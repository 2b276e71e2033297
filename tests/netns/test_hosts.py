"""The default job on three hosts, started by hand through the same entry points that `flowrt run` uses, with keys."""

import dataclasses
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flowrt.recipes.load import defaults, parse, to_toml
from flowrt.recipes.paths import address_file

ROOT = Path(__file__).parents[2]
FLOWRT = Path(sys.executable).with_name("flowrt")
CONTROLLER, ROLLOUT, TRAINER = 1, 2, 3
CUT_S = 5.0
STEPS = 60
ABSENT_S = 15.0  # how long a role may have nobody; more than a cut lasts
GONE_S = 60.0  # 17 s until nobody answers, then ABSENT_S, and the rest for slow machines
FLAGS = [
    *("--prompts-per-step", "8", "--group-size", "4", "--data.eval-prompts", "0", "--rollout.workers", "1"),
    *("--loss.kl-coef", "0", "--controller.bind", "tcp://*:0", "--checkpoint.every", "0"),
    *("--supervisor.absence-s", str(ABSENT_S)),
]

pytestmark = [pytest.mark.netns, pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="session")
def keys_and_model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Keys, and a tiny model that knows nothing."""
    folder = tmp_path_factory.mktemp("shared")
    subprocess.run([str(FLOWRT), "keys", str(folder / "keys")], check=True, timeout=60, capture_output=True)
    base = defaults("arithmetic")
    config = dataclasses.replace(
        base,
        run_dir=str(folder),
        build=dataclasses.replace(base.build, hidden_size=64, layers=1, heads=2, intermediate_size=128),
        warm_start=dataclasses.replace(base.warm_start, steps=0, bare_steps=0),
    )
    (folder / "config.toml").write_text(to_toml(config))
    words = [sys.executable, "-m", "flowrt.workers.prepare", "--config", str(folder / "config.toml")]
    subprocess.run(words, check=True, timeout=300, capture_output=True)
    return folder / "keys", folder / "model"


class Run:
    """A controller, a source and a reward worker on one host, a rollout worker and a trainer on one each."""

    def __init__(self, hosts: Any, folder: Path, keys: Path, model: Path, steps: int) -> None:
        self._hosts = hosts
        self._logs = folder
        self.dir = folder / "run"
        config = dataclasses.replace(parse(FLAGS), run_dir=str(self.dir), model=str(model), steps=steps)
        trainer = dataclasses.replace(config.trainer, final_dir=str(folder / "trained"))
        (folder / "config.toml").write_text(to_toml(dataclasses.replace(config, trainer=trainer)))
        environment = {"FLOWRT_KEYS": str(keys), "OMP_NUM_THREADS": "1", "PYTHONSAFEPATH": "1"}
        self.processes = {}

        def start(host: int, name: str, *words: str) -> None:
            log = folder / f"{name}.log"
            self.processes[name] = hosts.start(host, [sys.executable, *words], log, environment)

        start(CONTROLLER, "controller", str(ROOT / "launch" / "controller.py"), "--config", str(folder / "config.toml"))
        wait_until(address_file(self.dir).is_file, 60.0, self.words)
        find = ("--controller", address_file(self.dir).read_text().strip())
        torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1")
        start(CONTROLLER, "source", "-m", "flowrt.workers.source", *find)
        start(CONTROLLER, "reward", "-m", "flowrt.workers.reward", *find)
        start(ROLLOUT, "rollout", *torchrun, str(ROOT / "workers" / "rollout.py"), *find)
        start(TRAINER, "trainer", *torchrun, str(ROOT / "workers" / "trainer.py"), *find)

    def words(self) -> str:
        paths = sorted(self._logs.glob("*.log"))
        return "\n".join(f"--- {path.name}\n{path.read_text(errors='replace')[-1500:]}" for path in paths)

    def steps(self) -> int:
        path = self.dir / "metrics.jsonl"
        return len(path.read_text().splitlines()) if path.is_file() else 0

    def wait_for_steps(self, count: int) -> None:
        wait_until(lambda: self.steps() >= count or self._over(), 180.0, self.words)
        assert self.steps() >= count, self.words()

    def code(self, deadline_s: float) -> int:
        """How the controller left."""
        wait_until(self._over, deadline_s, self.words)
        return int(self.processes["controller"].returncode)

    def summary(self) -> dict[str, Any]:
        return json.loads((self.dir / "summary.json").read_text())

    def _over(self) -> bool:
        return self.processes["controller"].poll() is not None


def wait_until(condition: Any, deadline_s: float, what: Any) -> None:
    end_s = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end_s, f"after {deadline_s:.0f} s: {what()}"
        time.sleep(0.05)


@pytest.fixture
def start(hosts: Any, keys_and_model: tuple[Path, Path], tmp_path: Path) -> Iterator[Any]:
    yield lambda steps: Run(hosts, tmp_path, *keys_and_model, steps)
    for number in (CONTROLLER, ROLLOUT, TRAINER):
        hosts.mend(number)
    hosts.end()


def test_a_run_on_three_hosts_outlives_a_cut_of_five_seconds(hosts: Any, start: Any, tmp_path: Path) -> None:
    run = start(STEPS)
    run.wait_for_steps(3)
    hosts.cut(ROLLOUT)
    began_s = time.monotonic()
    wait_until(lambda: time.monotonic() - began_s > CUT_S, 2 * CUT_S, run.words)
    during = run.steps()
    assert during < STEPS, "the run was over before the cut was"
    hosts.mend(ROLLOUT)
    assert run.code(120.0) == 0, run.words()
    summary = run.summary()
    assert (summary["steps"], summary["prompts_lost"], summary["prompts_trained_twice"]) == (STEPS, 0, 0)
    for name, process in run.processes.items():
        assert process.wait(20) == 0, (name, run.words())
    assert f"listening on tcp://{hosts.address(CONTROLLER)}:" in run.words()
    assert list((tmp_path / "trained").glob("*.safetensors"))
    assert not (run.dir / "final").exists()


def test_a_host_that_is_cut_off_for_ever_ends_the_run_by_name(hosts: Any, start: Any) -> None:
    run = start(10_000)
    run.wait_for_steps(3)
    hosts.cut(ROLLOUT)
    assert run.code(GONE_S) == 1, run.words()
    assert "rollout-0" in run.summary()["reason"], run.summary()
