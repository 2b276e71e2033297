"""A new run deletes journals that are in its directory already: they are of another run with the same prompts."""

import dataclasses
from pathlib import Path

from flowrt.launcher.controller_main import make_server
from flowrt.recipes.config_io import defaults, to_toml


def starts_with(run_dir: Path, *, from_checkpoint: bool) -> list[str]:
    """The directories of journals that are there once a controller has started."""
    config = dataclasses.replace(defaults("arithmetic"), run_dir=str(run_dir))
    server, _ = make_server(config, to_toml(config), from_checkpoint)
    server.close()
    return sorted(path.name for path in (run_dir / "journals").iterdir())


async def test_a_start_deletes_the_journals_of_starts_that_the_run_has_not_had(tmp_path: Path) -> None:
    for attempt in (1, 2, 3):
        (tmp_path / "journals" / str(attempt) / "rollout-0").mkdir(parents=True)
    assert starts_with(tmp_path, from_checkpoint=True) == []
    (tmp_path / "journals" / "1" / "rollout-0").mkdir(parents=True)
    assert starts_with(tmp_path, from_checkpoint=True) == ["1"]  # of the start before, which is in the ledger
