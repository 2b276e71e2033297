"""Why what was received is no record."""


class Misfit(Exception):
    """What was received does not fit; the path grows as it is passed outwards."""

    def __init__(self, expected: str) -> None:
        super().__init__(expected)
        self.expected = expected
        self.path = ""

    def within(self, step: str) -> "Misfit":
        self.path = step + self.path
        return self
