"""A failed test runs once more, alone, after all others; if it passes then it is unstable, which fails no suite.

``--unstable FILE`` turns this on. The names of unstable tests are appended to FILE, so that several runs
share one count: more than UNSTABLE_LIMIT of them fail the run that found the last one.
"""

import subprocess
import sys
import tempfile
from pathlib import Path
from xml.etree import ElementTree

import pytest

UNSTABLE_LIMIT = 3
RERUN_LIMIT = 10
"""With more failed tests than this none runs again: this is not chance."""
RERUN_TIMEOUT_S = 1800.0


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--unstable",
        metavar="FILE",
        default="",
        help="run failed tests once more, alone; append the names of those that pass then to FILE",
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--unstable") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Reruns(config, Path(config.getoption("--unstable"))), "reruns")


class Reruns:
    """The failed tests of one run, in the process that reports them."""

    def __init__(self, config: pytest.Config, path: Path) -> None:
        self.config = config
        self.path = path
        self.failed: dict[str, list[pytest.TestReport]] = {}
        self.failed_collections = 0
        self.unstable: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note a failure of a test, of its fixtures, or of the worker process that ran it."""
        if report.failed:
            self.failed.setdefault(report.nodeid, []).append(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Note a file that cannot be collected: its tests are unknown and cannot run again."""
        self.failed_collections += report.failed

    @pytest.hookimpl(trylast=True)  # the workers of pytest-xdist have ended
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """Run the failed tests again, and clear the exit status if all of them pass and few enough are unstable."""
        complete = exitstatus == pytest.ExitCode.TESTS_FAILED and not (session.shouldfail or session.shouldstop)
        if not complete or not self.failed or len(self.failed) > RERUN_LIMIT:
            return
        self.unstable = [name for name in self.failed if self._passes_by_itself(name)]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a") as file:
            file.writelines(f"{name}\n" for name in self.unstable)
        if len(_names(self.path)) > UNSTABLE_LIMIT:
            return
        reporter: pytest.TerminalReporter | None = self.config.pluginmanager.get_plugin("terminalreporter")
        stats = {} if reporter is None else reporter.stats
        for kind in ("failed", "error"):
            stats[kind] = [report for report in stats.get(kind, []) if report.nodeid not in self.unstable]
        stats["unstable"] = [self.failed[name][0] for name in self.unstable]
        if len(self.unstable) == len(self.failed) and not self.failed_collections:
            session.exitstatus = pytest.ExitCode.OK

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Show how unstable tests failed, and the names of all in the file, those of earlier runs too."""
        for report in terminalreporter.stats.get("unstable", []):
            terminalreporter.write_sep("_", f"unstable: {report.nodeid}")
            report.toterminal(terminalreporter._tw)
        names = _names(self.path)
        if names:
            terminalreporter.write_sep("=", "unstable tests: failed, and passed alone")
        for name in names:
            terminalreporter.write_line(f"unstable: {name}")
        if len(names) > UNSTABLE_LIMIT:
            terminalreporter.write_line(f"{len(names)} tests are unstable, and at most {UNSTABLE_LIMIT} may be")

    def _passes_by_itself(self, name: str) -> bool:
        """Whether the test passes in a process of its own, with the options of this run."""
        given = self.config.invocation_params
        options = [argument for argument in given.args if argument not in self.config.option.file_or_dir]
        one_process = ["-n0", "--dist=no"] if hasattr(self.config.option, "numprocesses") else []
        with tempfile.TemporaryDirectory(prefix="flowrt-test-") as place:
            results = Path(place) / "results.xml"
            again = [*options, "--unstable=", f"--junitxml={results}", *one_process, str(self.config.rootpath / name)]
            subprocess.run(
                [sys.executable, "-m", "pytest", *again],
                cwd=given.dir,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=RERUN_TIMEOUT_S,
                check=False,
            )
            return results.exists() and _passed(results)


def _passed(results: Path) -> bool:
    """Whether one test ran, and neither failed nor was skipped."""
    suite = next(ElementTree.parse(results).getroot().iter("testsuite"))
    return suite.get("tests") == "1" and all(suite.get(name) == "0" for name in ("failures", "errors", "skipped"))


def _names(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []
