"""The last line of a run that did not complete its steps."""

from pathlib import Path

from flowrt.launcher.local_run import continuation


def test_the_last_line_names_the_command_that_continues_the_run(tmp_path: Path) -> None:
    run_dir = tmp_path / "my run"
    assert continuation("interrupted (SIGTERM)", run_dir, 400) == ""  # it has no checkpoint
    for step in (150, 174):
        (run_dir / "checkpoints" / f"step-{step:06}").mkdir(parents=True)
    text = continuation("interrupted (SIGTERM); saved after 174 steps", run_dir, 400)
    assert text == f"; continue from step 174 of 400: flowrt resume '{run_dir}'"
    assert continuation(f"the disk is full; free space, then flowrt resume {run_dir}", run_dir, 400) == ""
