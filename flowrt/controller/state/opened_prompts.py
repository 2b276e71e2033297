"""The prompts that were opened for training: no source may offer one of them again, unless it is unread again.

A bitmap for each epoch: a million consecutive prompts take 2 MB, prompts far apart (hashes) 100 bytes each. Only the
last `MAX_EPOCHS` in which a prompt, or one of its neighbours in the bitmap, was opened are kept: in all earlier ones
the prompt counts as opened, so memory does not grow with the epochs.
"""

from bisect import insort
from collections import defaultdict
from collections.abc import Iterable

from flowrt.protocol.messages import WORD_BITS

MAX_EPOCHS = 8


class OpenedPrompts:
    """Pairs of epoch and prompt that are live, trained or dropped."""

    def __init__(self) -> None:
        self._words: defaultdict[int, dict[int, int]] = defaultdict(dict)  # bits by epoch and word
        self._epochs: dict[int, list[int]] = {}  # the epochs that are kept of a word, ascending
        self._closed: dict[int, int] = {}  # the last epoch that is not kept of a word
        self._unread: dict[tuple[int, int], None] = {}  # (epoch, prompt) of such an epoch that is not opened

    def add(self, epoch: int, prompts: Iterable[int]) -> None:
        """Add prompts of an epoch."""
        words = self._words[epoch]
        for prompt in prompts:
            word, bit = divmod(prompt, WORD_BITS)
            if word not in words:
                if epoch <= self._closed.get(word, -1):
                    self._unread.pop((epoch, prompt), None)
                    continue
                if not self._begin(word, epoch):
                    continue
            words[word] = words.get(word, 0) | 1 << bit
        if not words:
            del self._words[epoch]

    def _begin(self, word: int, epoch: int) -> bool:
        """Keep an epoch of a word, in place of the oldest one if there are too many; returns whether it is kept."""
        epochs = self._epochs.setdefault(word, [])
        insort(epochs, epoch)
        if len(epochs) <= MAX_EPOCHS:
            return True
        oldest = self._closed[word] = epochs.pop(0)
        if oldest == epoch:
            return False
        words = self._words[oldest]
        del words[word]
        if not words:
            del self._words[oldest]
        return True

    def discard(self, epoch: int, prompt: int) -> None:
        """Remove a prompt that is unread again."""
        word, bit = divmod(prompt, WORD_BITS)
        if epoch <= self._closed.get(word, -1):
            self._unread[epoch, prompt] = None
        elif (words := self._words.get(epoch)) is not None and word in words:
            words[word] &= ~(1 << bit)

    def among(self, epoch: int, prompts: Iterable[int]) -> list[int]:
        """Those of these prompts that are opened, ascending."""
        return sorted(prompt for prompt in prompts if self._is_opened(epoch, prompt))

    def _is_opened(self, epoch: int, prompt: int) -> bool:
        word, bit = divmod(prompt, WORD_BITS)
        words = self._words.get(epoch)
        if words is not None and word in words:
            return bool(words[word] >> bit & 1)
        return epoch <= self._closed.get(word, -1) and (epoch, prompt) not in self._unread
