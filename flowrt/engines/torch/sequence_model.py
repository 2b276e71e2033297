"""Generation with a transformers cache for each sequence: for models whose state is not rows of keys and values.

Linear attention, state spaces, convolutions, recurrent cells, indexers, chunks: each model builds its own cache for one
sequence without padding, and continues it by one token at a time. So nothing of a sequence depends on the others, and
no assumption is made about the contents of a state. Slower than `CachedModel`, which computes all rows at once.

Shapes: R rows, P sequences, L tokens, V vocabulary.
"""

import copy
import inspect
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from flowrt.errors import EngineError

STATE_ARGUMENTS = ("cache", "past_key_values", "cache_params", "state")
"""Names of the argument, and of the field of the output, that has a model's state, newest name first."""
MAX_STEPS = 16
"""Missing tokens of a sequence up to which they are computed one by one; above, the whole sequence at once."""


class SequenceStates:
    """The state of each row, and the number of its tokens."""

    def __init__(self, rows: int, device: torch.device) -> None:
        self.rows = rows
        self.capacity = 0
        self.row_index_R = torch.arange(rows, device=device)
        self.states: list[Any] = [None] * rows
        self.lengths: list[int] = [0] * rows

    def copy(self, source: int, targets: slice, length: int) -> None:  # noqa: ARG002 (a state is copied as a whole)
        for target in range(*targets.indices(self.rows)):
            self.states[target] = copy.deepcopy(self.states[source])
            self.lengths[target] = self.lengths[source]

    def pick(self, sources: Mapping[int, int], length: int) -> None:  # noqa: ARG002
        states, lengths = list(self.states), list(self.lengths)
        for target, source in sources.items():
            self.states[target] = copy.deepcopy(states[source]) if target != source else states[source]
            self.lengths[target] = lengths[source]


class SequenceModel:
    """A causal LM and a state for each row. Implements `GeneratingModel`.

    Args:
        model: the model.
        rows: maximum number of running sequences.
        is_cached: whether a state is a cache of the model's own class, else the tokens themselves: each token is then
            computed with the whole sequence before it.

    Raises EngineError if the model takes no cache.
    """

    def __init__(self, model: Any, rows: int, *, is_cached: bool = True) -> None:
        self.model = model
        self.device: torch.device = next(model.parameters()).device
        self.cache = SequenceStates(rows, self.device)
        parameters = inspect.signature(model.forward).parameters
        self._is_cached = is_cached
        names = [name for name in STATE_ARGUMENTS if name in parameters]
        if is_cached and not names:
            raise EngineError(f"{type(model).__name__} takes no cache, so it cannot generate token by token")
        self._argument = names[0] if is_cached else ""
        self._keeps_last = {"logits_to_keep": 1} if "logits_to_keep" in parameters else {}
        self._takes_positions = "position_ids" in parameters

    def twin(self, model: Any) -> "SequenceModel":
        return SequenceModel(model, self.cache.rows, is_cached=self._is_cached)

    def chunk(self, lengths: Sequence[int]) -> int:  # noqa: ARG002
        return 1

    def piece(self, start: int) -> int:  # noqa: ARG002
        return sys.maxsize

    def rows_at_once(self, tokens: int, longest: int) -> int:  # noqa: ARG002
        return 1

    def fill(self, sequences: Sequence[torch.Tensor], rows: Sequence[int]) -> None:
        for sequence, row in zip(sequences, rows, strict=True):
            self._compute(sequence, row)

    def prefill(self, sequences: Sequence[torch.Tensor], rows: Sequence[int]) -> torch.Tensor:
        return torch.cat([self._compute(sequence, row) for sequence, row in zip(sequences, rows, strict=True)])

    def advance(self, sequence: torch.Tensor, row: int, start: int) -> tuple[int, torch.Tensor]:
        return len(sequence), self._extend_row(sequence, row) if start else self._compute(sequence, row)

    def decode(
        self,
        tokens_R: torch.Tensor,
        positions_R: torch.Tensor,  # noqa: ARG002 (a state knows its position)
        longest: int,  # noqa: ARG002
    ) -> torch.Tensor:
        return torch.cat([self._step(tokens_R[row : row + 1], row) for row in range(len(tokens_R))])

    def extend(self, sequences: Sequence[torch.Tensor], tokens: int) -> torch.Tensor:
        return self.extend_block(sequences, tokens, 0)

    def extend_block(
        self,
        sequences: Sequence[torch.Tensor],
        tokens: int,  # noqa: ARG002 (a state knows its tokens)
        first: int,
    ) -> torch.Tensor:
        return torch.cat([self._extend_row(sequence, row) for row, sequence in enumerate(sequences, first)])

    def _extend_row(self, sequence: torch.Tensor, row: int) -> torch.Tensor:
        """Logits [1, V] after a sequence of which the row has the first tokens."""
        missing = len(sequence) - self.cache.lengths[row]
        if not 0 < missing <= (MAX_STEPS if self._is_cached else 1):
            return self._compute(sequence, row)
        for token_1 in sequence[-missing:].to(self.device).split(1):
            logits_1V = self._step(token_1, row)
        return logits_1V

    def _compute(self, sequence: torch.Tensor, row: int) -> torch.Tensor:
        """Logits [1, V] after a sequence, which is computed as a whole into this row."""
        self.cache.states[row] = None
        self.cache.lengths[row] = 0
        return self._step(sequence.to(self.device), row)

    def _step(self, tokens_L: torch.Tensor, row: int) -> torch.Tensor:
        """Logits [1, V] after the next tokens of this row."""
        logits_1V: torch.Tensor
        state, start = self.cache.states[row], self.cache.lengths[row]
        self.cache.lengths[row] += len(tokens_L)
        if not self._is_cached:
            whole_L = tokens_L.long() if state is None else torch.cat([state, tokens_L.long()])
            self.cache.states[row] = whole_L
            logits_1V = self.model(input_ids=whole_L.unsqueeze(0), use_cache=False, **self._keeps_last).logits[:, -1]
            return logits_1V
        given: dict[str, Any] = {"use_cache": True, **self._keeps_last}
        if state is not None:
            given[self._argument] = state
            if self._takes_positions:  # some models derive them from the first layer's cache, which may have no length
                given["position_ids"] = torch.arange(start, start + len(tokens_L), device=self.device).unsqueeze(0)
        out = self.model(input_ids=tokens_L.long().unsqueeze(0), **given)
        self.cache.states[row] = getattr(out, self._argument)
        logits_1V = out.logits[:, -1]
        return logits_1V
