"""Damage to the files of a run between the end of all its processes and `flowrt resume`."""

import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

NOISE_BYTES = 600
FLIPPED_BYTES = 50
TAIL_BYTES = 300
Act = Callable[[Path, random.Random], None]
"""Damages a file or directory."""


@dataclass(frozen=True, slots=True)
class Damage:
    """Damage to the path ``where`` of a run directory.

    ``resumes``: `flowrt resume` has to complete the run (True), has to refuse it (False), or may do either (None). A
    refusal is one sentence, and the run can be resumed after the repair.
    """

    where: str
    act: Act
    resumes: bool | None = None

    def names(self, sentence: str) -> bool:
        """Whether the sentence names the damaged path; for the log of the ledger, the ledger."""
        name = "/step-" if self.where == NEWEST else "/ledger.sqlite" if self.where == LOG else f"/{self.where}"
        return name in sentence


def _cut_half(path: Path, _rng: random.Random) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def _empty(path: Path, _rng: random.Random) -> None:
    path.write_bytes(b"")


def _delete(path: Path, _rng: random.Random) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()


def _noise(path: Path, rng: random.Random) -> None:
    path.write_bytes(rng.randbytes(max(NOISE_BYTES, path.stat().st_size if path.exists() else 0)))


def _cut_tail(path: Path, _rng: random.Random) -> None:
    path.write_bytes(path.read_bytes()[:-TAIL_BYTES])


def _noise_in_the_middle(path: Path, rng: random.Random) -> None:
    data = bytearray(path.read_bytes())
    at = len(data) // 2
    data[at : at + NOISE_BYTES] = rng.randbytes(min(NOISE_BYTES, len(data) - at))
    path.write_bytes(data)


def _noise_at_the_start(path: Path, rng: random.Random) -> None:
    data = bytearray(path.read_bytes())
    data[:FLIPPED_BYTES] = rng.randbytes(FLIPPED_BYTES)
    path.write_bytes(data)


def _write(text: str) -> Act:
    def act(path: Path, _rng: random.Random) -> None:
        path.write_text(text)

    return act


def _first_line_twice(path: Path, _rng: random.Random) -> None:
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*lines[:1], *lines]))


def _no_second_line(path: Path, _rng: random.Random) -> None:
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*lines[:1], *lines[2:]]))


def _half_a_last_line(path: Path, _rng: random.Random) -> None:
    path.write_bytes(path.read_bytes()[:-10])


def _first_line(text: str) -> Act:
    def act(path: Path, _rng: random.Random) -> None:
        lines = path.read_text().splitlines(keepends=True)
        path.write_text("".join([text + "\n", *lines[1:]]))

    return act


