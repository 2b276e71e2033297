"""``--unstable FILE``: failed tests run once more, alone; of those that pass then, few enough fail no run."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 300.0
TWO_PROCESSES = ("-p", "xdist", "-p", "tests.file_scheduling", "-n", "2", "--dist", "loadfile")

pytestmark = pytest.mark.slow

FIRST_TIME = """
import os
import pathlib
import pytest

def first_time(name):
    try:
        (pathlib.Path(__file__).parent / f"{name}.seen").touch(exist_ok=False)
    except FileExistsError:
        return False
    return True
"""
FAILS_ONCE = """
def test_{name}():
    assert not first_time("{name}")
"""
SETUP_FAILS_ONCE = """
@pytest.fixture
def resource():
    assert not first_time("setup")

def test_setup(resource):
    pass
"""
TEARDOWN_FAILS_ONCE = """
@pytest.fixture
def resource():
    yield
    assert not first_time("teardown")

def test_teardown(resource):
    pass
"""
PROCESS_ENDS_ONCE = """
def test_end():
    if first_time("end"):
        os._exit(3)
"""
SKIPPED_AFTER_A_FAILURE = """
def test_skipped():
    if not first_time("skipped"):
        pytest.skip("not here")
    assert False
"""
FAILS = """
def test_failing():
    assert False
"""
PASSES = """
def test_passing():
    pass
"""


def run(folder: Path, files: Sequence[str], *options: str) -> tuple[int, list[str], list[str]]:
    """Run files with these tests; returns the exit code, the lines of output, and the names in the file."""
    folder.mkdir(exist_ok=True)
    (folder / "pytest.ini").write_text("[pytest]\n")
    for number, tests in enumerate(files):
        (folder / f"test_{number}.py").write_text(FIRST_TIME + tests)
    names = folder.parent / "unstable.txt"
    plugins = ("-p", "no:cacheprovider", "-p", "tests.reruns")
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", *plugins, *options, f"--unstable={names}", str(folder)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    written = names.read_text().splitlines() if names.exists() else []
    return ended.returncode, ended.stdout.splitlines(), written


def test_failures_of_each_kind_that_pass_when_repeated_fail_no_run(tmp_path: Path) -> None:
    files = (FAILS_ONCE.format(name="call"), TEARDOWN_FAILS_ONCE, PROCESS_ENDS_ONCE, PASSES)
    code, lines, names = run(tmp_path / "tests", files, *TWO_PROCESSES)
    assert code == 0, lines
    assert sorted(names) == ["test_0.py::test_call", "test_1.py::test_teardown", "test_2.py::test_end"]
    assert all(f"unstable: {name}" in lines for name in names)
    assert '    assert not first_time("call")' in " ".join(lines), "how it failed is shown"
    assert "3 unstable" in lines[-1]
    assert "failed" not in lines[-1]
    assert "error" not in lines[-1]


def test_stages_share_one_count_and_show_all_names(tmp_path: Path) -> None:
    stages = [
        run(tmp_path / "first", (SETUP_FAILS_ONCE,)),
        run(tmp_path / "second", [FAILS_ONCE.format(name=name) for name in "ab"]),
        run(tmp_path / "third", (FAILS_ONCE.format(name="c"), PASSES)),
    ]
    assert [code for code, _, _ in stages] == [0, 0, 1]
    _, lines, names = stages[-1]
    assert names == ["test_0.py::test_setup", "test_0.py::test_a", "test_1.py::test_b", "test_0.py::test_c"]
    assert all(f"unstable: {name}" in lines for name in names)
    assert "4 tests are unstable, and at most 3 may be" in lines
    assert "1 failed, 1 passed" in lines[-1]


@pytest.mark.parametrize(
    ("last", "closing"),
    [
        pytest.param(FAILS, "1 failed, 1 unstable", id="fails-again"),
        pytest.param(SKIPPED_AFTER_A_FAILURE, "1 failed, 1 unstable", id="skipped-alone"),
        pytest.param("import no_such_module", "1 error, 1 unstable", id="not-collected"),
    ],
)
def test_what_does_not_pass_when_repeated_fails_the_run(tmp_path: Path, last: str, closing: str) -> None:
    files = (FAILS_ONCE.format(name="a"), last)
    code, lines, names = run(tmp_path / "tests", files, "--continue-on-collection-errors")
    assert code == 1, lines
    assert names == ["test_0.py::test_a"]
    assert closing in lines[-1]


@pytest.mark.parametrize(
    ("files", "options", "code"),
    [
        pytest.param((), (), pytest.ExitCode.NO_TESTS_COLLECTED, id="no-test"),
        pytest.param((FAILS_ONCE.format(name="a"), PASSES), ("-x",), pytest.ExitCode.TESTS_FAILED, id="stopped"),
        pytest.param((FAILS,) * 11, (), pytest.ExitCode.TESTS_FAILED, id="too-many-failures"),
        pytest.param((PASSES,), (), pytest.ExitCode.OK, id="passed"),
    ],
)
def test_runs_where_nothing_runs_again(
    tmp_path: Path, files: Sequence[str], options: Sequence[str], code: pytest.ExitCode
) -> None:
    ended, _, names = run(tmp_path / "tests", files, *options)
    assert ended == code
    assert names == []
