"""Prompts as token ids: plain text, or a conversation in a chat template.

- A conversation is rendered once by the tokenizer's `apply_chat_template`; from there on only token ids are passed.
- What a prompt has and the template does not use is refused: tools, and further fields of messages such as tool calls.
- A template writes its own start token; a prompt has at most one start token.
- Plain text for a checkpoint with a chat template is refused unless data.chat_template says whether to apply it.
"""

import functools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from flowrt.errors import ConfigError, first_line, suggested

NONE, CHAT = "none", "chat"
ROLE_VARIABLES = ("messages", "tools", "add_generation_prompt", "continue_final_message")
"""Variables of a template that data.chat_template_kwargs cannot set."""
GIVEN_VARIABLES = ("raise_exception", "strftime_now", "bos_token", "eos_token", "pad_token", "unk_token")
"""Variables that transformers gives every template."""
_GENERATION = re.compile(r"\{%-?\s*(?:end)?generation\s*-?%\}")
"""Tags of transformers around what an assistant generates."""
USUAL = ("role", "content")
"""The fields of most messages."""
REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
"""Names of one field of a message: transformers gives a template each of them."""
IDENTIFYING_FIELDS = ("id", "name", "tool_call_id")
"""Fields of a message that a template may leave out."""
MAX_TEMPLATE_BYTES = 1_000_000
FAST_BATCH = 64
"""Texts that are tokenized together; larger batches are slower, because their encodings do not fit the cache."""
PROBE = "flowrt-probe"
"""Text of a response, by which its end is found in a rendered conversation."""


Message = tuple[str, str] | tuple[str, str, str]
"""A message: its role and its content; with further fields, such as tool calls, also the whole message as JSON text."""
Messages = tuple[Message, ...]
"""A conversation."""


class DataPrompt(NamedTuple):
    """A prompt of a data set: text, or a conversation.

    Attributes:
        text: the text; empty if there are messages.
        messages: the conversation; empty if the prompt is text.
        tools: JSON text of the list of its tools; empty: those of the format.
    """

    text: str
    messages: Messages = ()
    tools: str = ""


def as_message(message: Message) -> dict[str, Any]:
    """The fields of a message."""
    if len(message) == 2:
        return {"role": message[0], "content": message[1]}
    fields: dict[str, Any] = json.loads(message[2])
    return fields


@dataclass(frozen=True, slots=True)
class PromptFormat:
    """How prompts become token ids.

    Attributes:
        template: "none", "chat" (the checkpoint's), a path of a Jinja file, or empty: the checkpoint's for messages.
        variables: further variables of the template, by name.
        system_prompt: system message of conversations that do not begin with one; empty: none.
        prefill: whether a last message of role assistant is the beginning of the response.
        tools: JSON text of the list of tools of prompts without tools of their own; empty: none.
    """

    template: str = ""
    variables: Mapping[str, object] = field(default_factory=dict)
    system_prompt: str = ""
    prefill: bool = False
    tools: str = ""

    @classmethod
    def of(cls, template: str, variables: str, system_prompt: str, *, prefill: bool, tools: str = "") -> "PromptFormat":
        """The format that a configuration describes.

        Args:
            template: as the attribute.
            variables: JSON text; empty for none.
            system_prompt: as the attribute.
            prefill: as the attribute.
            tools: JSON text, or the path of a file with it; empty for none.

        Raises ConfigError if ``variables`` is not a JSON object, ``tools`` not a list of them, or template "none" comes
        with variables, tools or a system prompt.
        """
        try:
            table = json.loads(variables) if variables else {}
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"data.chat_template_kwargs is {variables!r:.80}, which is not JSON: {error}") from None
        if not isinstance(table, dict):
            raise ConfigError(f"data.chat_template_kwargs is {variables!r:.80}; make it a JSON object")
        if "tools" in table:
            raise ConfigError("data.chat_template_kwargs has 'tools'; name them with data.tools, a JSON list or a file")
        for name, value in (("system_prompt", system_prompt), ("chat_template_kwargs", table), ("tools", tools)):
            if template == NONE and value:
                raise ConfigError(
                    f"data.{name} is set, and data.chat_template is none: there is no conversation; leave one out"
                )
        return cls(template, table, system_prompt, prefill, _read_tools(tools))