def _largest(directory: Path) -> Path:
    return max((path for path in directory.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)


def _in_largest(act: Act) -> Act:
    """Damage the largest file of a directory: of a checkpoint, the weights or the optimiser's moments."""
    return lambda path, rng: act(_largest(path), rng)


def _flip(path: Path, rng: random.Random) -> None:
    """Change bytes in the last half, so that headers stay valid."""
    data = bytearray(path.read_bytes())
    for _ in range(FLIPPED_BYTES):
        data[rng.randrange(len(data) // 2, len(data))] ^= rng.randrange(1, 256)
    path.write_bytes(data)


def _empty_directory(path: Path, _rng: random.Random) -> None:
    shutil.rmtree(path)
    path.mkdir()


def _become_a_file(path: Path, _rng: random.Random) -> None:
    shutil.rmtree(path)
    path.write_bytes(b"")


def _become_a_directory(path: Path, _rng: random.Random) -> None:
    path.unlink(missing_ok=True)
    path.mkdir()


NEWEST = "checkpoints/newest"
LEDGER, LOG = "ledger.sqlite", "ledger.sqlite-wal"
DAMAGES = {
    "metrics cut in half": Damage("metrics.jsonl", _cut_half),
    "metrics empty": Damage("metrics.jsonl", _empty),
    "metrics deleted": Damage("metrics.jsonl", _delete),
    "metrics noise": Damage("metrics.jsonl", _noise),
    "metrics first line twice": Damage("metrics.jsonl", _first_line_twice),
    "metrics without a line": Damage("metrics.jsonl", _no_second_line),
    "metrics half a last line": Damage("metrics.jsonl", _half_a_last_line),
    "metrics a line {}": Damage("metrics.jsonl", _first_line("{}")),
    "metrics a line [1,2]": Damage("metrics.jsonl", _first_line("[1,2]")),
    "summary empty": Damage("summary.json", _write("")),
    "summary half": Damage("summary.json", _write('{"steps": 8, "exit_co')),
    "summary {}": Damage("summary.json", _write("{}")),
    "summary []": Damage("summary.json", _write("[]")),
    "summary noise": Damage("summary.json", _noise),
    "timeline noise": Damage("timeline/0001.jsonl.gz", _noise, resumes=True),
    "timeline cut in half": Damage("timeline/0001.jsonl.gz", _cut_half, resumes=True),
    "attribution noise": Damage("attribution.jsonl", _noise, resumes=True),
    "timeline deleted": Damage("timeline", _delete, resumes=True),
    "newest checkpoint deleted": Damage(NEWEST, _delete, resumes=True),
    "newest checkpoint empty": Damage(NEWEST, _empty_directory),
    "newest checkpoint a file": Damage(NEWEST, _become_a_file),
    "newest checkpoint cut": Damage(NEWEST, _in_largest(_cut_half)),
    "newest checkpoint without its largest file": Damage(NEWEST, _in_largest(_delete)),
    "newest checkpoint flipped": Damage(NEWEST, _in_largest(_flip)),
    "ledger deleted": Damage(LEDGER, _delete),
    "ledger empty": Damage(LEDGER, _empty),
    "ledger cut in half": Damage(LEDGER, _cut_half),
    "ledger noise": Damage(LEDGER, _noise),
    "ledger header noise": Damage(LEDGER, _noise_at_the_start),
    "log tail cut": Damage(LOG, _cut_tail, resumes=True),
    "log deleted": Damage(LOG, _delete),
    "log empty": Damage(LOG, _empty),
    "log noise in the middle": Damage(LOG, _noise_in_the_middle),
    "config half": Damage("config.toml", _cut_half, resumes=False),
    "config empty": Damage("config.toml", _empty, resumes=False),
    "config noise": Damage("config.toml", _noise, resumes=False),
    "address noise": Damage("address", _noise, resumes=True),
    "address deleted": Damage("address", _delete, resumes=True),
    "lock a directory": Damage(".lock", _become_a_directory, resumes=False),
}


class Damaged:
    """A damaged run directory with a copy of its original files; ``done`` is false if there was nothing to damage."""

    def __init__(self, run_dir: Path, name: str, seed: int, aside: Path) -> None:
        self.damage = DAMAGES[name]
        self._run_dir = run_dir
        self._copy = aside
        shutil.copytree(run_dir, aside, symlinks=True)
        self.newest = max(
            (int(path.name.removeprefix("step-")) for path in (run_dir / "checkpoints").glob("step-*")), default=0
        )
        self._target = self.damage.where
        if self._target == NEWEST:
            self._target = f"checkpoints/step-{self.newest:06}"
        path = run_dir / self._target
        self.done = path.exists() or self.damage.where in ("summary.json", ".lock")
        if self.done:
            self.damage.act(path, random.Random(f"damage {seed}"))
        self._before = self._contents()

    def changed(self) -> list[str]:
        """Files that changed since the damage, except logs, the lock and the -shm file of the ledger."""
        now = self._contents()
        return sorted(name for name in now.keys() | self._before.keys() if now.get(name) != self._before.get(name))

    def repair(self) -> None:
        """Restore the damaged path from the copy."""
        names = [LEDGER, LOG, f"{LEDGER}-shm"] if self._target in (LEDGER, LOG) else [self._target]
        for name in names:
            path, kept = self._run_dir / name, self._copy / name
            if path.is_dir():
                shutil.rmtree(path)
            path.unlink(missing_ok=True)
            if kept.is_dir():
                shutil.copytree(kept, path)
            elif kept.exists():
                shutil.copy2(kept, path)

    def _contents(self) -> dict[str, bytes]:
        files = (path for path in self._run_dir.rglob("*") if path.is_file())
        names = {path.relative_to(self._run_dir): path for path in files}
        return {
            str(name): path.read_bytes()
            for name, path in names.items()
            if name.parts[0] not in ("logs", ".lock", f"{LEDGER}-shm")
        }
