"""When a sequence ends: at a stop token, at a stop string, or at the length limit.

- The stop tokens of a checkpoint are those of its tokenizer, of generation_config.json, of config.json and the end of
  turn of its chat template together: a chat model often ends its turn with a token other than its tokenizer's end
  token.
- A stop string ends a sequence with the token that completes it in the decoded text. No token is removed.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import GenerationConfig

from flowrt.engines.hf import load_config, load_tokenizer, reading
from flowrt.engines.options import CUT_CHARACTER
from flowrt.engines.prompts import end_of_turn_ids, template_text
from flowrt.errors import EngineError


def stop_token_ids(
    path: str | os.PathLike[str], tokenizer: Any = None, chat_template: str | Sequence[str] = ""
) -> tuple[int, ...]:
    """The token ids that end a sequence of a checkpoint, ascending.

    Args:
        path: directory of the checkpoint.
        tokenizer: tokenizer of the checkpoint; None: it is loaded.
        chat_template: the template whose end of turn is a stop token too: "none", a path of a Jinja file, or empty or
            "chat" for the checkpoint's own, if it has one; or several of them.

    Raises EngineError if a file of the checkpoint cannot be read, the tokenizer has no end token, or an id is not a
    number; ConfigError if the chat template cannot be read.
    """
    tokenizer = load_tokenizer(path) if tokenizer is None else tokenizer
    sources = {
        "the tokenizer": tokenizer.eos_token_id,
        "config.json": getattr(load_config(path).get_text_config(), "eos_token_id", None),
    }
    if (Path(path) / "generation_config.json").is_file():
        with reading(path, "has no generation_config.json"):
            generation = GenerationConfig.from_pretrained(path, local_files_only=True)
        sources["generation_config.json"] = generation.eos_token_id
    stop_ids: set[int] = set()
    for name, value in sources.items():
        ids = value if isinstance(value, list | tuple) else [] if value is None else [value]
        if not all(type(id_) is int and id_ >= 0 for id_ in ids):
            raise EngineError(f"{name} of {path} has eos_token_id {value!r:.80}; make it a token id, or a list of them")
        stop_ids.update(ids)
    for template in [chat_template] if isinstance(chat_template, str) else chat_template:
        for text in {template_text(tokenizer, template, with_tools=with_tools) for with_tools in (False, True)}:
            stop_ids.update(end_of_turn_ids(tokenizer, text))
    return tuple(sorted(stop_ids))


@dataclass(frozen=True, slots=True)
class StopConditions:
    """Conditions that end a sequence before the length limit.

    Attributes:
        token_ids: a sequence ends with one of these tokens.
        strings: a sequence ends when its decoded response contains one of these.
        tokenizer: decodes responses; needed with ``strings``.
    """

    token_ids: tuple[int, ...] = ()
    strings: tuple[str, ...] = ()
    tokenizer: Any = None

    @classmethod
    def of(
        cls,
        path: str | os.PathLike[str],
        strings: Sequence[str] = (),
        chat_template: str | Sequence[str] = "",
    ) -> "StopConditions":
        """The stop tokens of a checkpoint and of chat templates, and these strings.

        Arguments and errors are those of `stop_token_ids`.
        """
        tokenizer = load_tokenizer(path)
        return cls(stop_token_ids(path, tokenizer, chat_template), tuple(strings), tokenizer)

    def complete_string(self, tokens: Sequence[int]) -> bool:
        """Whether the last of these response tokens completes a stop string.

        The text of the earlier tokens must not contain one. Decodes the last tokens only, however many there are.
        """
        return self._completes_string(tokens, len(tokens))

    def end_of(self, tokens: Sequence[int], begin: int = 0) -> int | None:
        """Number of response tokens after which the sequence ends; None if nothing ends it.

        ``begin``: number of first tokens of which none ends the sequence.
        """
        ids = set(self.token_ids)
        # One by one: a token may change the text of those before it, so a longer text need not contain the string.
        counts = range(begin + 1, len(tokens) + 1)
        return next((end for end in counts if tokens[end - 1] in ids or self._completes_string(tokens, end)), None)

    def _completes_string(self, tokens: Sequence[int], end: int) -> bool:
        return bool(self.strings and end) and self._has_string(tokens[self._begin_of_text(tokens, end - 1) : end])

    def _begin_of_text(self, tokens: Sequence[int], end: int) -> int:
        """Index of a token before any stop string that a token after the first ``end`` ones completes."""
        # A token stands for at least one byte; one more, because tokenizers may drop a space before the first one.
        count = max(len(string.encode()) for string in self.strings) + 1
        longest = max(map(len, self.strings))
        # Fewer characters: some tokens have no text, such as ids that a tokenizer does not have.
        while count < end and len(self._decoded(tokens[end - count : end]).lstrip(CUT_CHARACTER)) < longest:
            count *= 2
        return max(0, end - count)

    def _has_string(self, tokens: Sequence[int]) -> bool:
        text = self._decoded(tokens)
        return any(string in text for string in self.strings)

    def _decoded(self, tokens: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=False))

    def text(self, tokens: Sequence[int]) -> str:
        """The decoded response, without special tokens and the stop token, up to the first stop string."""
        shown = tokens[:-1] if tokens and tokens[-1] in self.token_ids else tokens
        text = str(self.tokenizer.decode(list(shown), skip_special_tokens=True))
        starts = [place for string in self.strings if (place := text.find(string)) >= 0]
        return text[: min(starts)] if starts else text
