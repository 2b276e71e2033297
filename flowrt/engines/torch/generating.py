"""What the rollout engine needs of a model that generates: rows of state, prefill, decode steps, catching up.

`CachedModel` keeps rows of keys and values; `SequenceModel` keeps a transformers cache for each sequence.

Shapes: R rows, P sequences of a chunk, V vocabulary.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, Self

import torch


class SequenceRows(Protocol):
    """The states of running sequences, which occupy the first rows without gaps."""

    row_index_R: torch.Tensor
    """0, 1, … on the device of the model."""

    @property
    def rows(self) -> int:
        """Maximum number of sequences."""
        ...

    @property
    def capacity(self) -> int:
        """Number of tokens for which each row has memory; 0: the state of a row has no size in tokens."""
        ...

    def copy(self, source: int, targets: slice, length: int) -> None:
        """Copy the state of row ``source``, after ``length`` tokens, to the rows ``targets``."""
        ...

    def pick(self, sources: Mapping[int, int], length: int) -> None:
        """Copy the state of row ``sources[i]``, after at most ``length`` tokens, to row i, simultaneously for all i."""
        ...


class GeneratingModel(Protocol):
    """A causal LM and the states of its running sequences. Sequences of token ids are on the CPU."""

    model: Any
    device: torch.device

    @property
    def cache(self) -> SequenceRows: ...

    def twin(self, model: Any) -> Self:
        """The same for another copy of the model, with empty rows."""
        ...

    def chunk(self, lengths: Sequence[int]) -> int:
        """Number of sequences, from the first one on, that `prefill` computes at once: at least one."""
        ...

    def piece(self, start: int) -> int:
        """Largest number of tokens that one pass computes of a sequence of which a row has ``start`` tokens."""
        ...

    def fill(self, sequences: Sequence[torch.Tensor], rows: Sequence[int]) -> None:
        """Prefill these sequences into these rows."""
        ...

    def prefill(self, sequences: Sequence[torch.Tensor], rows: Sequence[int]) -> torch.Tensor:
        """Prefill a chunk of sequences into these rows. Returns the logits [P, V] after each one's last token."""
        ...

    def advance(self, sequence: torch.Tensor, row: int, start: int) -> tuple[int, torch.Tensor]:
        """Compute the next piece of a sequence, of which ``start`` tokens are in this row.

        Returns the number of tokens in the row then, and the logits [1, V] after the last of them.
        """
        ...

    def decode(self, tokens_R: torch.Tensor, positions_R: torch.Tensor, longest: int) -> torch.Tensor:
        """Logits [R, V] after one more token of each of the first rows, at these positions. No other row is in use.

        ``longest`` is the largest position plus 1.
        """
        ...

    def extend(self, sequences: Sequence[torch.Tensor], tokens: int) -> torch.Tensor:
        """Compute the last ``tokens`` tokens of each of the first rows. Returns logits [R, V] after the last one."""
        ...

    def extend_block(self, sequences: Sequence[torch.Tensor], tokens: int, first: int) -> torch.Tensor:
        """As `extend`, for the rows from ``first`` on, in one pass."""
        ...

    def rows_at_once(self, tokens: int, longest: int) -> int:
        """Number of rows with this number of new tokens each in one pass, of which a row has ``longest`` then."""
        ...
