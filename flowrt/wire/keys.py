"""CURVE keys in a directory: who the controller is, and whom it lets in.

``flowrt keys DIR`` writes, as small TOML files:

- ``controller.key`` (0600): the controller's pair, ``public`` and ``secret``. Stays with the controller.
- ``controller.pub``: its public half. Goes to every worker.
- ``NAME.key`` (0600): a worker's pair. A worker takes the one with its name, else ``worker.key``, else the only one.
- ``workers.toml``: names and public keys of all that may come in. A line that is taken out is a key that is revoked.
"""

import os
import re
import stat
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from flowrt.errors import ConfigError

KEYS_VARIABLE = "FLOWRT_KEYS"
CONTROLLER, ANY_WORKER, PUBLIC, ADMITTED = "controller", "worker", "controller.pub", "workers.toml"
_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"
_VALUE = {digit: value for value, digit in enumerate(_DIGITS)}
_KEY_CHARACTERS, _KEY_BYTES = 40, 32
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")


@dataclass(frozen=True, slots=True)
class Pair:
    """A CURVE key pair, each half 40 characters of Z85."""

    public: str
    secret: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class ControllerKeys:
    """What a controller needs: its own pair, and the public keys that it lets in, as bytes, with their names."""

    own: Pair
    admitted: dict[bytes, str]


@dataclass(frozen=True, slots=True)
class WorkerKeys:
    """What a worker needs: its own pair, and the public key of the one controller that it speaks to."""

    own: Pair
    controller: str
    path: Path  # of its own pair, for errors


def write_keys(directory: Path, workers: Sequence[str], make: Callable[[], Pair]) -> None:
    """Make a controller's pair and one for each worker. Raises ConfigError, with nothing written, when some exist."""
    names = list(workers) or [ANY_WORKER]
    for name in names:
        if not _NAME.fullmatch(name) or name == CONTROLLER:
            raise ConfigError(f"a key cannot be named {name!r}; use letters, digits, '.', '_' and '-'")
    if len(set(names)) < len(names):
        raise ConfigError(f"a key is named twice in {', '.join(names)}; name each once")
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ConfigError(f"{directory} already holds something, and keys are never overwritten; name a new directory")
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        directory.chmod(0o700)
        pairs = {name: make() for name in [CONTROLLER, *names]}
        for name, pair in pairs.items():
            _write(directory / f"{name}.key", f'public = "{pair.public}"\nsecret = "{pair.secret}"\n')
        _write(directory / PUBLIC, f'public = "{pairs[CONTROLLER].public}"\n')
        admitted = "".join(f'"{name}" = "{pairs[name].public}"\n' for name in names)
        _write(directory / ADMITTED, f"# Who may come in: name and public key.\n{admitted}")
    except OSError as error:
        raise ConfigError(f"keys cannot be written to {directory}: {error.strerror}; name another directory") from error


def controller_keys(directory: Path) -> ControllerKeys:
    """Raises ConfigError when the directory is not what `write_keys` leaves behind."""
    admitted = _table(directory / ADMITTED)
    keys = {raw_key(_text(admitted, name, directory / ADMITTED), directory / ADMITTED): name for name in admitted}
    if not keys:
        raise ConfigError(f"{directory / ADMITTED} lists no key, so nobody could come in; add a line NAME = KEY")
    return ControllerKeys(_pair(directory / f"{CONTROLLER}.key"), keys)


def worker_keys(directory: Path, worker: str) -> WorkerKeys:
    """The keys of this worker. Raises ConfigError when it has none in the directory, or more than one."""
    public = directory / PUBLIC
    server = _text(_table(public), "public", public)
    raw_key(server, public)
    path = _own(directory, worker)
    return WorkerKeys(_pair(path), server, path)


def raw_key(text: str, path: Path) -> bytes:
    """The 32 bytes of a key in Z85. Raises ConfigError naming the file when it is none."""
    groups = [text[at : at + 5] for at in range(0, len(text), 5)]
    if len(text) == _KEY_CHARACTERS and all(character in _VALUE for character in text):
        numbers = [sum(_VALUE[one] * 85 ** (4 - place) for place, one in enumerate(group)) for group in groups]
        if max(numbers) < 2**32:
            return b"".join(number.to_bytes(4, "big") for number in numbers)
    raise ConfigError(
        f"{path} holds no CURVE key: one is {_KEY_CHARACTERS} characters of Z85; make some with flowrt keys"
    )


def _own(directory: Path, worker: str) -> Path:
    for name in (worker, ANY_WORKER):
        path = directory / f"{name}.key"
        # A worker's name comes from the command line: it must not lead out of the directory, nor to the controller's.
        if _NAME.fullmatch(name) and name != CONTROLLER and path.is_file():
            return path
    others = [path for path in sorted(directory.glob("*.key")) if path.stem != CONTROLLER]
    if len(others) == 1:
        return others[0]
    found = ", ".join(path.name for path in others) or "none"
    raise ConfigError(f"keys {directory} has no key for {worker} (there is {found}); copy one to {worker}.key there")


def _pair(path: Path) -> Pair:
    table = _table(path)
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & 0o077:
        raise ConfigError(f"{path} can be read by others (mode {mode:04o}); make new keys, or chmod 600 it")
    public, secret = (_text(table, name, path) for name in ("public", "secret"))
    raw_key(public, path), raw_key(secret, path)
    return Pair(public, secret)


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
            f"key file {path} cannot be read ({error.strerror}); flowrt keys DIR makes a whole directory of them"
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError):
        raise ConfigError(f"key file {path} is no TOML; make new keys with flowrt keys") from None


def _write(path: Path, text: str) -> None:
    """A new file that only its owner can read, from its first byte on."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