def tools_text(value: object) -> str:
    """JSON text of a list of tools.

    Args:
        value: a list of JSON objects, or JSON text of one.

    Raises ValueError, whose text continues a sentence that names the value, for anything else.
    """
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"is not JSON: {error}") from None
    if not isinstance(value, list) or not all(isinstance(tool, Mapping) for tool in value):
        raise ValueError("is no list of JSON objects, the schemas of the tools")
    try:
        text = json.dumps(value)
        json.dumps(value, ensure_ascii=False).encode()  # raises for half a character
    except (TypeError, ValueError) as error:
        raise ValueError(f"cannot be written as JSON: {error}") from None
    return text


def _read_tools(tools: str) -> str:
    """The tools of ``data.tools`` as JSON text. Raises ConfigError if they cannot be read."""
    if not tools:
        return ""
    path = Path(tools)
    is_text = tools.lstrip().startswith("[")
    try:
        if not is_text and not path.is_file():
            raise ConfigError(f"data.tools is {tools!r:.80}, which is neither a JSON list nor a file; give one of them")
        return tools_text(tools if is_text else path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"data.tools is {tools!r:.80}, which cannot be read: {error.strerror}") from None
    except ValueError as error:  # not UTF-8, or not tools
        where = "data.tools" if is_text else f"data.tools: file {tools}"
        raise ConfigError(f"{where} {'is not UTF-8 text' if isinstance(error, UnicodeError) else error}") from None


