"""Ids that a message holds more than once travel once: what a grant leases, what its parts are of, what is on its way.

Where an encoder meets a long column of whole numbers again, the very same object, it writes its place among those that
came before, in an array of its own; the decoder hands out the same object again. What a few bytes can claim is bounded.
"""

from flowrt.wire.records import Ints

Said = list[Ints]
"""The columns of one message so far that may be repeated, in the order of its fields; a repeated one counts again."""
SHORT = 16
"""Of no fewer numbers: to pack fewer costs no more than to look for them."""
LONG = 16 * 1024
"""Of no more numbers, …"""
MOST = 64
"""… and only among so many columns: no message of a few bytes becomes more than a million numbers."""


def say(values: Ints, said: Said) -> tuple[int] | None:
    """What is written in place of these numbers; None when they have to be packed."""
    if not SHORT <= len(values) <= LONG or len(said) >= MOST:
        return None
    place = next((place for place, one in enumerate(said) if one is values), None)
    said.append(values)
    return None if place is None else (place,)


def heard(values: Ints, said: Said) -> Ints:
    """These were packed; they may be repeated."""
    if SHORT <= len(values) <= LONG and len(said) < MOST:
        said.append(values)
    return values


def repeated(raw: object, said: Said) -> Ints | None:
    """The numbers that were written as their place; None when this is no such place."""
    if type(raw) is not tuple or len(raw) != 1 or len(said) >= MOST:
        return None
    place = raw[0]
    if type(place) is not int or not 0 <= place < len(said):
        return None
    said.append(said[place])
    return said[place]
