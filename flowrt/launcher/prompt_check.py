"""Check of a run's prompts against its model: their length, their tokens, and the chat template.

A prompt is tokenized only if its size in bytes does not prove that it fits: every token stands for at least one byte,
and what a chat template adds depends only on the roles of the messages.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from flowrt.engines.prompts import USUAL, DataPrompt, PromptEncoder, PromptEncoders, PromptFormat
from flowrt.errors import ConfigError, first_line
from flowrt.recipes.data.base import Mistakes
from flowrt.recipes.prompt_limits import PromptLimits
from flowrt.recipes.tasks.base import PromptBlock

SHORT_BYTES = 4
"""A prompt of at most this size may have no token at all."""
MAX_SPECIAL_TOKENS = 16
"""Tokens that a tokenizer adds to a text; every other token stands for at least one byte of it."""
UTF8_BYTES = 4
"""Maximum number of bytes of a character."""


class Overlong(NamedTuple):
    """A prompt that is too long: its data set, its place, and its length in tokens."""

    data_set: str
    where: str
    tokens: int


def check_prompts(
    blocks: Iterable[PromptBlock],
    tokenizer: Any,
    *,
    limits: PromptLimits,
    what: str,
    form: PromptFormat | None = None,
) -> None:
    """Check all prompts of a run.

    Args:
        blocks: the prompts.
        tokenizer: the tokenizer of the model.
        limits: limits of the model and the configuration.
        what: name of the model in messages.
        form: how prompts without a format of their own become tokens; None: text as it is.

    Raises ConfigError for a prompt without tokens, with tokens outside the vocabulary, too long, or that the chat
    template refuses; the first ten together.
    """
    check_end_token(tokenizer, limits.vocab_size, what)
    check = _PromptCheck(tokenizer, limits, what, PromptEncoders(tokenizer, form or PromptFormat(template="none")))
    for block in blocks:
        check.add(block)
    check.report()


def check_end_token(tokenizer: Any, vocab_size: int, what: str) -> None:
    """Raise ConfigError if the model cannot generate the tokenizer's end token. ``what``: the model in messages."""
    eos = tokenizer.eos_token_id
    if eos is not None and eos >= vocab_size:
        raise ConfigError(f"{what}: the tokenizer's end token is {eos}, and vocab_size {vocab_size}; they do not match")


class _PromptCheck:
    """A check of prompts, block by block, that collects their mistakes."""

    def __init__(self, tokenizer: Any, limits: PromptLimits, what: str, encoders: PromptEncoders) -> None:
        self._limits = limits
        self._what = what
        self._encoders = encoders
        self._is_larger = len(tokenizer) > limits.vocab_size
        self._mistakes = Mistakes()
        self._added: dict[tuple[PromptEncoder, tuple[str, ...]], int] = {}
        self._seen = Counter[str]()
        self._overlong: list[Overlong] = []

    def add(self, block: PromptBlock) -> None:
        """Check these prompts. Raises ConfigError at the tenth mistake."""
        self._seen[block.data_set] += len(block.prompts)
        encoder, doubtful = self._encoders.of(block.form), []
        for place, prompt in enumerate(block.prompts):
            try:
                if self._is_doubtful(encoder, prompt):
                    doubtful.append(place)
            except ConfigError as error:
                self._mistakes.add(ConfigError(f"{block.where(place)}: {error}"))
        for place, tokens in self._encoded(encoder, block, doubtful):
            self._judge(block, place, tokens)

    def report(self) -> None:
        """Raise ConfigError for the mistakes that were found, and if all prompts of a data set are too long."""
        self._mistakes.report()
        if not self._overlong:
            return
        first = self._overlong[0]
        if self._limits.overlong == "drop":
            counts = Counter(prompt.data_set for prompt in self._overlong)
            for prompt in self._overlong:
                if counts[prompt.data_set] == self._seen[prompt.data_set]:
                    of_set = f" of data set {prompt.data_set!r}" if prompt.data_set else ""
                    raise ConfigError(
                        f"{prompt.where}: {self._limits.refusal(prompt.tokens, self._what)}, as every prompt{of_set}; "
                        "data.overlong is drop, and none is left"
                    )
            return
        longest = max(self._overlong, key=lambda prompt: prompt.tokens)
        more = (
            f"; {len(self._overlong)} prompts are too long, the longest ({longest.where}) with {longest.tokens} tokens"
            if len(self._overlong) > 1
            else ""
        )
        raise ConfigError(
            f"{first.where}: {self._limits.refusal(first.tokens, self._what)}; leave it out (data.overlong drop), or "
            f"use fewer{more}"
        )

    def _is_doubtful(self, encoder: PromptEncoder, prompt: DataPrompt) -> bool:
        """Whether the prompt has to be tokenized: it may have too many tokens, none, or ids outside the vocabulary."""
        text, messages, tools = prompt
        if tools or any(len(message) > len(USUAL) for message in messages):
            return True  # a template may show them in any way
        roles = tuple([message[0] for message in messages])
        added = self._added.get((encoder, roles))
        if added is None:
            added = self._added[encoder, roles] = self._added_bytes(encoder, prompt, roles)
        characters = len(text) + sum([len(message[1]) for message in messages])
        if characters > SHORT_BYTES and characters * UTF8_BYTES + added <= self._limits.most:
            return self._is_larger
        parts = [text, *(message[1] for message in messages)]
        size = sum(len(part) if part.isascii() else len(part.encode()) for part in parts)
        return self._is_larger or size <= SHORT_BYTES or size + added > self._limits.most

    def _added_bytes(self, encoder: PromptEncoder, prompt: DataPrompt, roles: tuple[str, ...]) -> int:
        """Upper bound of the tokens that do not stand for the prompt's own text.

        Raises ConfigError, see `PromptEncoder`.
        """
        if not encoder.applies_template(prompt):
            return MAX_SPECIAL_TOKENS
        encoder(*prompt)  # a template may refuse an order of roles
        short = DataPrompt("1", tuple((role, "1") for role in roles))
        return len(encoder.render(short).encode()) + MAX_SPECIAL_TOKENS

    def _encoded(
        self, encoder: PromptEncoder, block: PromptBlock, places: Sequence[int]
    ) -> Iterator[tuple[int, list[int]]]:
        prompts = [block.prompts[place] for place in places]
        try:
            yield from zip(places, encoder.encode_all(prompts), strict=True)
        except Exception:  # noqa: BLE001 (tokenizers raises nothing narrower; the prompt is found below)
            for place, prompt in zip(places, prompts, strict=True):
                try:
                    yield place, encoder(*prompt)
                except Exception as error:  # noqa: BLE001
                    text = str(error) if isinstance(error, ConfigError) else _cannot(self._what, error)
                    self._mistakes.add(ConfigError(f"{block.where(place)}: {text}"))

    def _judge(self, block: PromptBlock, place: int, tokens: Sequence[int]) -> None:
        if not tokens:
            self._mistakes.add(
                ConfigError(
                    f"{block.where(place)}: the prompt has no token in the tokenizer of {self._what}; leave the row out"
                )
            )
        elif len(tokens) > self._limits.most:
            self._overlong.append(Overlong(block.data_set, block.where(place), len(tokens)))
        elif max(tokens) >= self._limits.vocab_size:
            self._mistakes.add(
                ConfigError(
                    f"{block.where(place)}: the prompt has token {max(tokens)}, and {self._what} a vocab_size of "
                    f"{self._limits.vocab_size}"
                )
            )


def _cannot(what: str, error: Exception) -> str:
    return f"the tokenizer of {what} cannot take the prompt: {first_line(error)[:200].rstrip('. ')}"
