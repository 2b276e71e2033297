"""Where the controller of a run is: it writes its address into the run directory."""

from pathlib import Path

from flowrt.errors import ConfigError

ADDRESS = "address"


def write_address(run_dir: Path, address: str) -> None:
    """Say where this controller listens; a file that only its owner can read."""
    aside = run_dir / f".{ADDRESS}.part"
    aside.touch(mode=0o600)
    aside.write_text(address + "\n")
    aside.rename(run_dir / ADDRESS)


def address_of(run_dir: Path) -> str:
    """Where the controller of this run listens, or did. Raises ConfigError when none has begun."""
    path = run_dir / ADDRESS
    if not path.is_file():
        raise ConfigError(f"{run_dir} has no file {ADDRESS!r}: is it a run directory, and has its controller begun?")
    return path.read_text().strip()
