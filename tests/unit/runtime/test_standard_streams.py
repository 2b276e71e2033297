"""Standard streams on a full disk: output is dropped, the process goes on, and the log says what is missing."""

import fcntl
import os
import subprocess
import sys
from pathlib import Path

FLOWRT = str(Path(sys.executable).with_name("flowrt"))
LIMITED = """
import logging, resource, sys
from flowrt.runtime.standard_streams import log_to_stderr
log_to_stderr()
unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (200, unlimited[1]))  # the file of the log cannot grow beyond
for number in range(1000):
    logging.error("line %d", number)
resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
logging.error("the last line")
print("done")
sys.exit(7)
"""


def test_a_log_beyond_its_quota_names_what_it_has_lost(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with log.open("wb") as output:
        ended = subprocess.run([sys.executable, "-c", LIMITED], stdout=subprocess.PIPE, stderr=output, timeout=600)
    assert ended.returncode == 7
    assert ended.stdout == b"flowrt: standard error cannot be written and is dropped: File too large\ndone\n"
    lines = log.read_text().splitlines()
    assert "line 0" in lines[0]
    assert "bytes are missing here: the disk was full" in lines[-2]
    assert lines[-1].endswith("the last line")
    assert len(lines) < 10
    assert "Traceback" not in log.read_text()


def test_output_to_a_full_non_blocking_pipe_waits_for_its_reader() -> None:
    reads, writes = os.pipe()
    os.set_blocking(writes, False)
    fcntl.fcntl(writes, fcntl.F_SETPIPE_SZ, 4096)
    program = (
        "from flowrt.runtime.standard_streams import prepare_streams\nprepare_streams()\n"
        "for number in range(100_000): print(number)"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=writes, stderr=subprocess.PIPE) as process:
        os.close(writes)
        with open(reads, "rb") as output:
            lines = output.read().splitlines()
        _, errors = process.communicate(timeout=600)
    assert (process.returncode, errors) == (0, b"")
    assert lines == [b"%d" % number for number in range(100_000)]


def test_a_command_whose_result_is_its_output_fails_on_a_full_disk() -> None:
    with open("/dev/full", "wb") as full:
        ended = subprocess.run([FLOWRT, "--version"], stdout=full, stderr=subprocess.PIPE, timeout=600)
        assert (ended.returncode, ended.stderr) == (
            1,
            b"flowrt: standard output cannot be written and is dropped: No space left on device\n",
        )
        ended = subprocess.run([FLOWRT, "run", "--steps", "0"], stdout=full, stderr=full, timeout=600)
        assert ended.returncode == 2
