"""Models with a key-value cache, for continuous batching, and the update of their weights while sequences run.

- Running sequences occupy the first rows of the cache without gaps, so a decode step works on views, never on copies.
  Each row has its own length; a mask limits attention to the row's own positions. Any transformers decoder works.
- The cache uses huge pages (2 MiB) where available. Each token reads all keys and values of its row, a few kilobytes at
  addresses too far apart for the TLB with small pages. Linux provides huge pages to aligned memory for which they are
  requested (madvise); neither malloc nor torch requests them.
- After an in-flight update the cache of all running sequences has to be recomputed, which takes as long as many decode
  steps. So a second copy of the model gets the new weights and processes the tokens generated so far, on another
  thread. When the copy is only a few tokens behind, the engine switches to it between two tokens; the first decode step
  of the copy also computes the missing tokens.

Shapes: R rows, L padded length of a prefill, T tokens per row of an extension, U positions whose logits are used,
V vocabulary.
"""

import copy
import inspect
import math
import mmap
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from flowrt.engines.hf import named_parameters
from flowrt.transport.weights.snapshot import Snapshot

CPU = torch.device("cpu")
PAGE_BYTES = 2 << 20
ADVICE: int | None = getattr(mmap, "MADV_HUGEPAGE", None)  # Linux only


