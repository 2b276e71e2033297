"""Check of a run's prompts against its model: their length, their tokens, and the chat template.

Prompts are tokenized only where their size leaves a doubt: every token stands for at least one byte, and what a chat
template adds depends on the roles of the messages alone.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

from flowrt.engines.prompts import PromptEncoder, PromptFormat
from flowrt.errors import ConfigError
from flowrt.recipes.data.columns import Messages
from flowrt.recipes.data.mistakes import Mistakes
from flowrt.recipes.prompt_limits import PromptLimits
from flowrt.recipes.tasks.base import Example

SHORT_BYTES = 4
"""A prompt of at most this size may have no token at all."""
MAX_SPECIAL_TOKENS = 16
"""Tokens that a tokenizer adds to a text; every other token stands for at least one byte of it."""
BATCH = 512
"""Prompts that are tokenized together."""
Prompt = tuple[str, Messages]


def check_prompts(
    problems: Iterable[Example],
    tokenizer: Any,
    *,
    limits: PromptLimits,
    what: str,
    form: PromptFormat | None = None,
) -> None:
    """Check all prompts of a run.

    Args:
        problems: whose prompts are checked.
        tokenizer: of the model.
        limits: of the model and the configuration.
        what: the model, for messages.
        form: how prompts become tokens; None: text as it is.

    Raises ConfigError for a prompt without tokens, with tokens outside the vocabulary, too long, or that the chat
    template refuses; the first ten together.
    """
    eos = tokenizer.eos_token_id
    if eos is not None and eos >= limits.vocab_size:
        raise ConfigError(
            f"{what}: the tokenizer's end token is {eos}, and vocab_size {limits.vocab_size}; they do not match"
        )
    check = _PromptCheck(tokenizer, limits, what, PromptEncoder(tokenizer, form or PromptFormat(template="none")))
    source = iter(problems)
    while batch := list(islice(source, BATCH)):
        check.add(batch)
    check.report()


class _PromptCheck:
    """The mistakes in the prompts so far."""

    def __init__(self, tokenizer: Any, limits: PromptLimits, what: str, encoder: PromptEncoder) -> None:
        self._limits = limits
        self._what = what
        self._encoder = encoder
        self._is_larger = len(tokenizer) > limits.vocab_size
        self._mistakes = Mistakes()
        self._added: dict[tuple[str, ...], int] = {}
        self._seen = 0
        self._overlong: list[tuple[str, int]] = []

    def add(self, problems: Sequence[Example]) -> None:
        """Check these prompts. Raises ConfigError at the tenth mistake."""
        self._seen += len(problems)
        doubtful = []
        for problem in problems:
            try:
                if self._is_doubtful(problem):
                    doubtful.append(problem)
            except ConfigError as error:
                self._mistakes.add(ConfigError(f"{_place(problem)}: {error}"))
        for problem, tokens in self._encoded(doubtful):
            self._judge(problem, tokens)

    def report(self) -> None:
        """Raise ConfigError for the mistakes that were found, and if no prompt is left."""
        self._mistakes.report()
        if not self._overlong:
            return
        where, tokens = self._overlong[0]
        if self._limits.overlong == "drop":
            if len(self._overlong) == self._seen:
                raise ConfigError(
                    f"{where}: {self._limits.refusal(tokens, self._what)}, as every prompt; data.overlong is drop, and "
                    "none is left"
                )
            return
        longest = max(self._overlong, key=lambda one: one[1])
        more = (
            f"; {len(self._overlong)} prompts are too long, the longest ({longest[0]}) with {longest[1]} tokens"
            if len(self._overlong) > 1
            else ""
        )
        raise ConfigError(
            f"{where}: {self._limits.refusal(tokens, self._what)}; leave it out (data.overlong drop), or use fewer"
            f"{more}"
        )

    def _is_doubtful(self, problem: Example) -> bool:
        """Whether the prompt may have too many tokens, none, or wrong ones."""
        added = self._added_bytes(problem)
        parts = [problem.prompt, *(content for _, content in problem.messages)]
        size = sum(len(part) if part.isascii() else len(part.encode()) for part in parts)
        return self._is_larger or size <= SHORT_BYTES or size + added > self._limits.most

    def _added_bytes(self, problem: Example) -> int:
        """Upper bound of the tokens that do not stand for the prompt's own text.

        Raises ConfigError, see `PromptEncoder`.
        """
        roles = tuple(role for role, _ in problem.messages)
        if roles not in self._added:
            if self._encoder.applies_template(bool(roles)):
                self._encoder(problem.prompt, problem.messages)  # a template may refuse an order of roles
                short = tuple((role, "1") for role in roles)
                self._added[roles] = len(self._encoder.render("1", short).encode()) + MAX_SPECIAL_TOKENS
            else:
                self._added[roles] = MAX_SPECIAL_TOKENS
        return self._added[roles]

    def _encoded(self, problems: Sequence[Example]) -> Iterator[tuple[Example, list[int]]]:
        prompts: list[Prompt] = [(problem.prompt, problem.messages) for problem in problems]
        try:
            yield from zip(problems, self._encoder.encode_all(prompts), strict=True)
        except Exception:  # noqa: BLE001 (tokenizers raises nothing narrower; the prompt is found below)
            for problem, prompt in zip(problems, prompts, strict=True):
                try:
                    yield problem, self._encoder(*prompt)
                except Exception as error:  # noqa: BLE001
                    text = str(error) if isinstance(error, ConfigError) else _cannot(self._what, error)
                    self._mistakes.add(ConfigError(f"{_place(problem)}: {text}"))

    def _judge(self, problem: Example, tokens: Sequence[int]) -> None:
        where = _place(problem)
        if not tokens:
            self._mistakes.add(
                ConfigError(f"{where}: the prompt has no token in the tokenizer of {self._what}; leave the row out")
            )
        elif len(tokens) > self._limits.most:
            self._overlong.append((where, len(tokens)))
        elif max(tokens) >= self._limits.vocab_size:
            self._mistakes.add(
                ConfigError(
                    f"{where}: the prompt has token {max(tokens)}, and {self._what} a vocab_size of "
                    f"{self._limits.vocab_size}"
                )
            )


def _place(problem: Example) -> str:
    return problem.where or f"prompt {problem.prompt[:40]!r}"


def _cannot(what: str, error: Exception) -> str:
    first = str(error).strip().partition("\n")[0] or type(error).__name__
    return f"the tokenizer of {what} cannot take the prompt: {first[:200].rstrip('. ')}"