def template_text(tokenizer: Any, template: str, *, with_tools: bool = False) -> str:
    """The text of a chat template; empty if there is none.

    Args:
        tokenizer: tokenizer of the checkpoint.
        template: "none", "chat", a path, or empty, as `PromptFormat.template`.
        with_tools: whether it is for prompts with tools, for which a checkpoint may have a template of its own.

    Raises ConfigError if the file cannot be read, or the checkpoint has several templates and no default.
    """
    if template == NONE:
        return ""
    if template in ("", CHAT):
        if not tokenizer.chat_template:
            return ""
        try:
            return str(tokenizer.get_chat_template(tools=[] if with_tools else None))
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
        self._tool_template = template_text(tokenizer, form.template, with_tools=True)
        self._after = _added_after(tokenizer)
        self._controls = control_tokens(tokenizer, self._template)
        if form.variables:
            _check_variables(self._tool_template if form.tools else self._template, form.variables)
        if form.tools:
            if not self._template:
                raise ConfigError("data.tools is set, and there is no chat template; leave it out, or give one")
            if not self._uses_tools:
                raise ConfigError("data.tools is set, and the chat template does not use tools; leave it out")

    def __call__(self, prompt: str, messages: Messages = (), tools: str = "") -> list[int]:
        """The token ids of a prompt; arguments as of `DataPrompt`.

        Raises ConfigError if the prompt needs a template that is missing or excluded, or the template raises.
        """
        data_prompt = DataPrompt(prompt, messages, tools)
        if not self.applies_template(data_prompt):
            return self._plain(prompt)
        conversation, options = self.conversation(data_prompt), self._options(data_prompt)
        try:
            ids: list[int] = self._tokenizer.apply_chat_template(
                conversation, tokenize=True, return_dict=False, **options
            )
        except Exception as error:  # noqa: BLE001 (the template's own errors are of many kinds)
            raise ConfigError(f"the chat template refuses the prompt: {_sentence(error)}") from None
        return ids

    def applies_template(self, prompt: DataPrompt) -> bool:
        """Whether the template is applied to a prompt.

        Raises ConfigError if the configuration does not determine it, or the template is needed and missing.
        """
        if prompt.messages:
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
        if not self._template and _are_any(prompt.tools):
            raise ConfigError(
                "the row has tools, and there is no chat template; give one, or leave the column out (data.tools_key"
                " '')"
            )
        return bool(self._template)

    def conversation(self, prompt: DataPrompt) -> list[dict[str, Any]]:
        """The messages that are passed to the template, with the system prompt.

        Raises ConfigError if a message has a field that the template does not use.
        """
        messages = prompt.messages or (("user", prompt.text),)
        if self._form.system_prompt and messages[0][0] not in ("system", "developer"):
            messages = (("system", self._form.system_prompt), *messages)
        conversation = [as_message(message) for message in messages]
        for message, fields in zip(messages, conversation, strict=True):
            if len(message) > len(USUAL):
                self._check_fields(fields, self._template_of(prompt))
        return conversation

    def encode_all(self, prompts: Sequence[DataPrompt]) -> list[list[int]]:
        """The token ids of many prompts: results and errors of `__call__`, but faster."""
        texts = [prompt.text for prompt in prompts]
        rendered: set[int] = set()
        """Indices of the prompts that the template is applied to."""
        alike: dict[tuple[bool, str], list[int]] = {}
        """Those with the same options of the template."""
        for place, prompt in enumerate(prompts):
            if self.applies_template(prompt):
                rendered.add(place)
                alike.setdefault((self._is_prefilled(prompt.messages), prompt.tools), []).append(place)
        for places in alike.values():
            group_texts = self._render_all([prompts[place] for place in places])
            for place, text in zip(places, group_texts, strict=True):
                texts[place] = text
        if not texts:
            return []
        ids = self._ids(texts)
        for place in {*range(len(texts))} - rendered:
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
                ids += [encoding.ids for encoding in encodings]
            if ids[0] == first:
                return ids
        return [list(row) for row in self._tokenizer(texts, add_special_tokens=False)["input_ids"]]

    def control_token(self, prompt: DataPrompt) -> str:
        """The first control token in the texts of a prompt; empty if there is none. See `control_tokens`."""
        if self._controls is None:
            return ""
        matches = (self._controls.search(text) for text in prompt_texts(prompt))
        return next((match[0] for match in matches if match is not None), "")

    def render(self, prompt: DataPrompt) -> str:
        """The text of a prompt rendered by the template. Raises ConfigError if the template raises."""
        return self._render_all([prompt])[0]

    def _render_all(self, prompts: Sequence[DataPrompt]) -> list[str]:
        """The texts of prompts rendered by the template, for all of which its options are the same."""
        conversations = [self.conversation(prompt) for prompt in prompts]
        options = self._options(prompts[0])
        try:
            texts: list[str] = self._tokenizer.apply_chat_template(conversations, tokenize=False, **options)
        except Exception as error:  # noqa: BLE001 (the template's own errors are of many kinds)
            if len(prompts) > 1:  # one by one, to raise the error of the first refused prompt
                return [self.render(prompt) for prompt in prompts]
            raise ConfigError(f"the chat template refuses the prompt: {_sentence(error)}") from None
        return texts

    def _options(self, prompt: DataPrompt) -> dict[str, Any]:
        """The options of the template for a prompt. Raises ConfigError for tools that it does not use."""
        is_prefill = self._is_prefilled(prompt.messages)
        tools = self._tools(prompt)
        if tools and not self._uses_tools:
            raise ConfigError(
                "the row has tools, which the chat template does not use; give another one, or leave the column out "
                "(data.tools_key '')"
            )
        return {
            **self._form.variables,
            "tools": json.loads(tools) if tools else None,
            "chat_template": self._template_of(prompt),
            "add_generation_prompt": not is_prefill,
            "continue_final_message": is_prefill,
        }

    def _tools(self, prompt: DataPrompt) -> str:
        """JSON text of the tools of a prompt; empty if it has none."""
        tools = prompt.tools or self._form.tools
        return tools if _are_any(tools) else ""

    def _template_of(self, prompt: DataPrompt) -> str:
        return self._tool_template if self._tools(prompt) else self._template

    @property
    def _uses_tools(self) -> bool:
        used = _used_variables(self._tool_template)
        return "tools" in used if used is not None else _mentions(self._tool_template, "tools")

    def _check_fields(self, message: Mapping[str, object], template: str) -> None:
        """Raise ConfigError for a field of a message that the template does not use."""
        for name in message:
            names = REASONING_FIELDS if name in REASONING_FIELDS else (name,)
            if name in (*USUAL, *IDENTIFYING_FIELDS) or any(_reads(template, name) for name in names):
                continue
            raise ConfigError(
                f"a message of role {message.get('role')} has the field {name!r}, which the chat template does not "
                "use; leave it out, or give another template"
            )

    def _is_prefilled(self, messages: Messages) -> bool:
        return self._form.prefill and bool(messages) and messages[-1][0] == "assistant"

    def _plain(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer(text)["input_ids"]
        # What a tokenizer puts after a text, mostly its end token: a response would follow it.
        if self._after and tuple(ids[-len(self._after) :]) == self._after:
            del ids[-len(self._after) :]
        start = self._tokenizer.bos_token_id
        # The text may begin with the start token, as the output of a template does, and the tokenizer adds another.
        while start is not None and ids[:2] == [start, start]:
            del ids[0]
        return ids


class PromptEncoders:
    """The encoders of a run: one for each format of its prompts."""

    def __init__(self, tokenizer: Any, default: PromptFormat) -> None:
        """``default``: the format of prompts without one of their own."""
        self._tokenizer = tokenizer
        self._default = default
        self._found: list[tuple[PromptFormat, PromptEncoder]] = []

    def of(self, form: PromptFormat | None) -> PromptEncoder:
        """The encoder of a format, the same one for equal formats; None: the default.

        Raises ConfigError if the format cannot be used, as `PromptEncoder`.
        """
        form = form or self._default
        for known, encoder in self._found:
            if known is form or known == form:
                return encoder
        self._found.append((form, PromptEncoder(self._tokenizer, form)))
        return self._found[-1][1]


def control_tokens(tokenizer: Any, template: str) -> re.Pattern[str] | None:
    """A pattern of the tokens that mark parts of a conversation: in a prompt they become these tokens, as a template's.

    Args:
        tokenizer: tokenizer of the checkpoint.
        template: text of the chat template; empty: there is none.

    Returns:
        A pattern of special tokens, and of added tokens that the template writes; None if there are none.
    """
    tokens = {str(token) for token in tokenizer.all_special_tokens}
    for token in tokenizer.added_tokens_decoder.values():
        if token.special or (str(token).strip() and str(token) in template):
            tokens.add(str(token))
    longest_first = sorted((token for token in tokens if token.strip()), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first))) if longest_first else None


