"""Hosts with equal names, as clones of one image or containers have."""

import os
import subprocess
import sys

import pytest

from flowrt.runtime.parent_death import LAUNCHER, this_launcher

pytestmark = [pytest.mark.netns, pytest.mark.timeout(60)]


@pytest.mark.usefixtures("hosts")
def test_parent_in_another_pid_namespace_is_not_reported_dead() -> None:
    result = subprocess.run(
        [
            *("unshare", "--pid", "--fork", "--mount-proc"),
            *(
                sys.executable,
                "-c",
                "from flowrt.runtime.parent_death import die_with_parent as d; d(); print('alive')",
            ),
        ],
        env={**os.environ, LAUNCHER: this_launcher()},
        capture_output=True,
        text=True,
        timeout=40,
        check=False,
    )
    assert (result.returncode, result.stdout) == (0, "alive\n"), result.stderr
