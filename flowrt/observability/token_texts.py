"""The text of each token of a response, from the tokenizer of the run's model. Uses tokenizers, not torch.

A character may consist of several tokens. So the text of a token is what the decoded prefix gains by it, and the tokens
of a character have no text except the last one.
"""

import logging
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

log = logging.getLogger(__name__)
TOKENIZER = "tokenizer.json"
REPLACEMENT = "�"
"""Output of the decoder for bytes that are no complete character."""
CONTEXT = 8
"""Number of preceding tokens that are decoded with a token.

Some tokenizers write a space between words, but not before the first one.
"""


class TokenTexts:
    """Decodes responses of a run."""

    def __init__(self, directories: Sequence[Path]) -> None:
        """``directories``: candidates for the model; the first one with a tokenizer is used."""
        self._tokenizer = next(filter(None, map(_load, directories)), None)

    def of(self, ids: Sequence[int]) -> list[str] | None:
        """The text of each token; None without a tokenizer."""
        if self._tokenizer is None:
            return None
        texts = []
        start, end = 0, 0  # start of the context, and end of the tokens whose text is known
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
        known = [id_ for id_ in ids if id_ >= 0]
        return str(self._tokenizer.decode(known, skip_special_tokens=False)) if known else ""


def _load(directory: Path) -> Tokenizer | None:
    """The tokenizer in a model directory; None if there is none that can be read."""
    path = directory / TOKENIZER
    if not path.is_file():
        return None
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # noqa: BLE001 (the library raises Exception itself for a damaged file)
        log.warning("%s cannot be read: %s", path, error)
        return None
