"""The sdist and the wheel contain the package as it is in the repository."""

import tarfile
import zipfile
from pathlib import Path

import pytest
from common.distributions import build, tracked


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return build(tmp_path_factory.mktemp("distributions"))


def test_the_wheel_contains_every_file_of_the_package_and_no_other(built: tuple[Path, Path]) -> None:
    names = zipfile.ZipFile(built[1]).namelist()
    assert sorted(name for name in names if ".dist-info/" not in name) == sorted(tracked("flowrt"))
    assert [name for name in names if name.endswith("/licenses/LICENSE")]


def test_the_sdist_contains_package_scripts_examples_and_documents(built: tuple[Path, Path]) -> None:
    with tarfile.open(built[0]) as archive:
        names = {member.name.partition("/")[2] for member in archive if member.isfile()}
    wanted = tracked("flowrt", "workers", "launch", "examples", "docs", "pyproject.toml", "README.md", "LICENSE")
    assert set(wanted) - names == set()
