"""Prompts as token ids: plain text, or a conversation in a chat template.

- A conversation is rendered once by the tokenizer's `apply_chat_template`; from there on only token ids are passed.
- A template writes its own start token; a prompt has at most one start token.
- Plain text for a checkpoint with a chat template is refused unless data.chat_template says whether to apply it.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flowrt.errors import ConfigError, first_line, suggested

NONE, CHAT = "none", "chat"
ROLE_VARIABLES = ("messages", "tools", "documents", "add_generation_prompt", "continue_final_message")
"""Variables of a template that the user cannot set."""
MAX_TEMPLATE_BYTES = 1_000_000
FAST_BATCH = 64
"""Texts that are tokenized together; larger batches are slower, because their encodings do not fit the cache."""
PROBE = "flowrt-probe"
"""Text of a response, by which its end is found in a rendered conversation."""


@dataclass(frozen=True, slots=True)
class PromptFormat:
    """How prompts become token ids.

    Attributes:
        template: "none", "chat" (the checkpoint's), a path of a Jinja file, or empty: the checkpoint's for messages.
        variables: further variables of the template, by name.
        system_prompt: system message of conversations that do not begin with one; empty: none.
        prefill: whether a last message of role assistant is the beginning of the response.
    """

    template: str = ""
    variables: Mapping[str, object] = field(default_factory=dict)
    system_prompt: str = ""
    prefill: bool = False

    @classmethod
    def of(cls, template: str, variables: str, system_prompt: str, *, prefill: bool) -> "PromptFormat":
        """The format that a configuration describes; ``variables`` is JSON text, empty for none.

        Raises ConfigError if ``variables`` is not a JSON object, or template "none" comes with variables or a system
        prompt.
        """
        try:
            table = json.loads(variables) if variables else {}
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"data.chat_template_kwargs is {variables!r:.80}, which is not JSON: {error}") from None
        if not isinstance(table, dict):
            raise ConfigError(f"data.chat_template_kwargs is {variables!r:.80}; make it a JSON object")
        if template == NONE and (system_prompt or table):
            name = "data.system_prompt" if system_prompt else "data.chat_template_kwargs"
            raise ConfigError(f"{name} is set, and data.chat_template is none: there is no conversation; leave one out")
        return cls(template, table, system_prompt, prefill)


def template_text(tokenizer: Any, template: str) -> str:
    """The text of a chat template; empty if there is none.

    Args:
        tokenizer: tokenizer of the checkpoint.
        template: "none", "chat", a path, or empty, as `PromptFormat.template`.

    Raises ConfigError if the file cannot be read, or the checkpoint has several templates and no default.
    """
    if template == NONE:
        return ""
    if template in ("", CHAT):
        if not tokenizer.chat_template:
            return ""
        try:
            return str(tokenizer.get_chat_template())
        except ValueError as error:
            raise ConfigError(f"the chat template of the checkpoint cannot be used: {_sentence(error)}") from None
    path = Path(template)
    try:
        if path.stat().st_size > MAX_TEMPLATE_BYTES or not path.is_file():
            raise ConfigError(f"data.chat_template {template} is not a file of at most {MAX_TEMPLATE_BYTES:,} bytes")
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(
            f"data.chat_template is {template!r}, which cannot be read: {reason}; use none, chat, or a Jinja file"
        ) from None


class PromptEncoder:
    """Converts prompts to token ids."""

    def __init__(self, tokenizer: Any, form: PromptFormat) -> None:
        """Raises ConfigError if the template is missing, cannot be read, or does not use one of the variables."""
        self._tokenizer = tokenizer
        self._form = form
        self._template = template_text(tokenizer, form.template)
        if form.template == CHAT and not self._template:
            raise ConfigError("data.chat_template is chat, and the checkpoint has none; give a Jinja file, or none")
        if form.variables:
            _check_variables(self._template, form.variables)

    def __call__(self, prompt: str, messages: Sequence[tuple[str, str]] = ()) -> list[int]:
        """The token ids of a prompt.

        Args:
            prompt: plain text, used if there are no messages.
            messages: (role, content) of each.

        Raises ConfigError if the prompt needs a template that is missing or excluded, or the template raises.
        """
        if not self.applies_template(bool(messages)):
            return self._plain(prompt)
        options = self._options(messages)
        try:
            ids: list[int] = self._tokenizer.apply_chat_template(
                self.conversation(prompt, messages), tokenize=True, return_dict=False, **options
            )
        except Exception as error:  # noqa: BLE001 (the template's own errors are of many kinds)
            raise ConfigError(f"the chat template refuses the prompt: {_sentence(error)}") from None
        return ids

    def applies_template(self, has_messages: bool) -> bool:
        """Whether the template is applied to a prompt with or without messages.

        Raises ConfigError if the configuration does not determine it, or the template is needed and missing.
        """
        if has_messages:
            if self._form.template == NONE:
                raise ConfigError("the prompt is messages, and data.chat_template is none; use chat, or a Jinja file")
            if not self._template:
                raise ConfigError(
                    "the prompt is messages, and the checkpoint has no chat template; give one with "
                    "--data.chat-template FILE.jinja"
                )
            return True
        if self._form.template == "" and self._template:
            raise ConfigError(
                "the prompt is plain text, and the checkpoint has a chat template: --data.chat-template chat makes it "
                "a message of the user, none leaves it as it is"
            )
        if self._form.system_prompt and not self._template:
            raise ConfigError("data.system_prompt is set, and there is no chat template; leave it out, or give one")
        return bool(self._template)

    def conversation(self, prompt: str, messages: Sequence[tuple[str, str]]) -> list[dict[str, str]]:
        """The messages that are passed to the template: roles and contents, with the system prompt."""
        pairs = list(messages) or [("user", prompt)]
        if self._form.system_prompt and pairs[0][0] not in ("system", "developer"):
            pairs.insert(0, ("system", self._form.system_prompt))
        return [{"role": role, "content": content} for role, content in pairs]

    def encode_all(self, prompts: Sequence[tuple[str, Sequence[tuple[str, str]]]]) -> list[list[int]]:
        """The token ids of many prompts, given as (prompt, messages): results and errors of `__call__`, but faster."""
        texts = [prompt for prompt, _ in prompts]
        conversations: dict[bool, list[int]] = {False: [], True: []}
        """Indices of the prompts that the template is applied to, by whether they are prefilled."""
        for place, (_, messages) in enumerate(prompts):
            if self.applies_template(bool(messages)):
                conversations[self._is_prefilled(messages)].append(place)
        for places in conversations.values():
            rendered = self._render_all([prompts[place] for place in places]) if places else []
            for place, text in zip(places, rendered, strict=True):
                texts[place] = text
        if not texts:
            return []
        ids = self._ids(texts)
        for place in {*range(len(texts))} - {*conversations[False], *conversations[True]}:
            ids[place] = self._plain(texts[place])
        return ids

    def _ids(self, texts: list[str]) -> list[list[int]]:
        """The token ids of texts, without special tokens that the tokenizer adds."""
        first: list[int] = self._tokenizer(texts[0], add_special_tokens=False)["input_ids"]
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if backend is not None:  # the tokenizers library: encode_batch_fast computes no offsets into the text
            ids = []
            for start in range(0, len(texts), FAST_BATCH):
                encodings = backend.encode_batch_fast(texts[start : start + FAST_BATCH], add_special_tokens=False)
                ids += [one.ids for one in encodings]
            if ids[0] == first:
                return ids
        return [list(row) for row in self._tokenizer(texts, add_special_tokens=False)["input_ids"]]

    def render(self, prompt: str, messages: Sequence[tuple[str, str]]) -> str:
        """The text of a prompt rendered by the template. Raises ConfigError if the template raises."""
        return self._render_all([(prompt, messages)])[0]

    def _render_all(self, prompts: Sequence[tuple[str, Sequence[tuple[str, str]]]]) -> list[str]:
        """The texts of prompts rendered by the template; either all of the prompts are prefilled, or none."""
        conversations = [self.conversation(*one) for one in prompts]
        try:
            texts: list[str] = self._tokenizer.apply_chat_template(
                conversations, tokenize=False, **self._options(prompts[0][1])
            )
        except Exception as error:  # noqa: BLE001 (the template's own errors are of many kinds)
            if len(prompts) > 1:  # one by one, to raise the error of the first refused prompt
                return [self.render(*one) for one in prompts]
            raise ConfigError(f"the chat template refuses the prompt: {_sentence(error)}") from None
        return texts

    def _options(self, messages: Sequence[tuple[str, str]]) -> dict[str, Any]:
        is_prefill = self._is_prefilled(messages)
        return {
            **self._form.variables,
            "chat_template": self._template,
            "add_generation_prompt": not is_prefill,
            "continue_final_message": is_prefill,
        }

    def _is_prefilled(self, messages: Sequence[tuple[str, str]]) -> bool:
        return self._form.prefill and bool(messages) and messages[-1][0] == "assistant"

    def _plain(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer(text)["input_ids"]
        start = self._tokenizer.bos_token_id
        # The text may begin with the start token, as the output of a template does, and the tokenizer adds another.
        while start is not None and ids[:2] == [start, start]:
            del ids[0]
        return ids


def end_of_turn_ids(tokenizer: Any, template: str) -> tuple[int, ...]:
    """The token with which a chat template ends a response: the special token that follows an assistant's message.

    Args:
        tokenizer: tokenizer of the checkpoint.
        template: text of the template; empty: there is none.

    Returns:
        One id; empty if there is no template, no special token follows, or the template cannot be rendered.
    """
    if not template:
        return ()
    messages = [{"role": "user", "content": "1"}, {"role": "assistant", "content": PROBE}]
    try:
        text = tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False)
    except Exception:  # noqa: BLE001 (a template that fails on a prompt is reported with that prompt)
        return ()
    rest = str(text).rpartition(PROBE)[2]
    special = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
    for token in tokenizer(rest, add_special_tokens=False)["input_ids"]:
        if token in special:
            return (int(token),)
        if str(tokenizer.decode([token])).strip():
            break
    return ()


def _check_variables(template: str, variables: Mapping[str, object]) -> None:
    from jinja2 import TemplateSyntaxError, meta
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    if not template:
        raise ConfigError("data.chat_template_kwargs is set, and there is no chat template; leave it out")
    try:
        environment = ImmutableSandboxedEnvironment(extensions=["jinja2.ext.loopcontrols"])
        used = meta.find_undeclared_variables(environment.parse(template))
    except TemplateSyntaxError:
        return  # syntax that only transformers supports; an error in it is reported with the first prompt
    for name in variables:
        if name not in used or name in ROLE_VARIABLES:
            own = sorted(used - set(ROLE_VARIABLES))
            raise ConfigError(
                f"data.chat_template_kwargs has {name!r}, which the chat template does not use{suggested(name, own)}"
            )


def _sentence(error: Exception) -> str:
    return first_line(error)[:200].rstrip(". ")
