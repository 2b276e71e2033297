"""The prompts that were opened for training: no source may offer one of them again, unless it is unread again.

A bitmap for each epoch: a million consecutive prompts take 2 MB, prompts far apart (hashes) 100 bytes each.
"""

from collections import defaultdict
from collections.abc import Iterable

from flowrt.protocol.messages import WORD_BITS


class OpenedPrompts:
    """Pairs of epoch and prompt that are live, trained or dropped."""

    def __init__(self) -> None:
        self._words: defaultdict[int, dict[int, int]] = defaultdict(dict)

    def add(self, epoch: int, prompts: Iterable[int]) -> None:
        """Add prompts of an epoch."""
        words = self._words[epoch]
        for prompt in prompts:
            word, bit = divmod(prompt, WORD_BITS)
            words[word] = words.get(word, 0) | 1 << bit

    def discard(self, epoch: int, prompt: int) -> None:
        """Remove a prompt that is unread again."""
        word, bit = divmod(prompt, WORD_BITS)
        words = self._words[epoch]
        if left := words.get(word, 0) & ~(1 << bit):
            words[word] = left
        else:
            words.pop(word, None)

    def among(self, epoch: int, prompts: Iterable[int]) -> list[int]:
        """Those of these prompts that are opened, ascending."""
        words = self._words.get(epoch)
        if not words:
            return []
        places = ((prompt, *divmod(prompt, WORD_BITS)) for prompt in prompts)
        return sorted(prompt for prompt, word, bit in places if words.get(word, 0) >> bit & 1)
