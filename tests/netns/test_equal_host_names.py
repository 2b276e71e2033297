"""Hosts that have one name, as machines made from one image have, or containers."""

import os
import subprocess
import sys

import pytest

from flowrt.runtime.parent_death import LAUNCHER, this_launcher

pytestmark = [pytest.mark.netns, pytest.mark.timeout(60)]


@pytest.mark.usefixtures("hosts")
def test_parent_in_another_pid_namespace_is_not_reported_dead() -> None:
    ended = subprocess.run(
        [
            *("unshare", "--pid", "--fork", "--mount-proc"),
            *(
                sys.executable,
                "-c",
                "from flowrt.runtime.parent_death import die_with_parent as d; d(); print('lives')",
            ),
        ],
        env={**os.environ, LAUNCHER: this_launcher()},
        capture_output=True,
        text=True,
        timeout=40,
        check=False,
    )
    assert (ended.returncode, ended.stdout) == (0, "lives\n"), ended.stderr
