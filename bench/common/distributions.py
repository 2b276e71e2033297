"""The sdist of this checkout, and the wheel that is built from it."""

import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
BUILD_S = 120.0


def tracked(*below: str) -> list[str]:
    """The files of the checkout below these paths, those that git does not know yet included."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--deduplicate", "--", *below]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True, timeout=BUILD_S)
    return [name for name in listed.stdout.splitlines() if (ROOT / name).is_file()]


def build(target: Path) -> tuple[Path, Path]:
    """The paths of the sdist and the wheel, written to ``target``. Raises RuntimeError if a build fails."""
    target.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        tree = (
            Path(folder) / "tree"
        )  # a copy: a build leaves files in its directory, and takes up those of earlier ones
        for name in tracked():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            (tree / name).write_bytes((ROOT / name).read_bytes())
        sdist = _built("sdist", tree, target)
        with tarfile.open(sdist) as archive:
            archive.extractall(folder, filter="data")
        return sdist, _built("wheel", Path(folder) / sdist.name.removesuffix(".tar.gz"), target)


def _built(kind: str, tree: Path, target: Path) -> Path:
    code = f"import sys; from setuptools.build_meta import build_{kind} as build; print(build(sys.argv[1]))"
    command = [sys.executable, "-c", code, str(target)]
    ended = subprocess.run(command, cwd=tree, capture_output=True, text=True, timeout=BUILD_S)
    if ended.returncode:
        raise RuntimeError(f"the {kind} cannot be built: {ended.stderr[-2000:]}")
    return target / ended.stdout.splitlines()[-1]
