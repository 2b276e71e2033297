"""Keys of an observer: from the command, the run, or the environment."""

from pathlib import Path

import pytest

from flowrt.launcher.observer import find_keys
from flowrt.net.curve_keys import KEYS_VARIABLE, write_keys
from flowrt.recipes.config_io import defaults, to_toml


@pytest.fixture
def keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv(KEYS_VARIABLE, raising=False)
    write_keys(tmp_path / "keys", [])
    return tmp_path / "keys"


def test_keys_of_a_run_are_read_whatever_version_wrote_its_configuration(tmp_path: Path, keys: Path) -> None:
    text = to_toml(defaults("arithmetic"))
    (tmp_path / "config.toml").write_text(f"{text}\n[of_another_version]\nkey = 1\n")
    assert find_keys("", tmp_path) is None
    (tmp_path / "config.toml").write_text(f'of_another_version = 1\n[controller]\nkeys = "{keys}"\n')
    assert find_keys("", tmp_path) == find_keys(str(keys), None) is not None
