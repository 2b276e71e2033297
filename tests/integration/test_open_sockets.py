"""A test that leaves a ZeroMQ context open fails, and no later one."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
TESTS = """
import zmq

def test_that_leaves_a_socket_open():
    cycle = []
    context = zmq.Context()
    cycle += [cycle, context, context.socket(zmq.DEALER)]

def test_that_closes_it():
    with zmq.Context() as context, context.socket(zmq.DEALER):
        pass
"""


def test_the_test_that_leaves_a_socket_open_is_named(tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "test_file.py").write_text(TESTS)
    plugins = ("-p", "no:cacheprovider", "-p", "no:asyncio", "-p", "tests.open_sockets")
    command = [sys.executable, "-m", "pytest", *plugins, str(tmp_path)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert "2 passed, 1 error" in ended.stdout
    assert re.search(r"^ERROR \S*test_file\.py::test_that_leaves_a_socket_open", ended.stdout, re.MULTILINE)
    assert "context = zmq.Context()" in ended.stdout, "the call that made it"
