"""Models with a key-value cache, for continuous batching, and the update of their weights while sequences run.

- A prefill comes in chunks of at most PREFILL_TOKENS tokens: several short sequences, right-padded, or a piece of a
  long one. Causal attention needs no mask for right padding; the mask of a later piece has at most SCORE_ELEMENTS
  elements. The head computes the logits of one position a row.

- Running sequences occupy the first rows of the cache without gaps, so a decode step works on views, never on copies.
  Each row has its own length; a mask limits attention to the row's own positions. Any transformers decoder works.
- The cache uses huge pages (2 MiB) where available. Each token reads all keys and values of its row, a few kilobytes at
  addresses too far apart for the TLB with small pages. Linux provides huge pages to aligned memory for which they are
  requested (madvise); neither malloc nor torch requests them.
- After an in-flight update the cache of all running sequences has to be recomputed, which takes as long as many decode
  steps. So a second copy of the model gets the new weights and processes the tokens generated so far, on another
  thread and, on an accelerator, on another stream. When the copy is only a few tokens behind, the engine switches to it
  between two tokens; the first decode step of the copy also computes the missing tokens.

Shapes: R rows, P rows of a chunk, L padded length of a chunk, T tokens per row of an extension, K cache positions that
a pass reads, V vocabulary.
"""

import copy
import inspect
import math
import mmap
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from flowrt.engines.hf import head_on, named_parameters
from flowrt.engines.torch.descriptor import PREFILL_TOKENS, SCORE_ELEMENTS
from flowrt.engines.torch.generating import GeneratingModel
from flowrt.transport.devices import SideStream, keep_until_read
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
MAX_UNUSED = 8
"""A cache that grows has room for 1/MAX_UNUSED more positions than are needed, so that it is not copied too often."""
COPY_ELEMENTS = 1 << 22
"""Rows that are exchanged are copied in slices of positions with at most this number of elements."""


