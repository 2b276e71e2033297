"""The key of an SGLang server that a worker starts: nobody else on its host can speak with it.

Whoever can, can change its weights; and what it takes with requests is unpickled.
"""

import os
import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from flowrt.errors import EngineError

KEY_BYTES = 32
VARIABLE = "SGLANG_API_KEY"
"""The key of a server that somebody else has started, in the environment of the worker."""
KEYLESS = ("--config", "--api-key", "--admin-api-key", "--tokenizer-worker-num", "--grpc-port")
"""With one of these a server has a key already, or may have none."""


def given_key(environment: Mapping[str, str]) -> str:
    """The key of a server that is not ours; empty where it has none."""
    return environment.get(VARIABLE, "")


class KeyFile:
    """A new key for each start, told to the server in a file that only this account can read.

    As an argument it would stand in the list of processes.
    """

    def __init__(self, path: Path) -> None:
        self._path = path.with_suffix(".yaml")  # SGLang reads no others

    def arguments(self, others: Sequence[str]) -> tuple[str, list[str]]:
        """A key, and the arguments that tell the server of it; of another one, if its ``others`` speak of keys.

        Raises EngineError where it cannot be written down.
        """
        if any(one.partition("=")[0] in KEYLESS for one in others):
            return given_key(os.environ), []
        key = secrets.token_hex(KEY_BYTES)
        self.remove()
        try:
            with os.fdopen(os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                file.write(f"api-key: '{key}'\n")
        except OSError as error:
            raise EngineError(f"the key of an SGLang server cannot be written: {error}; make room there") from error
        return key, ["--config", str(self._path)]

    def remove(self) -> None:
        """It has been read, or never will be."""
        with suppress(FileNotFoundError):
            self._path.unlink()
