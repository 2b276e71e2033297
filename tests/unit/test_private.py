"""Run directories are nobody else's, whoever made them."""

import stat
from pathlib import Path

from flowrt.recipes.paths import private


def test_a_directory_that_was_there_is_closed_to_others(tmp_path: Path) -> None:
    path = tmp_path / "run"
    path.mkdir(mode=0o755)
    for directory in (path, tmp_path / "new" / "run"):
        private(directory)
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
