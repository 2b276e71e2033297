import gc
import signal
from collections import defaultdict
from collections.abc import Generator
from typing import Any

import pytest
import torch
from hypothesis import settings

from tests.effort import FAST_EXAMPLES, TEST_EXAMPLES, THOROUGH_EXAMPLES

pytest_plugins = ["tests.file_scheduling", "tests.open_sockets", "tests.reruns"]

torch.set_num_threads(1)
# A shell starts background processes with SIGINT ignored, which the commands under test would inherit.
signal.signal(signal.SIGINT, signal.default_int_handler)
# The machines that run these tests are small and shared: a slow example is no bug.
# `make test` draws the same examples every time, for a result that depends on the code alone; `make test-long` draws
# new ones.
settings.register_profile("flowrt", deadline=None, derandomize=True, max_examples=TEST_EXAMPLES)
settings.register_profile("thorough", deadline=None, max_examples=THOROUGH_EXAMPLES)
settings.register_profile("fast", deadline=None, max_examples=FAST_EXAMPLES)
settings.load_profile("flowrt")


# Modules and collected tests are a million objects that stay. Cycle collections that visit them take a quarter of the
# time of the tests that allocate most.
gc.disable()
YOUNG_OBJECTS = 20_000
"""Number of new objects after which the cycle collector runs."""


def pytest_collection_finish() -> None:
    """Exclude all objects that exist now from cycle collections, which were disabled until now."""
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, 20, 50)
    gc.enable()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--must", action="append", default=[], metavar="MARKER", help="tests with this marker may not be skipped"
    )
    parser.addoption(
        "--cases", type=int, default=0, metavar="N", help="run at most N cases of each test with parameters; 0: all"
    )


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep at most ``--cases`` cases of each test, evenly spread, so that every run keeps the same ones."""
    limit = config.getoption("--cases")
    cases: defaultdict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        cases[item.nodeid.partition("[")[0]].append(item)
    kept = {
        item
        for of_one_test in cases.values()
        for item in (
            of_one_test
            if len(of_one_test) <= limit
            else [of_one_test[i * len(of_one_test) // limit] for i in range(limit)]
        )
    }
    if limit and len(kept) < len(items):
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = [item for item in items if item in kept]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, Any, Any]:
    """Report a skipped test as failed if it has a marker that ``--must`` names."""
    report = yield
    required = [name for name in item.config.getoption("--must") if item.get_closest_marker(name)]
    if report.skipped and required and not hasattr(report, "wasxfail"):
        reason = report.longrepr[-1] if isinstance(report.longrepr, tuple) else report.longrepr
        report.outcome, report.longrepr = "failed", f"--must {required[0]}: {reason}"
    return report
