"""Parser of command lines whose errors are one sentence."""

import argparse
from typing import Any, NoReturn

from flowrt.errors import ConfigError


class Parser(argparse.ArgumentParser):
    """An argparse parser that raises ConfigError for errors and accepts no abbreviated flags."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        shown = "".join(
            character if character.isprintable() else character.encode("unicode_escape").decode()
            for character in message
        )
        raise ConfigError(f"{shown}; {self.prog} --help lists the arguments")