def zeros(shape: Sequence[int], like: torch.Tensor) -> torch.Tensor:
    """Zeros with the dtype and device of ``like``; in huge pages if on the CPU and at least one page large."""
    size = math.prod(shape) * like.element_size()
    if ADVICE is None or not like.is_cpu or size < PAGE_BYTES:
        return like.new_zeros(tuple(shape))
    try:
        memory = mmap.mmap(-1, size + PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory.madvise(ADVICE)
    except OSError:  # no huge pages, or out of memory, for which torch raises a clearer error
        return like.new_zeros(tuple(shape))
    buffer = torch.frombuffer(memory, dtype=torch.uint8)  # zero-filled; keeps the mapping alive
    start = -buffer.data_ptr() % PAGE_BYTES
    return buffer[start : start + size].view(like.dtype).view(tuple(shape))


GROWTH = 64
"""The capacity (positions per row) is a multiple of this number."""


class _RowLayer(CacheLayerMixin):  # type: ignore[misc]
    """One decoder layer's keys and values: [rows, heads, capacity, head_dim]."""

    def __init__(self, cache: "RowCache") -> None:
        super().__init__()
        self._cache = cache
        self.fresh: tuple[torch.Tensor, torch.Tensor] | None = None

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        rows, capacity = self._cache.rows, self._cache.capacity
        self.keys = zeros((rows, key_states.shape[1], capacity, key_states.shape[3]), key_states)
        self.values = zeros((rows, value_states.shape[1], capacity, value_states.shape[3]), value_states)
        self.is_initialized = True

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        *args: Any,  # noqa: ARG002
        **kwargs: Any,  # noqa: ARG002
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        positions = self._cache.positions_R
        if positions is None:  # prefill: rows are assigned by store_prefill
            self.fresh = (key_states, value_states)
            return key_states, value_states
        count, longest = len(positions), self._cache.longest
        places = self._cache.places(self.keys.shape[1])
        for slab, states in ((self.keys, key_states), (self.values, value_states)):
            width = slab.shape[3]
            slab.view(-1, width).index_copy_(0, places, states.reshape(-1, width))
        return self.keys[:count, :, :longest], self.values[:count, :, :longest]

    def store_prefill(self, rows: torch.Tensor, sources: torch.Tensor) -> None:
        """Copy the prefill of prompt ``sources[i]`` into row ``rows[i]``."""
        assert self.fresh is not None
        keys, values = self.fresh
        self.keys[rows, :, : keys.shape[2]] = keys[sources]
        self.values[rows, :, : values.shape[2]] = values[sources]
        self.fresh = None

    def grow(self, capacity: int) -> None:
        if self.is_initialized:
            self.keys, self.values = _grown(self.keys, capacity), _grown(self.values, capacity)

    def move(self, source: int, target: int) -> None:
        self.keys[target].copy_(self.keys[source])
        self.values[target].copy_(self.values[source])

    def pick(self, sources: torch.Tensor) -> None:
        if self.is_initialized:
            self.keys[: len(sources)] = self.keys[sources]
            self.values[: len(sources)] = self.values[sources]

    def get_seq_length(self) -> int:
        return 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0

    def get_max_length(self) -> int:
        return -1


def _grown(slab: torch.Tensor, capacity: int) -> torch.Tensor:
    rows, heads, places, width = slab.shape
    larger = zeros((rows, heads, capacity, width), slab)
    larger[:, :, :places] = slab
    return larger


class RowCache(Cache):  # type: ignore[misc]
    """The cache of all layers, and the positions that the next update writes to."""

    def __init__(self, layers: int, rows: int, device: torch.device = CPU) -> None:
        self.rows = rows
        self.device = device
        self.capacity = GROWTH
        self.positions_R: torch.Tensor | None = None
        self.longest = 0
        self.row_index_R = torch.arange(rows, device=device)
        self._places: dict[int, torch.Tensor] = {}
        super().__init__(layers=[_RowLayer(self) for _ in range(layers)])

    def begin_prefill(self, longest: int) -> None:
        """Announce a prefill of at most ``longest`` tokens per row as the next update; `store_prefill` completes it."""
        self.reserve(longest)
        self.positions_R = None

    def begin_decode(self, positions_R: torch.Tensor, longest: int) -> None:
        """Announce that the next update writes one token per row at positions [R], or T tokens at positions [R, T].

        ``longest`` is the largest position plus 1.
        """
        self.reserve(longest)
        self.positions_R = positions_R
        self.longest = longest
        self._places.clear()

    def places(self, heads: int) -> torch.Tensor:
        """Flat indices of this step's tokens in a layer with ``heads`` heads, in order of row, head, token."""
        assert self.positions_R is not None
        if heads not in self._places:
            rows = self.row_index_R[: len(self.positions_R), None] * heads + torch.arange(heads, device=self.device)
            places = rows.unsqueeze(2) * self.capacity + self.positions_R.view(len(rows), 1, -1)
            self._places[heads] = places.flatten()
        return self._places[heads]

    def slabs(self, rows: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Keys and values of the first ``rows`` rows: lists over layers, [rows, heads, capacity, head_dim] each."""
        return [layer.keys[:rows] for layer in self.layers], [layer.values[:rows] for layer in self.layers]

    def store_prefill(self, rows: torch.Tensor, sources: torch.Tensor) -> None:
        """Copy the prefill of prompt ``sources[i]`` into row ``rows[i]``."""
        for layer in self.layers:
            layer.store_prefill(rows, sources)

    def move(self, source: int, target: int) -> None:
        """Copy row ``source`` to row ``target``."""
        for layer in self.layers:
            layer.move(source, target)

    def pick(self, sources: list[int]) -> None:
        """Copy row ``sources[i]`` to row i, simultaneously for all i."""
        if sources != list(range(len(sources))):
            for layer in self.layers:
                layer.pick(torch.tensor(sources, device=self.device))

    def reserve(self, length: int) -> None:
        """Grow the capacity to at least ``length`` positions a row."""
        if length > self.capacity:
            self.capacity = -(-length // GROWTH) * GROWTH
            for layer in self.layers:
                layer.grow(self.capacity)


FEW_TOKENS = 2
"""Lag at which the engine switches: one decode step can compute this number of tokens more at little extra cost."""
MAX_ROUNDS = 4
"""Maximum number of catch-up rounds, since generation may be as fast as catching up."""
Step = Callable[["CachedModel", torch.Tensor], torch.Tensor]
"""Decode step: logits [R, V] of a model after tokens [R] of its cache's first rows, at the cache's positions."""


class CachedModel:
    """A model and its KV cache, one row per running sequence."""

    def __init__(self, model: Any, rows: int, step: Step | None = None) -> None:
        self.model = model
        self.device: torch.device = next(model.parameters()).device
        self.cache = RowCache(model.config.num_hidden_layers, rows, self.device)
        self.step = step
        self._first_U = torch.zeros(1, dtype=torch.long, device=self.device)
        config = model.config.get_text_config()
        # The name of the cache's argument since transformers 5.24, and before.
        self._cache_argument = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
        self._adds_mask = (
            model.config._attn_implementation == "eager"
        )  # adds the mask to the scores, so it must be float
        self._window: int | None = getattr(config, "sliding_window", None)
        self._kinds = set(getattr(config, "layer_types", None) or ["sliding_attention"])

    def forward(
        self, tokens: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor, kept_U: torch.Tensor
    ) -> torch.Tensor:
        """Logits at positions ``kept_U``. Calls the full model, including any processing of its logits."""
        out = self.model(
            input_ids=tokens,
            attention_mask=self._masks(mask, positions),
            position_ids=positions,
            use_cache=True,
            logits_to_keep=kept_U,
            **{self._cache_argument: self.cache},
        )
        logits: torch.Tensor = out.logits
        return logits

    def _masks(self, mask: torch.Tensor, positions: torch.Tensor) -> torch.Tensor | dict[str, torch.Tensor]:
        """Masks in the form the model needs: given masks must include sliding windows, which may differ by layer."""
        masks = {"full_attention": mask}
        if self._window:
            near = torch.arange(mask.shape[-1], device=mask.device) > positions.unsqueeze(2) - self._window
            masks["sliding_attention"] = mask & near.unsqueeze(1)
        if self._adds_mask:
            least = torch.finfo(torch.float32).min
            masks = {
                kind: torch.zeros(one.shape, device=one.device).masked_fill(~one, least) for kind, one in masks.items()
            }
        if not self._window or "sliding_attention" not in self._kinds:
            return masks["full_attention"]
        return masks if "full_attention" in self._kinds else masks["sliding_attention"]

    def fill(self, sequences: Sequence[torch.Tensor], rows: Sequence[int]) -> None:
        """Prefill these sequences of token ids, which are on the CPU, into these rows."""
        count = len(sequences)
        tokens_RL = torch.nn.utils.rnn.pad_sequence(list(sequences), batch_first=True).to(self.device)
        self.prefill(tokens_RL, self._first_U)
        self.cache.store_prefill(torch.tensor(rows, device=self.device), torch.arange(count, device=self.device))

    def prefill(self, tokens_PL: torch.Tensor, kept_U: torch.Tensor) -> torch.Tensor:
        """Logits [P, U, V] at positions ``kept_U`` of P right-padded prompts; then call `RowCache.store_prefill`."""
        count, longest = tokens_PL.shape
        self.cache.begin_prefill(longest)
        square = torch.ones(longest, longest, dtype=torch.bool, device=self.device).tril()
        positions_PL = torch.arange(longest, device=self.device).expand(count, longest)
        return self.forward(tokens_PL, square.expand(count, 1, longest, longest), positions_PL, kept_U)

    def decode(self, tokens_R: torch.Tensor, positions_R: torch.Tensor, longest: int) -> torch.Tensor:
        """Logits [R, V] after one more token of each of the first rows, at these positions. No other row is in use.

        ``longest`` is the largest position plus 1, which the host knows without waiting for the device.
        """
        self.cache.begin_decode(positions_R, longest)
        return self.decode_eagerly(tokens_R) if self.step is None else self.step(self, tokens_R)

    def decode_eagerly(self, tokens_R: torch.Tensor) -> torch.Tensor:
        """Logits [R, V] after these tokens, at the positions given to `RowCache.begin_decode`."""
        positions_R = self.cache.positions_R
        assert positions_R is not None
        mask = (torch.arange(self.cache.longest, device=self.device) <= positions_R.unsqueeze(1))[:, None, None, :]
        return self.forward(tokens_R.unsqueeze(1), mask, positions_R.unsqueeze(1), self._first_U)[:, 0]

    def extend(self, sequences: Sequence[torch.Tensor], tokens: int) -> torch.Tensor:
        """Compute the last ``tokens`` tokens of each of the first rows. Returns logits [R, 1, V] after the last one.

        The sequences are on the CPU.
        """
        lengths_R = torch.tensor([len(sequence) for sequence in sequences])
        longest = int(lengths_R.max())
        # A shorter sequence repeats its first token, with the same result each time.
        positions_RT = (lengths_R.unsqueeze(1) - tokens + torch.arange(tokens)).clamp(min=0)
        padded_RL = torch.nn.utils.rnn.pad_sequence(list(sequences), batch_first=True)
        tokens_RT = padded_RL.gather(1, positions_RT).to(self.device)
        mask = (torch.arange(longest) <= positions_RT.unsqueeze(2)).unsqueeze(1).to(self.device)
        positions_RT = positions_RT.to(self.device)
        self.cache.begin_decode(positions_RT, longest)
        return self.forward(tokens_RT, mask, positions_RT, torch.tensor([tokens - 1], device=self.device))


class ShadowModel:
    """A copy of the model, whose KV cache is computed with new weights during generation.

    Used by one thread at a time.
    """

    def __init__(self, first: CachedModel, published: torch.dtype | None = None) -> None:
        """``published``: dtype of the versions, if it differs from the model's."""
        self._original = first
        self._published = published
        self.cached: CachedModel | None = None
        self.version = -1
        self._rounds = 0
        self._computed: dict[int, int] = {}  # by key, in the order of rows: tokens of the sequence in the cache

    def begin(self, version: int) -> None:
        """Start catching up with the weights of this version, unless already started."""
        if version != self.version:
            self.version = version
            self._rounds = 0
            self._computed = {}

    def lag(self, sequences: Mapping[int, torch.Tensor]) -> int:
        """Largest number of tokens of a sequence that are not computed yet."""
        return max((len(tokens) - self._computed.get(key, 0) for key, tokens in sequences.items()), default=0)

    def is_ready(self, version: int) -> bool:
        """Whether the copy has the weights of this version and a KV cache computed with them."""
        return version == self.version and self._rounds > 0

    def has_caught_up(self, sequences: Mapping[int, torch.Tensor]) -> bool:
        """Whether the engine should switch now: the lag is small enough, or MAX_ROUNDS are used up."""
        return self._rounds >= MAX_ROUNDS or (self._rounds > 0 and self.lag(sequences) <= FEW_TOKENS)

    @torch.inference_mode()
    def catch_up(self, snapshot: Snapshot, sequences: Mapping[int, torch.Tensor]) -> None:
        """Load the weights in the first round, and compute the missing tokens of these sequences."""
        if self.cached is None:
            with torch.inference_mode(False):
                model = copy.deepcopy(self._original.model)
                self.cached = CachedModel(model, self._original.cache.rows, self._original.step)
        if not self._rounds:
            snapshot.restore(named_parameters(self.cached.model), self._published)
        self._rounds += 1
        missing = self._arrange(self.cached, sequences)
        if missing:
            self.cached.extend(list(sequences.values()), missing)
        self._computed = {key: len(tokens) for key, tokens in sequences.items()}

    def _arrange(self, cached: CachedModel, sequences: Mapping[int, torch.Tensor]) -> int:
        """Reorder rows, prefill new sequences. Returns the largest number of missing tokens of the other sequences."""
        old_rows = {key: row for row, key in enumerate(self._computed)}
        new = [row for row, key in enumerate(sequences) if key not in old_rows]
        tokens_of = list(sequences.values())
        if old_rows:
            cached.cache.pick([old_rows.get(key, 0) for key in sequences])
        if new:
            cached.fill([tokens_of[row] for row in new], new)
        return max(
            (len(tokens) - self._computed[key] for key, tokens in sequences.items() if key in old_rows), default=0
        )

    @torch.inference_mode()
    def swap_in(self, replaced: CachedModel, sequences: Mapping[int, torch.Tensor]) -> tuple[CachedModel, int]:
        """Exchange models: returns the copy and the largest number of missing tokens of its rows.

        ``replaced``, the model used so far, becomes the copy for the next update.
        """
        assert self.cached is not None
        missing = self._arrange(self.cached, sequences)
        current = self.cached
        self.cached = replaced
        self.version = -1
        return current, missing
