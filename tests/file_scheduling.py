"""``--dist loadfile`` that goes on after the death of a worker process: only the test that it ran has failed.

That of pytest-xdist 3.8 runs the test that ended the process again, and leaves the new process waiting for more tests.
"""

from typing import Any

import pytest
from xdist.scheduler import LoadFileScheduling
from xdist.workermanage import WorkerController

LONGEST = {
    "test_bad_input",
    "test_evaluation_runs",
    "test_examples",
    "test_exported_models",
    "test_faults",
    "test_fork_server",
    "test_fsdp",
    "test_house",
    "test_keys",
    "test_lane_conformance",
    "test_own_task_page",
    "test_samples_run",
    "test_stalled_runs",
    "test_standin",
    "test_stopping",
    "test_user_reward",
    "test_watch",
    "test_where_time_goes",
}
"""Files that take longest, which begin first: a long one at the end would leave the other workers without tests."""


class FileScheduling(LoadFileScheduling):  # type: ignore[misc]
    """Each file is run by one worker; the tests of a dead one that it had not begun are run by another."""

    def remove_node(self, node: WorkerController) -> str | None:
        """Make the tests of this worker available again, but for the one that it ran, which is returned."""
        for file in self.assigned_work[node].values():
            for name, completed in file.items():
                if not completed:
                    file[name] = True
                    super().remove_node(node)
                    return str(name)
        super().remove_node(node)
        return None

    def schedule(self) -> None:
        """Give tests to workers without any, and tell all to end after their last if these are all."""
        super().schedule()
        if not self.workqueue:
            for node in self.nodes:
                node.shutdown()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> FileScheduling | None:
    return FileScheduling(config, log) if config.getoption("dist") == "loadfile" else None


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.stem not in LONGEST)
