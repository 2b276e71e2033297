"""Signals that reach the launcher before it has started a process, and while its interpreter shuts down."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from flowrt.recipes.config_io import defaults, to_toml

PROGRAM = """
import atexit, os, signal, sys
from flowrt import cli
from flowrt.launcher import local_run

class Signalled(local_run.Children):
    def __init__(self, *arguments):
        os.kill(os.getpid(), int(sys.argv[1]))
        super().__init__(*arguments)

local_run.Children = Signalled
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup ignores it, and so does a program that it starts
if int(sys.argv[1]) != signal.SIGINT:
    atexit.register(os.kill, os.getpid(), signal.SIGTERM)
sys.exit(cli.main(["run", "--run-dir", sys.argv[2]]))
"""
WITHIN_S = 60.0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP])
def test_launcher_exits_in_order(tmp_path: Path, number: signal.Signals) -> None:
    """Schedulers and job scripts both send a signal: the second one changes nothing, however late it comes."""
    command = [sys.executable, "-c", PROGRAM, str(int(number)), str(tmp_path / "run")]
    completed = subprocess.run(
        command, capture_output=True, text=True, timeout=WITHIN_S, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert completed.returncode == 130, completed.stderr
    assert "interrupted: ending the run" in completed.stdout
    assert "Traceback" not in completed.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP])
def test_a_signal_after_the_end_of_a_command_does_not_change_its_exit_code(number: signal.Signals) -> None:
    program = (
        "import atexit, os, sys; from flowrt import cli\n"
        f"atexit.register(os.kill, os.getpid(), {int(number)})\n"
        "sys.argv = ['flowrt', '--version']; sys.exit(cli.main())\n"
    )
    completed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=WITHIN_S)
    assert completed.returncode == 0, completed.stderr


def test_an_interrupt_while_the_command_is_imported_is_one_line() -> None:
    program = (
        "import os, signal, sys\n"
        "class Interrupt:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'flowrt.cli':\n"
        "            os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Interrupt())\n"
        "from flowrt.__main__ import main\n"
        "sys.exit(main())\n"
    )
    completed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=WITHIN_S)
    assert (completed.returncode, completed.stderr) == (130, "flowrt: interrupted\n")


CONTROLLER = """
import os, sys
from flowrt.launcher import controller_main

made, number = controller_main.make_server, int(sys.argv.pop(1))

def signalled(*arguments):
    os.kill(os.getpid(), number)
    return made(*arguments)

controller_main.make_server = signalled
sys.exit(controller_main.main())
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP])
def test_a_controller_that_is_signalled_before_it_listens_ends_its_run(tmp_path: Path, number: signal.Signals) -> None:
    run_dir = tmp_path / "run"
    config = tmp_path / "config.toml"
    config.write_text(to_toml(dataclasses.replace(defaults("arithmetic"), run_dir=str(run_dir))))
    start = f"import signal; signal.signal({int(number)}, signal.SIG_DFL)\n"
    command = [sys.executable, "-c", start + CONTROLLER, str(int(number)), "--config", str(config)]
    completed = subprocess.run(command, capture_output=True, text=True, timeout=WITHIN_S)
    assert completed.returncode == 130, completed.stderr
    assert "Traceback" not in completed.stderr
    assert json.loads((run_dir / "summary.json").read_text())["reason"] == f"interrupted ({number.name})"
