"""Hosts that have one name, as machines made from one image have, or containers."""

import os
import subprocess
import sys

import pytest

from flowrt.lifeline import LAUNCHER, this_launcher

pytestmark = [pytest.mark.netns, pytest.mark.timeout(60)]


@pytest.mark.usefixtures("hosts")
def test_a_launcher_is_not_missed_where_its_process_number_means_nothing() -> None:
    ended = subprocess.run(
        [
            *("unshare", "--pid", "--fork", "--mount-proc"),
            *(sys.executable, "-c", "from flowrt.lifeline import die_with_parent as d; d(); print('lives')"),
        ],
        env={**os.environ, LAUNCHER: this_launcher()},
        capture_output=True,
        text=True,
        timeout=40,
        check=False,
    )
    assert (ended.returncode, ended.stdout) == (0, "lives\n"), ended.stderr
