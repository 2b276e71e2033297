"""Mistakes in a data set: collected, and reported together."""

from flowrt.errors import ConfigError

MOST = 10


class Mistakes:
    """The first mistakes of a data set."""

    def __init__(self) -> None:
        self._found: list[str] = []

    def add(self, error: ConfigError) -> None:
        """Keep a mistake. Raises ConfigError with all of them when there are ten."""
        self._found.append(str(error))
        if len(self._found) == MOST:
            self.report()

    def report(self) -> None:
        """Raise ConfigError with all mistakes, if there are any."""
        if len(self._found) == 1:
            raise ConfigError(self._found[0])
        if self._found:
            least = "at least " if len(self._found) == MOST else ""
            raise ConfigError(f"{least}{len(self._found)} mistakes in the data: {'; '.join(self._found)}")
