"""Keys with real processes: a run with keys trains, and a process with wrong keys gets a clear error and code 2."""

import dataclasses
import os
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from flowrt.errors import ConfigError
from flowrt.net.curve_keys import controller_keys, raw_key, worker_keys
from flowrt.recipes.config_io import defaults, to_toml
from flowrt.runtime.addresses import is_loopback
from flowrt.runtime.host import check_address
from tests.integration.conftest import wait_until
from tests.integration.helpers.forked_flowrt import run_module

FLOWRT = Path(sys.executable).with_name("flowrt")
SMALL = (
    "--steps 100000 --prompts-per-step 2 --group-size 2 --data.eval-prompts 0 --rollout.workers 1 --algorithm.kl.coef 0"
)
WORKER_S = 60.0


def flowrt(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(FLOWRT), *map(str, arguments)], timeout=600, capture_output=True, text=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Keys of two controllers, and a mix: the public key of the first and the worker key of the second."""
    folder = tmp_path_factory.mktemp("keys")
    for name in ("first", "second"):
        result = flowrt("keys", folder / name)
        assert result.returncode == 0, result.stderr
    shutil.copytree(folder / "second", folder / "mixed")
    shutil.copy(folder / "first" / "controller.pub", folder / "mixed" / "controller.pub")
    return folder


@pytest.fixture(scope="module")
def listening(folder: Path) -> Iterator[tuple[str, Path]]:
    """A controller process with the keys `first`; its address and its log."""
    config = defaults("arithmetic")
    config = dataclasses.replace(config, run_dir=str(folder / "run"))
    (folder / "config.toml").write_text(to_toml(config))
    log = folder / "controller.log"
    read_fd, write_fd = os.pipe()
    command = [
        "-m",
        "flowrt.launcher.controller_main",
        "--config",
        str(folder / "config.toml"),
        "--ready-fd",
        str(write_fd),
    ]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, *command, "--keys", str(folder / "first")], stderr=output, pass_fds=[write_fd]
        )
    os.close(write_fd)
    with os.fdopen(read_fd) as ready:
        yield ready.readline().strip(), log
    process.terminate()
    assert process.wait(20) == 130


# ---- key generation


def test_only_their_owner_can_read_the_keys(folder: Path) -> None:
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (folder / "first").iterdir()}
    assert modes == dict.fromkeys(("controller.key", "controller.pub", "worker.key", "workers.toml"), 0o600)
    assert stat.S_IMODE((folder / "first").stat().st_mode) == 0o700


def test_keys_are_never_overwritten(folder: Path) -> None:
    before = (folder / "first" / "controller.key").read_text()
    again = flowrt("keys", folder / "first")
    assert again.returncode == 2
    assert "never overwritten" in again.stderr
    assert (folder / "first" / "controller.key").read_text() == before


@pytest.mark.parametrize("names", [["../x"], ["controller"], ["a", "a"], ["--force"], ["a/b"]])
def test_invalid_worker_names_are_rejected(tmp_path: Path, names: list[str]) -> None:
    assert flowrt("keys", tmp_path / "keys", *names).returncode == 2
    assert not (tmp_path / "keys").exists()


def test_each_worker_name_has_its_own_key(tmp_path: Path) -> None:
    assert flowrt("keys", tmp_path / "keys", "rollout-0", "trainer").returncode == 0
    assert sorted(controller_keys(tmp_path / "keys").admitted.values()) == ["rollout-0", "trainer"]
    assert worker_keys(tmp_path / "keys", "trainer").path.name == "trainer.key"
    for unknown in ("reward", "controller", "../keys/trainer"):
        with pytest.raises(ConfigError, match="has no key for"):
            worker_keys(tmp_path / "keys", unknown)


def test_a_secret_key_that_others_can_read_is_rejected(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "first", tmp_path / "keys")
    (tmp_path / "keys" / "worker.key").chmod(0o640)
    with pytest.raises(ConfigError, match="can be read by others"):
        worker_keys(tmp_path / "keys", "worker")


@pytest.mark.parametrize("text", ["", "x" * 39, "~" * 40, "#" * 40])
def test_malformed_keys_are_rejected(text: str) -> None:
    with pytest.raises(ConfigError, match="no CURVE key"):
        raw_key(text, Path("somewhere"))


# ---- addresses


@pytest.mark.parametrize("host", ["*", "0.0.0.0", "10.1.2.3", "[::]", "eth0", "example.org", "127.0.0.1.example.org"])
def test_addresses_other_than_loopback_require_keys(host: str) -> None:
    with pytest.raises(ConfigError, match=r"flowrt keys DIR and set controller.keys, or listen on 127.0.0.1"):
        check_address(f"tcp://{host}:0", keyed=False)
    check_address(f"tcp://{host}:0", keyed=True)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "localhost", "[::1]"])
def test_loopback_addresses_need_no_keys(host: str) -> None:
    assert is_loopback(host)
    check_address(f"tcp://{host}:0", keyed=False)


def test_a_run_on_all_interfaces_without_keys_is_rejected(refused: Callable[..., Any]) -> None:
    assert "flowrt keys DIR" in refused("--controller.bind", "tcp://*:0").sentence()


def test_the_error_names_the_missing_key_file(refused: Callable[..., Any]) -> None:
    assert "workers.toml" in refused("--controller.keys", "nowhere").sentence()


# ---- authentication


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ("", "requires keys"),
        ("mixed", "does not know the key"),
        ("second", "controller.pub the key of this controller?"),
        ("nowhere", "cannot be read"),
    ],
)
def test_a_worker_with_wrong_keys_exits_with_an_error(
    folder: Path, listening: tuple[str, Path], keys: str, message: str
) -> None:
    address, log = listening
    flags = ["--keys", str(folder / keys)] if keys else []
    ended = run_module("flowrt.roles.reward", "--controller", address, *flags, timeout_s=WORKER_S)
    assert ended.returncode == 2
    assert message in " ".join(ended.stdout.split())
    if keys != "nowhere":  # the worker may exit before the controller logs the refusal
        wait_until(lambda: "refused a connection from " in log.read_text(), WORKER_S, log.read_text)
    assert "for the keys of" in log.read_text()


@pytest.mark.long
@pytest.mark.slow
def test_run_with_keys_trains_and_refuses_observers_without_keys(
    folder: Path, launch: Callable[..., Any], untrained_model: Path
) -> None:
    run = launch("--model", str(untrained_model), "--controller.keys", str(folder / "first"), *SMALL.split())
    run.wait_for_training()
    status = flowrt("status", run.run_dir)
    assert (status.returncode, "rollout-0" in status.stdout) == (0, True), status.stderr
    address = (run.run_dir / "address").read_text().strip()
    unkeyed = flowrt("status", "--controller", address, "--deadline-s", "30")
    assert unkeyed.returncode == 2
    assert "requires keys" in " ".join(unkeyed.stderr.split())
    drained = flowrt("drain", "no-such-worker", "--run", run.run_dir)
    # Authenticated: the error names the unknown worker.
    assert (drained.returncode, "no-such-worker" in drained.stderr) == (2, True)
    run.signal(signal.SIGINT)
    assert run.wait(20) == 130, run.output
    assert "for the keys of" in run.log("controller")
    assert "refused a connection from " in run.log("controller")  # the observer without keys
    assert stat.S_IMODE(run.run_dir.stat().st_mode) == 0o700
    run.assert_gone(10)