class _RowLayer(CacheLayerMixin):  # type: ignore[misc]
    """One decoder layer's keys and values: [rows, heads, capacity, head_dim]."""

    def __init__(self, cache: "RowCache") -> None:
        super().__init__()
        self._cache = cache

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
        cache = self._cache
        if cache.prefilled_P is not None:
            self.keys[cache.prefilled_P, :, : key_states.shape[2]] = key_states
            self.values[cache.prefilled_P, :, : value_states.shape[2]] = value_states
            return key_states, value_states  # all that causal attention reads
        assert cache.positions_R is not None
        rows = slice(cache.first, cache.first + len(cache.positions_R))
        places = cache.places(self.keys.shape[1])
        for slab, states in ((self.keys, key_states), (self.values, value_states)):
            width = slab.shape[3]
            slab.view(-1, width).index_copy_(0, places, states.reshape(-1, width))
        return self.keys[rows, :, : cache.longest], self.values[rows, :, : cache.longest]

    def grow(self, capacity: int, rows: int) -> None:
        """Enlarge the capacity; the first ``rows`` rows are in use."""
        if self.is_initialized:  # one after the other: at most one of them exists twice
            self.keys = _grown(self.keys, capacity, rows)
            self.values = _grown(self.values, capacity, rows)

    def copy(self, source: int, targets: slice, length: int) -> None:
        for slab in (self.keys, self.values):
            slab[targets, :, :length] = slab[source, :, :length]

    def pick(self, targets: torch.Tensor, sources: torch.Tensor, length: int) -> None:
        for slab in (self.keys, self.values) if self.is_initialized else ():
            height = max(1, COPY_ELEMENTS // (len(targets) * slab.shape[1] * slab.shape[3]))
            for start in range(0, length, height):
                part = slab[:, :, start : min(start + height, length)]
                part[targets] = part[sources]

    def get_seq_length(self) -> int:
        return 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0

    def get_max_length(self) -> int:
        return -1


def _grown(slab: torch.Tensor, capacity: int, used: int) -> torch.Tensor:
    rows, heads, places, width = slab.shape
    larger = zeros((rows, heads, capacity, width), slab)
    larger[:used, :, :places] = slab[:used]
    keep_until_read(slab)  # it may have been allocated on the other stream
    return larger


class RowCache(Cache):  # type: ignore[misc]
    """The cache of all layers, and the rows and positions that the next update writes to."""

    def __init__(self, layers: int, rows: int, device: torch.device = CPU) -> None:
        self.rows = rows
        self.device = device
        self.capacity = GROWTH
        self.used = 0  # rows, from the first one on, that were ever written
        self.prefilled_P: torch.Tensor | None = None
        self.positions_R: torch.Tensor | None = None
        self.first = 0
        self.longest = 0
        self.row_index_R = torch.arange(rows, device=device)
        self._places: dict[int, torch.Tensor] = {}
        super().__init__(layers=[_RowLayer(self) for _ in range(layers)])

    def begin_prefill(self, rows: Sequence[int], longest: int) -> None:
        """Announce that the next update writes the first ``longest`` positions of these rows."""
        self.reserve(longest)
        self.used = max(self.used, 1 + max(rows))
        self.prefilled_P = torch.tensor(rows, device=self.device)
        self.positions_R = None

    def begin_decode(self, positions_R: torch.Tensor, longest: int, first: int = 0) -> None:
        """Announce that the next update writes one token per row at positions [R], or T tokens at positions [R, T].

        Args:
            positions_R: positions in the rows from ``first`` on.
            longest: the largest position plus 1.
            first: the first row.
        """
        self.reserve(longest)
        self.used = max(self.used, first + len(positions_R))
        self.prefilled_P = None
        self.positions_R = positions_R
        self.first = first
        self.longest = longest
        self._places.clear()

    def places(self, heads: int) -> torch.Tensor:
        """Flat indices of this step's tokens in a layer with ``heads`` heads, in order of row, head, token."""
        assert self.positions_R is not None
        if heads not in self._places:
            rows_R1 = self.row_index_R[self.first : self.first + len(self.positions_R), None]
            rows = rows_R1 * heads + torch.arange(heads, device=self.device)
            places = rows.unsqueeze(2) * self.capacity + self.positions_R.view(len(rows), 1, -1)
            self._places[heads] = places.flatten()
        return self._places[heads]

    def slabs(self, rows: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Keys and values of the first ``rows`` rows: lists over layers, [rows, heads, capacity, head_dim] each."""
        return [layer.keys[:rows] for layer in self.layers], [layer.values[:rows] for layer in self.layers]

    def copy(self, source: int, targets: slice, length: int) -> None:
        """Copy the first ``length`` positions of row ``source`` to the rows ``targets``."""
        self.used = max(self.used, targets.stop)
        for layer in self.layers:
            layer.copy(source, targets, length)

    def pick(self, sources: Mapping[int, int], length: int) -> None:
        """Copy the first ``length`` positions of row ``sources[i]`` to row i, simultaneously for all i."""
        moved = {target: source for target, source in sources.items() if target != source}
        if moved:
            self.used = max(self.used, 1 + max(moved))
            targets = torch.tensor(list(moved), device=self.device)
            for layer in self.layers:
                layer.pick(targets, torch.tensor(list(moved.values()), device=self.device), length)

    def reserve(self, length: int) -> None:
        """Grow the capacity to at least ``length`` positions a row."""
        if length > self.capacity:
            larger = max(length, self.capacity + self.capacity // MAX_UNUSED)
            self.capacity = -(-larger // GROWTH) * GROWTH
            for layer in self.layers:
                layer.grow(self.capacity, self.used)


MIN_TOKENS = 512
"""Padded tokens of a chunk up to which padding costs less than another pass."""
MAX_PADDING = 1 / 8
"""Largest share of padding in a longer chunk, relative to the other tokens."""
FEW_TOKENS = 2
"""Lag at which the engine switches: one decode step can compute this number of tokens more at little extra cost."""
MAX_ROUNDS = 4
"""Maximum number of catch-up rounds, since generation may be as fast as catching up."""
Step = Callable[["CachedModel", torch.Tensor], torch.Tensor]
"""Decode step: logits [R, V] of a model after tokens [R] of its cache's first rows, at the cache's positions."""


class CachedModel:
    """A model and its KV cache, one row per running sequence. Sequences of token ids are on the CPU."""

    def __init__(self, model: Any, rows: int, step: Step | None = None) -> None:
        self.model = model
        self.device: torch.device = next(model.parameters()).device
        self.cache = RowCache(model.config.get_text_config().num_hidden_layers, rows, self.device)
        self.step = step
        config = model.config.get_text_config()
        # The name of the cache's argument since transformers 5.24, and before.
        self._cache_argument = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
        self._adds_mask = (
            model.config._attn_implementation == "eager"
        )  # adds the mask to the scores, so it must be float
        heads = int(getattr(config, "num_attention_heads", None) or 1)
        self._score_heads = heads if self._adds_mask else 1  # SDPA keeps no scores, and its mask is for all heads
        self._key_elements = heads * (vars(config).get("head_dim") or config.hidden_size // heads)
        self._window: int | None = getattr(config, "sliding_window", None)
        self._kinds = set(getattr(config, "layer_types", None) or ["sliding_attention"])

    def twin(self, model: Any) -> "CachedModel":
        """The same for another copy of the model, with empty rows."""
        return CachedModel(model, self.cache.rows, self.step)

    def forward(
        self,
        tokens: torch.Tensor,
        mask: torch.Tensor | None,
        positions: torch.Tensor,
        places_P: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Logits [P, V] at place ``places_P`` of each row; None: of rows with one token.

        Calls the full model, including any processing of its logits. Without a mask, all rows begin at position 0.
        """
        inputs = {
            "input_ids": tokens,
            "attention_mask": self._masks(mask, positions),
            "position_ids": positions,
            "use_cache": True,
            self._cache_argument: self.cache,
        }
        logits: torch.Tensor
        if places_P is None:
            logits = self.model(**inputs).logits
        else:
            rows_P = torch.arange(len(places_P), device=self.device)
            with head_on(self.model, lambda hidden_PLD: hidden_PLD[rows_P, places_P].unsqueeze(1)):
                logits = self.model(**inputs).logits
        return logits[:, 0]

    def _masks(
        self, mask: torch.Tensor | None, positions: torch.Tensor
    ) -> torch.Tensor | dict[str, torch.Tensor | None] | None:
        """Masks in the form the model needs: given masks must include sliding windows, which may differ by layer.

        None where attention is causal from position 0 on, which attention functions do without a mask.
        """
        length = positions.shape[1] if mask is None else mask.shape[-1]
        is_windowed = self._window is not None and self._window <= length
        full = near = mask
        if mask is None and (self._adds_mask or is_windowed):
            positions = positions[:1]  # equal in all rows
            near = torch.ones(length, length, dtype=torch.bool, device=self.device).tril()[None, None]
            full = near if self._adds_mask else None
        if self._window is not None and is_windowed and near is not None:
            in_window = torch.arange(length, device=self.device) > positions.unsqueeze(2) - self._window
            near = near & in_window.unsqueeze(1)
        masks = {"full_attention": full, "sliding_attention": near}
        if self._adds_mask:
            least = torch.finfo(torch.float32).min
            masks = {
                kind: torch.zeros(allowed.shape, device=allowed.device).masked_fill_(~allowed, least)
                for kind, allowed in masks.items()
                if allowed is not None
            }
        if not self._window or "sliding_attention" not in self._kinds:
            return masks["full_attention"]
        return masks if "full_attention" in self._kinds else masks["sliding_attention"]

    def chunk(self, lengths: Sequence[int]) -> int:
        """Number of sequences, from the first one on, that `prefill` computes at once: at least one.

        A sequence longer than `piece(0)` is alone; `advance` computes it.
        """
        longest = tokens = 0
        for count, length in enumerate(lengths, 1):
            longest, tokens = max(longest, length), tokens + length
            padded = count * longest
            is_large = padded > PREFILL_TOKENS or padded * longest * self._score_heads > SCORE_ELEMENTS
            if count > 1 and (is_large or padded > max(MIN_TOKENS, (1 + MAX_PADDING) * tokens)):
                return count - 1
        return len(lengths)

    def piece(self, start: int) -> int:
        """Largest number of tokens that one pass computes of a sequence with ``start`` tokens in the cache."""
        scores = self._score_heads * (start + PREFILL_TOKENS)
        return (
            PREFILL_TOKENS if not start and not self._adds_mask else min(PREFILL_TOKENS, -(-SCORE_ELEMENTS // scores))
        )

    def fill(self, sequences: Sequence[torch.Tensor], rows: Sequence[int]) -> None:
        """Prefill these sequences into these rows, chunk by chunk."""
        waiting = sorted(zip(sequences, rows, strict=True), key=lambda pair: len(pair[0]))
        while waiting:
            count = self.chunk([len(sequence) for sequence, _ in waiting])
            some, places = zip(*waiting[:count], strict=True)
            waiting = waiting[count:]
            if count > 1:
                self.prefill(some, places)
            else:
                self._advance_to_end(some[0], places[0], len(some[0]))

    def prefill(self, sequences: Sequence[torch.Tensor], rows: Sequence[int]) -> torch.Tensor:
        """Prefill a chunk of sequences into these rows. Returns the logits [P, V] after each one's last token."""
        lengths_P = torch.tensor([len(sequence) for sequence in sequences], device=self.device)
        tokens_PL = torch.nn.utils.rnn.pad_sequence([sequence.long() for sequence in sequences], batch_first=True)
        count, longest = tokens_PL.shape
        self.cache.begin_prefill(rows, longest)
        positions_PL = torch.arange(longest, device=self.device).expand(count, longest)
        return self.forward(tokens_PL.to(self.device), None, positions_PL, lengths_P - 1)

    def advance(self, sequence: torch.Tensor, row: int, start: int) -> tuple[int, torch.Tensor]:
        """Compute the next piece of a sequence, of which ``start`` tokens are in this row.

        Returns the number of tokens in the row then, and the logits [1, V] after the last of them.
        """
        self.cache.reserve(len(sequence))  # at once, as growing copies the cache
        end = min(len(sequence), start + self.piece(start))
        tokens_T = sequence[start:end]
        if not start:
            return end, self.prefill([tokens_T], [row])
        positions_1T = torch.arange(start, end, device=self.device).unsqueeze(0)
        return end, self._extend_rows(tokens_T.unsqueeze(0), positions_1T, end, row)

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
        return self.forward(tokens_R.unsqueeze(1), mask, positions_R.unsqueeze(1))

    def extend(self, sequences: Sequence[torch.Tensor], tokens: int) -> torch.Tensor:
        """Compute the last ``tokens`` tokens of each of the first rows. Returns logits [R, V] after the last one."""
        longest = max(map(len, sequences))
        if tokens > self.piece(longest):
            return torch.cat([self._advance_to_end(sequence, row, tokens) for row, sequence in enumerate(sequences)])
        count = self.rows_at_once(tokens, longest)
        blocks = range(0, len(sequences), count)
        return torch.cat([self.extend_block(sequences[first : first + count], tokens, first) for first in blocks])

    def extend_block(self, sequences: Sequence[torch.Tensor], tokens: int, first: int) -> torch.Tensor:
        """As `extend`, for the rows from ``first`` on, in one pass."""
        lengths_R1 = torch.tensor([len(sequence) for sequence in sequences]).unsqueeze(1)
        # A shorter sequence repeats its first token, with the same result each time.
        positions_RT = (lengths_R1 - tokens + torch.arange(tokens)).clamp(min=0)
        tokens_RT = torch.stack([sequence[at_T] for sequence, at_T in zip(sequences, positions_RT, strict=True)])
        return self._extend_rows(tokens_RT, positions_RT.to(self.device), int(lengths_R1.max()), first)

    def rows_at_once(self, tokens: int, longest: int) -> int:
        """Number of rows with this number of new tokens each in one pass, of which the cache has ``longest``."""
        scores = tokens * longest * self._score_heads
        copies = longest * self._key_elements  # SDPA with a mask copies keys that query heads share
        return int(max(1, min(PREFILL_TOKENS // tokens, SCORE_ELEMENTS // scores, SCORE_ELEMENTS // copies)))

    def _advance_to_end(self, sequence: torch.Tensor, row: int, tokens: int) -> torch.Tensor:
        """Logits [1, V] after a sequence whose last ``tokens`` tokens are missing in this row."""
        end, logits_1V = self.advance(sequence, row, max(0, len(sequence) - tokens))
        while end < len(sequence):
            end, logits_1V = self.advance(sequence, row, end)
        return logits_1V

    def _extend_rows(
        self, tokens_RT: torch.Tensor, positions_RT: torch.Tensor, longest: int, first: int
    ) -> torch.Tensor:
        """Logits [R, V] after the last of these tokens of the rows from ``first`` on."""
        places_K = torch.arange(longest, device=self.device)
        mask = (places_K <= positions_RT.unsqueeze(2)).unsqueeze(1)
        self.cache.begin_decode(positions_RT, longest, first)
        last_R = torch.full((len(tokens_RT),), tokens_RT.shape[1] - 1, device=self.device)
        return self.forward(tokens_RT.long().to(self.device), mask, positions_RT, last_R)


class ShadowModel:
    """A copy of the model, whose KV cache is computed with new weights during generation.

    Used by one thread at a time.
    """

    def __init__(self, first: GeneratingModel, published: torch.dtype | None = None) -> None:
        """``published``: dtype of the versions, if it differs from the model's."""
        self._original = first
        self._stream = SideStream(first.device)
        self._published = published
        self.cached: GeneratingModel | None = None
        self.version = -1
        self._rounds = 0
        self._is_loaded = False
        self._computed: dict[int, int] = {}  # by key, in the order of rows: tokens of the sequence in the cache
        self._goals: dict[int, int] = {}  # by key: tokens of the sequence at the start of the round

    def begin(self, version: int) -> None:
        """Start catching up with the weights of this version, unless already started."""
        if version != self.version:
            self.version = version
            self._rounds = 0
            self._is_loaded = False
            self._computed, self._goals = {}, {}

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
        """Load the weights, the first time, and compute missing tokens of these sequences, about a chunk.

        On an accelerator that is done when it returns, and decode steps that are queued meanwhile do not wait for it.
        """
        with self._stream.work():
            self._catch_up(snapshot, sequences)

    def _catch_up(self, snapshot: Snapshot, sequences: Mapping[int, torch.Tensor]) -> None:
        if self.cached is None:
            with torch.inference_mode(False):
                model = copy.deepcopy(self._original.model)
                self.cached = self._original.twin(model)
        if not self._is_loaded:
            snapshot.restore(named_parameters(self.cached.model), self._published)
            self._is_loaded = True
        if not self._goals:
            self._goals = {key: len(tokens) for key, tokens in sequences.items()}
        self._arrange(self.cached, sequences)
        tokens = 0
        while tokens < PREFILL_TOKENS // 2 and (computed := self._compute_chunk(self.cached, sequences)):
            tokens += computed
        if all(self._computed[key] >= self._goals.get(key, 0) for key in sequences):
            self._rounds += 1
            self._goals = {}

    def _compute_chunk(self, cached: GeneratingModel, sequences: Mapping[int, torch.Tensor]) -> int:
        """Compute missing tokens of some sequences that are below their goals. Returns their number."""
        keys, all_tokens = list(sequences), list(sequences.values())
        computed = [self._computed[key] for key in keys]
        behind = [row for row, key in enumerate(keys) if computed[row] < self._goals.get(key, 0)]
        if not behind:
            return 0
        new = sorted((row for row in behind if not computed[row]), key=lambda row: len(all_tokens[row]))
        rows = new[: cached.chunk([len(all_tokens[row]) for row in new])] if new else behind[:1]
        missing = len(all_tokens[rows[0]]) - computed[rows[0]]
        if len(rows) > 1:
            cached.prefill([all_tokens[row] for row in rows], rows)
        elif new or missing > cached.piece(computed[rows[0]]):
            end, _ = cached.advance(all_tokens[rows[0]], rows[0], computed[rows[0]])
            self._computed[keys[rows[0]]] = end
            return end - computed[rows[0]]
        else:
            rows = list(self._block(cached, all_tokens, computed, rows[0]))
            missing = max(len(all_tokens[row]) - computed[row] for row in rows)
            cached.extend_block([all_tokens[row] for row in rows], missing, rows[0])
        self._computed |= {keys[row]: len(all_tokens[row]) for row in rows}
        return sum(len(all_tokens[row]) - computed[row] for row in rows)

    def _block(
        self, cached: GeneratingModel, sequences: Sequence[torch.Tensor], computed: Sequence[int], first: int
    ) -> range:
        """Rows from ``first`` on whose missing tokens fit into one pass; all of them have tokens in the cache."""
        missing = longest = 0
        for row in range(first, len(sequences)):
            missing = max(missing, len(sequences[row]) - computed[row])
            longest = max(longest, len(sequences[row]))
            if row > first and (not computed[row] or row - first >= cached.rows_at_once(missing, longest)):
                return range(first, row)
        return range(first, len(sequences))

    def _arrange(self, cached: GeneratingModel, sequences: Mapping[int, torch.Tensor]) -> None:
        """Reorder rows. New sequences have no tokens in the cache."""
        old_rows = {key: row for row, key in enumerate(self._computed)}
        sources = {row: old_rows[key] for row, key in enumerate(sequences) if key in old_rows}
        cached.cache.pick(sources, max(self._computed.values(), default=0))
        self._computed = {key: self._computed.get(key, 0) for key in sequences}

    @torch.inference_mode()
    def swap_in(self, replaced: GeneratingModel, sequences: Mapping[int, torch.Tensor]) -> tuple[GeneratingModel, int]:
        """Exchange models: returns the copy and the largest number of missing tokens of its rows.

        ``replaced``, the model used so far, becomes the copy for the next update.
        """
        assert self.cached is not None
        self._arrange(self.cached, sequences)
        new = {row: tokens for row, (key, tokens) in enumerate(sequences.items()) if not self._computed[key]}
        self.cached.fill(list(new.values()), list(new))
        self._computed |= {key: len(tokens) for key, tokens in sequences.items() if not self._computed[key]}
        current, missing = self.cached, self.lag(sequences)
        self.cached = replaced
        self.version = -1
        return current, missing
