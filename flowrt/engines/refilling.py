"""Keys and values by new weights, made while sequences run on with the old ones.

After a swap in flight everything that runs has to be computed again, which takes as long as many decode steps. So a
second copy of the model takes the new weights, and goes over what has been made so far, on a thread of its own; when it
is a few tokens behind, the engine stops between two tokens and goes on with the second copy, whose first decode step
computes these few as well.

Shapes: R rows, L the padded length of what is filled, T tokens a row that are filled behind what is there.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from flowrt.engines.checkpoint import named_parameters
from flowrt.engines.row_cache import RowCache
from flowrt.transport.weights import Snapshot

FEW_TOKENS = 2
"""So far behind, the decode step that computes them as well takes little longer than another."""
MOST_ROUNDS = 4
"""What runs may be as fast as what follows it."""
Step = Callable[[Any, RowCache, torch.Tensor], torch.Tensor]
"""Logits [R, V] of a model after these tokens of the cache's first rows, at the positions that it was given."""
NONE_KEPT = torch.zeros(1, dtype=torch.long)


class CachedModel:
    """A model and the keys and values of what it computes."""

    def __init__(self, model: Any, rows: int, step: Step | None = None) -> None:
        self.model = model
        self.cache = RowCache(model.config.num_hidden_layers, rows)
        self.step = step
        config = model.config.get_text_config()
        self._adds_mask = model.config._attn_implementation == "eager"  # it adds the mask to its scores
        self._window: int | None = getattr(config, "sliding_window", None)
        self._kinds = set(getattr(config, "layer_types", None) or ["sliding_attention"])

    def forward(
        self, tokens: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor, kept_U: torch.Tensor
    ) -> torch.Tensor:
        """Logits at the kept positions. The whole model is called, so whatever it does to its logits is done."""
        out = self.model(
            input_ids=tokens,
            attention_mask=self._masks(mask, positions),
            position_ids=positions,
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=kept_U,
        )
        logits: torch.Tensor = out.logits
        return logits

    def _masks(self, mask: torch.Tensor, positions: torch.Tensor) -> torch.Tensor | dict[str, torch.Tensor]:
        """As the model takes them: a sliding window is not in a mask that is handed to it, and layers may differ."""
        masks = {"full_attention": mask}
        if self._window:
            near = torch.arange(mask.shape[-1]) > positions.unsqueeze(2) - self._window
            masks["sliding_attention"] = mask & near.unsqueeze(1)
        if self._adds_mask:
            least = torch.finfo(torch.float32).min
            masks = {kind: torch.zeros(one.shape).masked_fill(~one, least) for kind, one in masks.items()}
        if not self._window or "sliding_attention" not in self._kinds:
            return masks["full_attention"]
        return masks if "full_attention" in self._kinds else masks["sliding_attention"]

    def fill(self, sequences: Sequence[torch.Tensor], rows: Sequence[int]) -> None:
        """Compute these sequences from their beginning, into these rows."""
        count, longest = len(sequences), max(len(sequence) for sequence in sequences)
        tokens_RL = torch.nn.utils.rnn.pad_sequence(list(sequences), batch_first=True)
        self.cache.begin_prefill(longest)
        mask = torch.ones(longest, longest, dtype=torch.bool).tril().expand(count, 1, longest, longest)
        self.forward(tokens_RL, mask, torch.arange(longest).expand(count, longest), NONE_KEPT)
        self.cache.settle(torch.tensor(rows), torch.arange(count))

    def decode(self, tokens_R: torch.Tensor, positions_R: torch.Tensor) -> torch.Tensor:
        """Logits [R, V] after one token more of each of the first rows, at these positions; no others are in use."""
        longest = int(positions_R.max()) + 1
        self.cache.begin_decode(positions_R, longest)
        if self.step is not None:
            return self.step(self.model, self.cache, tokens_R)
        mask = (torch.arange(longest) <= positions_R.unsqueeze(1))[:, None, None, :]
        return self.forward(tokens_R.unsqueeze(1), mask, positions_R.unsqueeze(1), NONE_KEPT)[:, 0]

    def extend(self, sequences: Sequence[torch.Tensor], tokens: int) -> torch.Tensor:
        """Compute the last so many tokens of all of the first rows, behind what is there; logits after the last one."""
        lengths_R = torch.tensor([len(sequence) for sequence in sequences])
        longest = int(lengths_R.max())
        # Of a shorter sequence its first token several times, always with the same result.
        positions_RT = (lengths_R.unsqueeze(1) - tokens + torch.arange(tokens)).clamp(min=0)
        padded_RL = torch.nn.utils.rnn.pad_sequence(list(sequences), batch_first=True)
        mask = (torch.arange(longest) <= positions_RT.unsqueeze(2)).unsqueeze(1)
        self.cache.begin_decode(positions_RT, longest)
        return self.forward(padded_RL.gather(1, positions_RT), mask, positions_RT, torch.tensor([tokens - 1]))


class Ahead:
    """The second copy. Used by one thread at a time."""

    def __init__(self, first: CachedModel) -> None:
        self._like = first
        self.cached: CachedModel | None = None
        self.version = -1
        self._rounds = 0
        self._done: dict[int, int] = {}  # by key, in the order of rows: how much of the sequence is computed

    def begin(self, version: int) -> None:
        if version != self.version:
            self.version, self._rounds, self._done = version, 0, {}

    def behind(self, sequences: Mapping[int, torch.Tensor]) -> int:
        """Tokens that have to be computed before these sequences can go on."""
        return max((len(tokens) - self._done.get(key, 0) for key, tokens in sequences.items()), default=0)

    def is_ready(self, version: int) -> bool:
        """It has these weights, and keys and values by them."""
        return version == self.version and self._rounds > 0

    def is_near(self, sequences: Mapping[int, torch.Tensor]) -> bool:
        return self._rounds >= MOST_ROUNDS or (self._rounds > 0 and self.behind(sequences) <= FEW_TOKENS)

    @torch.inference_mode()
    def follow(self, snapshot: Snapshot, sequences: Mapping[int, torch.Tensor]) -> None:
        """Take the weights, if they are not here, and compute what these sequences have that is not computed yet."""
        if self.cached is None:
            with torch.inference_mode(False):
                model = copy.deepcopy(self._like.model)
                self.cached = CachedModel(model, self._like.cache.rows, self._like.step)
        if not self._rounds:
            snapshot.restore(named_parameters(self.cached.model))
        self._rounds += 1
        missing = self._arrange(self.cached, sequences)
        if missing:
            self.cached.extend(list(sequences.values()), missing)
        self._done = {key: len(tokens) for key, tokens in sequences.items()}

    def _arrange(self, cached: CachedModel, sequences: Mapping[int, torch.Tensor]) -> int:
        """Bring rows into their present order, fill new ones; returns how many tokens the others still lack at most."""
        before = {key: row for row, key in enumerate(self._done)}
        new = [row for row, key in enumerate(sequences) if key not in before]
        todo = list(sequences.values())
        if before:
            cached.cache.pick([before.get(key, 0) for key in sequences])
        if new:
            cached.fill([todo[row] for row in new], new)
        return max((len(tokens) - self._done[key] for key, tokens in sequences.items() if key in before), default=0)

    @torch.inference_mode()
    def exchange(self, first: CachedModel, sequences: Mapping[int, torch.Tensor]) -> tuple[CachedModel, int]:
        """The second copy, to go on with, and how many tokens of a row it lacks; the first is for the next version."""
        assert self.cached is not None
        missing = self._arrange(self.cached, sequences)
        found, self.cached = self.cached, first
        self.version = -1
        return found, missing
