"""Which prompts of which epochs a run is done with: as sets of numbers, and packed one bit a prompt.

A run of a million prompts that is resumed sends its source 130 kB, and not eight megabytes of numbers.
"""

from collections import defaultdict
from collections.abc import Iterable

from flowrt.errors import RemoteProtocolError
from flowrt.wire.records import Passed

WORD_BITS = 62
"""Prompts in a word: bit i of word w is prompt w x WORD_BITS + i. (Words travel as signed numbers of 64 bits.)"""


def pack(pairs: Iterable[tuple[int, int]]) -> tuple[Passed, ...]:
    """(epoch, prompt) pairs, packed; prompts count from 0."""
    bits: dict[int, dict[int, int]] = defaultdict(lambda: defaultdict(int))
    for epoch, prompt in pairs:
        word, bit = divmod(prompt, WORD_BITS)
        bits[epoch][word] |= 1 << bit
    return tuple(
        Passed(epoch, tuple(words.get(at, 0) for at in range(max(words) + 1))) for epoch, words in sorted(bits.items())
    )


def unpack(passed: Iterable[Passed]) -> dict[int, frozenset[int]]:
    """The prompts of each epoch. Raises RemoteProtocolError for words that `pack` does not make."""
    found: dict[int, frozenset[int]] = {}
    for one in passed:
        if any(not 0 <= word < 1 << WORD_BITS for word in one.words):
            raise RemoteProtocolError(f"the prompts of epoch {one.epoch} are not packed {WORD_BITS} a word")
        found[one.epoch] = frozenset(
            at * WORD_BITS + bit for at, word in enumerate(one.words) for bit in range(WORD_BITS) if word >> bit & 1
        )
    return found
