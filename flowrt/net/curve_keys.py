"""CURVE keys in a directory: those of the controller and of the workers that it admits.

``flowrt keys DIR`` writes, as small TOML files:

- ``controller.key`` (0600): the controller's pair, ``public`` and ``secret``. Stays with the controller.
- ``controller.pub``: its public key. Needed by every worker.
- ``NAME.key`` (0600): a worker's pair. A worker takes the one with its name, else ``worker.key``, else the only one.
- ``workers.toml``: names and public keys of the admitted workers. Removing a line revokes that key.
"""

import os
import re
import stat
import struct
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import zmq
from zmq.utils import z85

from flowrt.errors import ConfigError

KEYS_VARIABLE = "FLOWRT_KEYS"
CONTROLLER = "controller"
ANY_WORKER = "worker"
PUBLIC = "controller.pub"
ADMITTED = "workers.toml"
_KEY_CHARACTERS = 40
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")


@dataclass(frozen=True, slots=True)
class Pair:
    """A CURVE key pair, each key as 40 characters of Z85."""

    public: str
    secret: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class ControllerKeys:
    """Keys of a controller: its own pair, and the names of admitted workers by their public keys (32 bytes)."""

    own: Pair
    admitted: dict[bytes, str]


@dataclass(frozen=True, slots=True)
class WorkerKeys:
    """Keys of a worker: its own pair, and the public key of its controller."""

    own: Pair
    controller: str
    path: Path  # the file of its own pair, for error messages


def write_keys(directory: Path, workers: Sequence[str]) -> None:
    """Generate a pair for the controller and one for each worker.

    Args:
        directory: a new or empty directory.
        workers: names of workers; empty for one pair that all workers share.

    Raises:
        ConfigError: a name is invalid or occurs twice, or the directory is not empty or cannot be written. Nothing is
            overwritten.
    """
    names = list(workers) or [ANY_WORKER]
    for name in names:
        if not _NAME.fullmatch(name) or name == CONTROLLER:
            raise ConfigError(f"a key cannot be named {name!r}; use letters, digits, '.', '_' and '-'")
    if len(set(names)) < len(names):
        raise ConfigError(f"a key is named twice in {', '.join(names)}; name each once")
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ConfigError(
            f"{directory} is not an empty directory, and keys are never overwritten; name a new directory"
        )
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        directory.chmod(0o700)
        pairs = {name: _new_pair() for name in [CONTROLLER, *names]}
        for name, pair in pairs.items():
            _write(directory / f"{name}.key", f'public = "{pair.public}"\nsecret = "{pair.secret}"\n')
        _write(directory / PUBLIC, f'public = "{pairs[CONTROLLER].public}"\n')
        admitted = "".join(f'"{name}" = "{pairs[name].public}"\n' for name in names)
        _write(directory / ADMITTED, f"# Admitted workers: name and public key.\n{admitted}")
    except OSError as error:
        raise ConfigError(f"keys cannot be written to {directory}: {error.strerror}; name another directory") from error


def controller_keys(directory: Path) -> ControllerKeys:
    """The keys of the controller. Raises ConfigError if they are missing or invalid, or no worker is admitted."""
    admitted = _table(directory / ADMITTED)
    keys = {raw_key(_text(admitted, name, directory / ADMITTED), directory / ADMITTED): name for name in admitted}
    if not keys:
        raise ConfigError(f"{directory / ADMITTED} lists no key, so no worker could connect; add a line NAME = KEY")
    return ControllerKeys(_pair(directory / f"{CONTROLLER}.key"), keys)


def worker_keys(directory: Path, worker: str) -> WorkerKeys:
    """The keys of a worker.

    Raises ConfigError if a file is missing or invalid, or if the directory has neither ``WORKER.key`` nor
    ``worker.key`` nor exactly one other pair of a worker.
    """
    public = directory / PUBLIC
    server = _text(_table(public), "public", public)
    raw_key(server, public)
    path = _own(directory, worker)
    return WorkerKeys(_pair(path), server, path)


def raw_key(text: str, path: Path) -> bytes:
    """The 32 bytes of a key in Z85. Raises ConfigError, which names the file, when it is not a key."""
    try:
        if len(text) == _KEY_CHARACTERS:
            return z85.decode(text)
    except (KeyError, ValueError, struct.error):
        pass
    raise ConfigError(
        f"{path} holds no CURVE key: one is {_KEY_CHARACTERS} characters of Z85; make some with flowrt keys"
    )


def _own(directory: Path, worker: str) -> Path:
    for name in (worker, ANY_WORKER):
        path = directory / f"{name}.key"
        # The name comes from the command line: it must not name a file outside the directory, nor the controller's key.
        if _NAME.fullmatch(name) and name != CONTROLLER and path.is_file():
            return path
    others = [path for path in sorted(directory.glob("*.key")) if path.stem != CONTROLLER]
    if len(others) == 1:
        return others[0]
    names = ", ".join(path.name for path in others) or "none"
    raise ConfigError(f"keys {directory} has no key for {worker} (there is {names}); copy one to {worker}.key there")


def _pair(path: Path) -> Pair:
    table = _table(path)
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & 0o077:
        raise ConfigError(f"{path} can be read by others (mode {mode:04o}); make new keys, or chmod 600 it")
    pair = Pair(_text(table, "public", path), _text(table, "secret", path))
    raw_key(pair.public, path)
    raw_key(pair.secret, path)
    return pair


def _new_pair() -> Pair:
    public, secret = zmq.curve_keypair()
    return Pair(public.decode(), secret.decode())


def _text(table: dict[str, object], name: str, path: Path) -> str:
    value = table.get(name)
    if not isinstance(value, str):
        raise ConfigError(f"{path} has no text for {name!r}; make new keys with flowrt keys")
    return value


def _table(path: Path) -> dict[str, object]:
    try:
        return tomllib.loads(path.read_text())
    except OSError as error:
        raise ConfigError(
            f"key file {path} cannot be read ({error.strerror}); flowrt keys DIR writes a complete directory"
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError):
        raise ConfigError(f"key file {path} is not TOML; make new keys with flowrt keys") from None


def _write(path: Path, text: str) -> None:
    """Write a new file that only its owner can read, from the moment it exists."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
