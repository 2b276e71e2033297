"""The text of each token of a response, from the tokenizer of the run's model. No torch: tokenizers alone.

A character may consist of several tokens, so single tokens have no text of their own: each is given what the decoded
prefix gains by it, and tokens within a character are given nothing until its last.
"""

import logging
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

log = logging.getLogger(__name__)
TOKENIZER = "tokenizer.json"
REPLACEMENT = "�"
"""What the decoder puts for bytes that are no whole character."""
CONTEXT = 8
"""Tokens before a token that are decoded with it: some tokenizers write a space between words, but not before the
first."""


class TokenTexts:
    """Decodes responses of a run."""

    def __init__(self, directories: Sequence[Path]) -> None:
        """``directories``: of the model, the first that has a tokenizer counts; without any there are no texts."""
        self._tokenizer = next(filter(None, map(_load, directories)), None)

    def of(self, ids: Sequence[int]) -> list[str] | None:
        """The text of each token; None without a tokenizer."""
        if self._tokenizer is None:
            return None
        texts = []
        start, end = 0, 0  # the tokens of the context, and those whose text is given
        for at in range(len(ids)):
            before = self._decode(ids[start:end])
            now = self._decode(ids[start : at + 1])
            if now.endswith(REPLACEMENT) and at + 1 < len(ids) and at - end < CONTEXT:
                texts.append("")
                continue
            texts.append(now[len(before) :])
            end = at + 1
            start = max(end - CONTEXT, start)
        return texts

    def _decode(self, ids: Sequence[int]) -> str:
        assert self._tokenizer is not None
        known = [one for one in ids if one >= 0]
        return str(self._tokenizer.decode(known, skip_special_tokens=False)) if known else ""


def _load(directory: Path) -> Tokenizer | None:
    """The tokenizer of a model; None if it has none that can be read."""
    path = directory / TOKENIZER
    if not path.is_file():
        return None
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # noqa: BLE001 (the library raises Exception itself for a damaged file)
        log.warning("%s cannot be read: %s", path, error)
        return None