def prompt_texts(prompt: DataPrompt) -> list[str]:
    """The texts of a prompt: its messages with all their fields, and its tools."""
    texts = [prompt.text, *(message[1] for message in prompt.messages)]
    values: list[object] = [json.loads(message[2]) for message in prompt.messages if len(message) == 3]
    values += [json.loads(prompt.tools)] if prompt.tools else []
    while values:
        value = values.pop()
        if isinstance(value, str):
            texts.append(value)
        elif isinstance(value, Mapping):
            values += [*value.keys(), *value.values()]
        elif isinstance(value, list):
            values += value
    return texts


def _added_after(tokenizer: Any) -> tuple[int, ...]:
    """The tokens that a tokenizer puts after a text."""
    try:
        plain: list[int] = tokenizer(PROBE, add_special_tokens=False)["input_ids"]
        whole: list[int] = tokenizer(PROBE)["input_ids"]
    except Exception:  # noqa: BLE001 (tokenizers raises nothing narrower for a text that it cannot take)
        return ()
    for start in range(len(whole) - len(plain) + 1):
        if whole[start : start + len(plain)] == plain:
            return tuple(whole[start + len(plain) :])
    return ()


def _are_any(tools: str) -> bool:
    """Whether JSON text of a list has an element; empty text: none."""
    return tools not in ("", "[]")


def _reads(template: str, name: str) -> bool:
    """Whether the text of a template has the name of a field, as ``m.NAME`` or in quotes, and not as a variable."""
    return re.search(rf"[.'\"]{re.escape(name)}\b", template) is not None


def _mentions(template: str, name: str) -> bool:
    """Whether a name occurs in the text of a template."""
    return re.search(rf"\b{re.escape(name)}\b", template) is not None


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
    if not template:
        raise ConfigError("data.chat_template_kwargs is set, and there is no chat template; leave it out")
    used = _used_variables(template)
    if used is None:
        return
    for name in variables:
        if name not in used or name in ROLE_VARIABLES:
            own = sorted(used - {*ROLE_VARIABLES, *GIVEN_VARIABLES})
            raise ConfigError(
                f"data.chat_template_kwargs has {name!r}, which the chat template does not use{suggested(name, own)}"
            )


@functools.cache
def _used_variables(template: str) -> frozenset[str] | None:
    """The variables of a template that it does not set itself; None if only transformers can parse it."""
    from jinja2 import TemplateSyntaxError, meta
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(extensions=["jinja2.ext.loopcontrols"])
    try:
        return frozenset(meta.find_undeclared_variables(environment.parse(_GENERATION.sub("", template))))
    except TemplateSyntaxError:
        return None  # an error in it is reported with the first prompt


def _sentence(error: Exception) -> str:
    return first_line(error)[:200].rstrip(". ")
