"""The text of a turn of the model: what the chat template opens or a prefill begins, and what is generated.

Tags of thinking that a tokenizer counts as special tokens, and which decoding therefore leaves out, are part of it.
"""

import re
from collections.abc import Sequence
from typing import Any

from flowrt.engines.prompts import NONE, PromptFormat, template_text
from flowrt.engines.stopping import StopConditions

TAG = re.compile(r"<[A-Za-z][\w-]*>|\[[A-Z][A-Z_]+\]")
"""A tag such as <think> or [THINK]."""
THINKING = re.compile(r"</?(think|thinking|thought|reasoning)>|\[/?THINK\]")
"""Tags that are part of a turn even if they are special tokens."""
PROBE = ({"role": "user", "content": "1"},)


class Turns:
    """The turns of the model after prompts of one format."""

    def __init__(self, stop: StopConditions, form: PromptFormat) -> None:
        """Raises ConfigError if the template cannot be read."""
        tokenizer = stop.tokenizer
        self._stop = stop
        self._prefills = form.prefill
        self._opened = opened_text(tokenizer, template_text(tokenizer, form.template), form)
        self._tags = {token: text for token, text in special_tokens(tokenizer).items() if THINKING.fullmatch(text)}

    @property
    def depends_on_prompt(self) -> bool:
        """Whether turns of different prompts can begin differently."""
        return self._prefills

    def beginning(self, messages: Sequence[dict[str, str]] = ()) -> str:
        """The part of the turn after these messages that is not generated."""
        if self._prefills and messages and messages[-1]["role"] == "assistant":
            return messages[-1]["content"]
        return self._opened

    def generated(self, tokens: Sequence[int]) -> str:
        """The text of generated tokens, as `StopConditions.text`, with tags of thinking."""
        if self._tags.keys().isdisjoint(tokens):
            return self._stop.text(tokens)
        shown = tokens[:-1] if tokens[-1] in self._stop.token_ids else tokens
        places = [place for place, token in enumerate(shown) if token in self._tags]
        parts, start = [], 0
        for place in places:
            parts += [self._decoded(shown[start:place]), self._tags[shown[place]]]
            start = place + 1
        text = "".join([*parts, self._decoded(shown[start:])])
        ends = [place for string in self._stop.strings if (place := text.find(string)) >= 0]
        return text[: min(ends)] if ends else text

    def _decoded(self, tokens: Sequence[int]) -> str:
        return str(self._stop.tokenizer.decode(list(tokens), skip_special_tokens=True))


class TurnsOfForms:
    """The turns of a run whose prompts have several formats."""

    def __init__(self, stop: StopConditions) -> None:
        self._stop = stop
        self._known: list[tuple[PromptFormat, Turns]] = []

    def of(self, form: PromptFormat) -> Turns:
        """The turns after prompts of a format, the same for equal ones. Raises ConfigError as `Turns`."""
        for known, turns in self._known:
            if known == form:
                return turns
        self._known.append((form, Turns(self._stop, form)))
        return self._known[-1][1]


def special_tokens(tokenizer: Any) -> dict[int, str]:
    """The tokens that decoding leaves out, by id."""
    tokens = dict(zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True))
    added = {
        token: added_token.content
        for token, added_token in tokenizer.added_tokens_decoder.items()
        if added_token.special
    }
    return {int(token): str(text) for token, text in (tokens | added).items()}


def opened_text(tokenizer: Any, template: str, form: PromptFormat) -> str:
    """The text that a template writes into the turn of the model, from the first tag after its header on.

    Such as ``<think>`` and a line end. Empty if it writes none, or there is no template.

    Args:
        tokenizer: tokenizer of the checkpoint.
        template: text of the template.
        form: the variables of the template.
    """
    if not template or form.template == NONE:
        return ""
    options = {**form.variables, "chat_template": template, "tokenize": False}
    try:
        before, after = (
            str(tokenizer.apply_chat_template(list(PROBE), **options, add_generation_prompt=added))
            for added in (False, True)
        )
    except Exception:  # noqa: BLE001 (a template that fails on a prompt is reported with that prompt)
        return ""
    added = after.removeprefix(before) if after.startswith(before) else ""
    special = {*special_tokens(tokenizer).values()}
    tags = (tag for tag in TAG.finditer(added) if tag[0] not in special or THINKING.fullmatch(tag[0]))
    return added[next((tag.start() for tag in tags), len(added)) :]
