"""Exit codes of a controller that cannot start."""

import errno
import logging
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from flowrt.launcher import controller_main
from flowrt.recipes.config_io import parse, to_toml


@pytest.mark.parametrize(
    ("number", "code", "message"),
    [
        (errno.ENOSPC, 1, "No space left on device; free disk space, then flowrt resume"),
        (errno.EDQUOT, 1, "Disk quota exceeded; free disk space, then flowrt resume"),
        (errno.EACCES, 2, "Permission denied"),
    ],
)
def test_a_full_disk_is_no_wrong_input(
    number: int,
    code: int,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As in a controller that is started again after a full disk has ended the run."""

    def serve_loop(coroutine: Any) -> int:
        coroutine.close()
        raise OSError(number, os.strerror(number))

    config = tmp_path / "config.toml"
    config.write_text(to_toml(parse(["--run-dir", str(tmp_path / "run")])))
    monkeypatch.setattr(controller_main, "serve_loop", serve_loop)
    monkeypatch.setattr(controller_main, "log_to_stderr", lambda: logging.getLogger().setLevel(logging.INFO))
    monkeypatch.setattr(sys, "argv", ["controller", "--config", str(config)])
    assert controller_main.main() == code
    assert message in caplog.text
    assert code == 2 or f"the files of the run in {tmp_path / 'run'} cannot be written" in caplog.text
