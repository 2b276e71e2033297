"""What workers count under names and reasons of their own: any they like, but not ever new ones, and none too long.

All of it is told to observers twice a second.
"""

from collections.abc import Iterable, Mapping

MOST = 256
LONGEST = 500
OTHERS = "other reasons"


class Tally(dict[str, int]):
    """How often for which reason; those beyond the first few hundred count together."""

    def count(self, reason: str, times: int = 1) -> None:
        reason = reason[:LONGEST]
        if reason not in self and len(self) >= MOST:
            reason = OTHERS
        self[reason] = self.get(reason, 0) + times


def unfit(numbers: Iterable[tuple[str, float]], known: Mapping[str, float]) -> str:
    """What speaks against numbers under these names, beside those that are known already; empty when all is well."""
    names = {name for name, _ in numbers}
    if len(names | known.keys()) > MOST:
        return f"{len(names | known.keys())} numbers under different names are more than {MOST}; name fewer"
    longest = max(map(len, names), default=0)
    return f"a number's name has {longest} characters, over the limit of {LONGEST}" if longest > LONGEST else ""
