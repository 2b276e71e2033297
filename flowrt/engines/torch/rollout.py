"""A rollout engine on plain PyTorch: continuous batching over a row cache, seeded per sample.

Tokens are drawn from the whole distribution, or from a truncated one (top-k, top-p, min-p), whose support is recorded.

Shapes: R running sequences, V vocabulary, P distinct prompts of a chunk of prefill, T generated tokens, K candidates a
row, most likely first.
"""

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import accumulate, groupby
from typing import Any

import torch

from flowrt.algorithms.logprobs import CHUNK_ELEMENTS, distribution_logprobs
from flowrt.algorithms.support import Support, join_supports, last_supports, singletons
from flowrt.engines.base import Interrupt, NewTokens, Prompt, Response
from flowrt.engines.hf import named_parameters
from flowrt.engines.options import SamplingOptions, Truncation
from flowrt.engines.stopping import StopConditions
from flowrt.engines.torch.cached_model import CPU, CachedModel, ShadowModel
from flowrt.engines.torch.generating import GeneratingModel
from flowrt.engines.torch.sequence_model import SequenceModel
from flowrt.errors import EngineError
from flowrt.protocol.resources import EngineUse
from flowrt.transport.weights.snapshot import Snapshot

CPU_DRAW_ELEMENTS = 1 << 21
"""On a CPU, logits that are drawn from at a time: 8 MiB, as the overhead of a slice is small."""
SUM_BLOCK = 512
"""Values whose sums one product computes."""
JOINED_SUPPORTS = 64
"""Supports of successive tokens of a row that are joined to one: a tensor has some 300 bytes besides its numbers."""


def prefix_sums(values_RV: torch.Tensor) -> torch.Tensor:
    """The sums of each value and those before it, along the last dimension; on CUDA in float64.

    A CPU adds one after the other, in double precision. CUDA's scan of float32 is a tree, whose sums decrease here and
    there, so that a token of no probability may be drawn; and it has no deterministic kernel.
    """
    return sums_by_products(values_RV) if values_RV.is_cuda else values_RV.cumsum(dim=-1)


def sums_by_products(values_RV: torch.Tensor) -> torch.Tensor:
    """`prefix_sums` in float64 by products with triangular matrices, within blocks and of blocks."""
    rows, width = values_RV.shape
    blocks = -(-width // SUM_BLOCK)
    values_RBK = torch.nn.functional.pad(values_RV.double(), (0, blocks * SUM_BLOCK - width)).view(rows, blocks, -1)
    within_RBK = values_RBK @ _upper_ones(SUM_BLOCK, 0, values_RV.device)
    before_RB = within_RBK[:, :, -1] @ _upper_ones(blocks, 1, values_RV.device)
    return (within_RBK + before_RB.unsqueeze(-1)).view(rows, -1)[:, :width].contiguous()


@cache
def _upper_ones(size: int, diagonal: int, device: torch.device) -> torch.Tensor:
    """Ones on and above a diagonal, float64 [size, size]. Kept, because every decode step needs the same ones."""
    return torch.ones(size, size, dtype=torch.float64, device=device).triu(diagonal)


def draw(logprobs_RV: torch.Tensor, uniform_R1: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw one token per row by inverse transform sampling, with a number in [0, 1) for each row.

    Returns tokens_R1, int64, and their log-probabilities [R, 1] in nats.
    """
    cumulative_RV = prefix_sums(logprobs_RV.exp())
    draws_R1 = uniform_R1 * cumulative_RV[:, -1:]
    chosen_R1 = torch.searchsorted(cumulative_RV, draws_R1, right=True).clamp_(max=logprobs_RV.shape[1] - 1)
    return chosen_R1, logprobs_RV.gather(1, chosen_R1)


def draw_truncated(
    logprobs_RV: torch.Tensor, uniform_R1: torch.Tensor, truncation: Truncation
) -> tuple[torch.Tensor, torch.Tensor, list[Support]]:
    """Draw one token per row from a truncated distribution, by inverse transform sampling.

    Args:
        logprobs_RV: log-probabilities of the whole distribution, in nats, at the sampling temperature.
        uniform_R1: a number in [0, 1) for each row.
        truncation: limits of the support. The most likely token is always in it.

    Returns:
        tokens_R1, int64; their log-probabilities [R, 1], renormalised over the support; the support of each row.
    """
    vocabulary = logprobs_RV.shape[1]
    logprobs_RK, tokens_RK = logprobs_RV.topk(min(truncation.top_k or vocabulary, vocabulary), dim=-1)
    probabilities_RK = logprobs_RK.exp()
    kept_RK = torch.ones_like(tokens_RK, dtype=torch.bool)
    if truncation.top_p < 1:
        more_likely_RK = torch.nn.functional.pad(prefix_sums(probabilities_RK)[:, :-1], (1, 0))
        kept_RK &= more_likely_RK < truncation.top_p
    if truncation.min_p > 0:
        kept_RK &= probabilities_RK >= truncation.min_p * probabilities_RK[:, :1]
    kept_RK[:, 0] = True
    kept_logprobs_RK = logprobs_RK.masked_fill(~kept_RK, -torch.inf)
    renormalised_RK = kept_logprobs_RK - kept_logprobs_RK.logsumexp(-1, keepdim=True)  # see distribution_logprobs
    cumulative_RK = prefix_sums(renormalised_RK.exp())
    counts_R1 = kept_RK.sum(-1, keepdim=True)  # the kept ones come first
    place_R1 = torch.searchsorted(cumulative_RK, uniform_R1 * cumulative_RK[:, -1:], right=True)
    place_R1 = torch.minimum(place_R1, counts_R1 - 1)
    kept = tokens_RK[kept_RK].to(torch.int32).split(counts_R1[:, 0].tolist())
    counts = counts_R1.to(torch.int32).unbind()
    supports = [Support(tokens, count) for tokens, count in zip(kept, counts, strict=True)]
    return tokens_RK.gather(1, place_R1), renormalised_RK.gather(1, place_R1), supports


@dataclass(frozen=True, slots=True)
class _Waiting:
    """Prompts with the same tokens, such as the members of a group; computed once."""

    tokens_L: torch.Tensor
    prompts: list[Prompt]


class TorchRollout:
    """Decodes up to ``rows`` sequences in a batch; a finished sequence frees its row at once.

    With ``rows=1`` shapes are the same in every run, so a response is a bitwise function of prompt, seed and weights.
    Weights may be swapped while sequences run.

    Args:
        model: a transformers causal LM, on the device of the engine, which has rows of keys and values, or one with
            rows of another kind (`flowrt.engines.torch.generation_path`).
        stop: stop tokens and stop strings.
        rows: maximum number of running sequences.
        max_new_tokens: maximum length of a response, in tokens.
        temperature: sampling temperature, above 0.
        truncation: which tokens can be drawn; None: all. Responses have a support if it is active.
        recompute: on an in-flight update, recompute the KV cache with the new weights; otherwise keep it.
        compiled: compile the decode step.
        published: dtype of the versions given to `swap`; None: that of the model.

    Raises:
        EngineError: if the temperature is not above 0, or ``compiled`` is unsupported by the model.
    """

    def __init__(
        self,
        model: Any,
        *,
        stop: StopConditions,
        rows: int,
        max_new_tokens: int,
        temperature: float,
        truncation: Truncation | None = None,
        recompute: bool = True,
        compiled: bool = False,
        published: torch.dtype | None = None,
    ) -> None:
        if temperature <= 0:
            raise EngineError(f"rollout temperature is {temperature}; use a value above 0 (prompts can be greedy)")
        is_ready = isinstance(model, CachedModel | SequenceModel)
        self._cached: GeneratingModel = model if is_ready else _with_rows(model, rows, compiled)
        self._device = device = self._cached.device
        self._published = published if published != self._cached.model.dtype else None
        self._shadow = ShadowModel(self._cached, self._published)
        self._missing_tokens = 0  # per row, before its last token; computed by the next decode step as well
        self._stop = stop
        self._stop_ids = frozenset(stop.token_ids)
        self._rows = rows
        self._max_new = max_new_tokens
        self._temperature = temperature
        self._truncation = truncation if truncation is not None and truncation.is_active else None
        self._supports: list[
            list[Support]
        ] = []  # for each running sequence, the supports of its generated tokens; unused without truncation
        self.version = 0
        self._recompute = recompute
        self._waiting: list[_Waiting] = []
        self._prefilled = 0  # tokens of the first waiting prompt that are in the first free row already
        self._running: list[Prompt] = []
        self._spans: list[
            tuple[int, ...]
        ] = []  # for each running sequence: (version, tokens) of earlier versions, flattened
        self._total_generated = 0
        self._generated: list[int] = []  # number of tokens of each running sequence, without a copy from the device
        self._host_tokens: list[array[int]] = []  # tokens of each running sequence on the host; with stop strings only
        self._positions_R = torch.zeros(rows, dtype=torch.long, device=device)
        self._counts_R = torch.zeros(rows, dtype=torch.long, device=device)
        self._greedy_R = torch.zeros(rows, dtype=torch.bool, device=device)
        self._draws_RT = torch.zeros(rows, max_new_tokens, device=device)
        self._tokens_RT = torch.zeros(rows, max_new_tokens, dtype=torch.int32, device=device)
        self._logprobs_RT = torch.zeros(rows, max_new_tokens, device=device)

    @property
    def running(self) -> int:
        return len(self._running) + sum(len(waiting.prompts) for waiting in self._waiting)

    @property
    def room(self) -> int:
        return self._rows - self.running

    def use(self) -> EngineUse:
        """Tokens generated, and tokens in the rows of the cache (see `ReportsUse`)."""
        tokens, cache = sum(map(_position, self._running, self._generated)), self._cached.cache
        return EngineUse(self._total_generated, tokens, cache.rows * cache.capacity)

    def add(self, prompts: Sequence[Prompt]) -> None:
        if len(prompts) > self.room:
            raise EngineError(f"{len(prompts)} prompts for {self.room} free rows; add at most `room` prompts")
        by_tokens: dict[bytes, _Waiting] = {}
        for prompt in prompts:
            tokens_L = prompt.tokens.long()
            if prompt.prefix is not None:
                tokens_L = torch.cat([tokens_L, prompt.prefix.tokens.long()])
                self._waiting.append(_Waiting(tokens_L, [prompt]))
                continue
            by_tokens.setdefault(tokens_L.numpy().tobytes(), _Waiting(tokens_L, [])).prompts.append(prompt)
        # In order of length, so that a chunk needs little padding.
        self._waiting += sorted(by_tokens.values(), key=lambda waiting: len(waiting.tokens_L))

    def prepare(self, snapshot: Snapshot) -> Callable[[], None] | None:
        """Work on the shadow model that shortens an in-flight update, or None (see `SupportsInFlightUpdate`).

        Needs memory for a second model and a second KV cache.
        """
        if not (self._recompute and self._running):
            return None
        sequences = self._sequences()
        self._shadow.begin(snapshot.version)
        return None if self._shadow.has_caught_up(sequences) else partial(self._shadow.catch_up, snapshot, sequences)

    @torch.inference_mode()
    def new_tokens(self, starts: Mapping[int, int]) -> dict[int, NewTokens]:
        """What is generated of the running sequences from these tokens on, by key (see `ContinuesSequences`)."""
        started = [starts.get(prompt.key, 0) for prompt in self._running]
        first, longest = min(started, default=0), max(self._generated, default=0)
        columns = slice(0, len(self._running)), slice(first, longest)
        tokens_RT, logprobs_RT = self._tokens_RT[columns].cpu(), self._logprobs_RT[columns].cpu()
        new = {
            prompt.key: NewTokens(
                start=start,
                tokens=tokens_RT[row, start - first : end - first].clone(),
                logprobs=logprobs_RT[row, start - first : end - first].clone(),
                spans=self._spans_of(row, end),
                support=last_supports(self._supports[row], end - start).to(CPU) if self._truncation else None,
            )
            for row, (prompt, start, end) in enumerate(zip(self._running, started, self._generated, strict=True))
            if end > start
        }
        for prompt in [prompt for waiting in self._waiting for prompt in waiting.prompts]:
            start = starts.get(prompt.key, 0)
            if prompt.prefix is not None and len(prompt.prefix.tokens) > start:
                new[prompt.key] = prompt.prefix.after(start)
        return new

    @torch.inference_mode()
    def swap(self, snapshot: Snapshot) -> None:
        self._prefilled = 0
        prepared = self._shadow.is_ready(snapshot.version) and bool(self._running)
        if prepared:
            self._cached, self._missing_tokens = self._shadow.swap_in(self._cached, self._sequences())
        else:
            snapshot.restore(named_parameters(self._cached.model), self._published)
            self._missing_tokens = 0
        self._spans = [self._spans_of(row, count) for row, count in enumerate(self._generated)]
        self.version = snapshot.version
        if self._running and self._recompute and not prepared:
            self._cached.fill(list(self._sequences().values()), range(len(self._running)))

    def _spans_of(self, row: int, count: int) -> tuple[int, ...]:
        """(version, tokens) pairs, flattened, of a sequence with ``count`` generated tokens."""
        spans = self._spans[row]
        rest = count - sum(spans[1::2])
        if rest and spans[-2:-1] == (self.version,):  # as after a prefix
            return (*spans[:-1], spans[-1] + rest)
        return (*spans, self.version, rest) if rest else spans

    def _sequences(self) -> dict[int, torch.Tensor]:
        """Running sequences on the CPU by key, in the order of rows, without the last token (the next input)."""
        tokens_RT = self._tokens_RT[: len(self._running), : max(self._generated, default=0)].cpu()
        return {
            prompt.key: torch.cat([prompt.tokens.long(), tokens_RT[row, : self._generated[row] - 1].long()])
            for row, prompt in enumerate(self._running)
        }

    @torch.inference_mode()
    def run(self, interrupt: Interrupt) -> list[Response]:
        finished: list[Response] = []
        while not finished and self.running:
            if not self._waiting:
                self._decode()
                finished = self._remove_finished()
            elif self._prefill():
                finished = self._remove_finished()
            if interrupt.is_set():
                break
        return finished

    def _prefill(self) -> bool:
        """Compute a chunk of waiting prompts, or a piece of a long one, and the first tokens of prompts that are whole.

        Returns whether there are any.
        """
        count = 1 if self._prefilled else self._cached.chunk([len(waiting.tokens_L) for waiting in self._waiting])
        chunk, first = self._waiting[:count], len(self._running)
        if count == 1:
            tokens_L = chunk[0].tokens_L
            self._prefilled, logits_PV = self._cached.advance(tokens_L, first, self._prefilled)
            if self._prefilled < len(tokens_L):
                return False
            self._prefilled = 0
        else:
            rows_P = list(accumulate((len(waiting.prompts) for waiting in chunk[:-1]), initial=first))
            logits_PV = self._cached.prefill([waiting.tokens_L for waiting in chunk], rows_P)
        self._waiting = self._waiting[count:]
        sources = [source for source, waiting in enumerate(chunk) for _ in waiting.prompts]
        self._start([prompt for waiting in chunk for prompt in waiting.prompts], sources, logits_PV)
        return True

    def _start(self, new: list[Prompt], sources: list[int], logits_PV: torch.Tensor) -> None:
        """Give each prompt a row, the keys and values of its first equal, and a first token from ``sources[i]``."""
        first, device = len(self._running), self._device
        for _, equal in groupby(range(len(new)), key=sources.__getitem__):
            members = list(equal)
            if len(members) > 1:  # they have no prefix
                copies = slice(first + members[0] + 1, first + members[-1] + 1)
                self._cached.cache.copy(first + members[0], copies, len(new[members[0]].tokens))
        rows = slice(first, first + len(new))
        prefixes = [prompt.prefix for prompt in new]
        generated = [0 if prefix is None else len(prefix.tokens) for prefix in prefixes]
        self._running.extend(new)
        self._spans.extend(() if prefix is None else prefix.spans for prefix in prefixes)
        self._supports.extend(
            [] if prefix is None or prefix.support is None else [prefix.support] for prefix in prefixes
        )
        self._generated.extend(generated)
        self._host_tokens.extend(array("i", [] if prefix is None else prefix.tokens.tolist()) for prefix in prefixes)
        lengths = [len(prompt.tokens) + count for prompt, count in zip(new, generated, strict=True)]
        self._positions_R[rows] = torch.tensor(lengths, device=device)
        self._counts_R[rows] = torch.tensor(generated, device=device)
        for row, prefix in enumerate(prefixes, first):
            if prefix is not None:
                self._tokens_RT[row, : len(prefix.tokens)] = prefix.tokens.to(device)
                self._logprobs_RT[row, : len(prefix.tokens)] = prefix.logprobs.to(device)
        self._greedy_R[rows] = torch.tensor([prompt.greedy for prompt in new], device=device)
        # Drawn by the host's generator, so the numbers are the same on every device.
        draws_NT = torch.zeros(len(new), self._max_new)
        for draws_T, prompt in zip(draws_NT, new, strict=True):
            generator = torch.Generator().manual_seed(prompt.seed)
            draws_T[: self._limit(prompt)] = torch.rand(self._limit(prompt), generator=generator)
        self._draws_RT[rows] = draws_NT.to(device)
        self._sample(rows, logits_PV, sources)

    def _decode(self) -> None:
        count = len(self._running)
        if self._missing_tokens:
            rows = self._cached.cache.row_index_R[:count]
            last_R = self._tokens_RT[rows, self._counts_R[:count] - 1].long().unsqueeze(1).cpu()
            sequences = [torch.cat(pair) for pair in zip(self._sequences().values(), last_R, strict=True)]
            logits_RV = self._cached.extend(sequences, self._missing_tokens + 1)
            self._missing_tokens = 0
            self._positions_R[:count] += 1
            self._sample(slice(0, count), logits_RV, range(count))
            return
        rows = self._cached.cache.row_index_R[:count]
        positions_R = self._positions_R[:count]
        last_R = self._tokens_RT[rows, self._counts_R[:count] - 1].long()
        longest = max(map(_position, self._running, self._generated)) + 1
        logits_RV = self._cached.decode(last_R, positions_R, longest)
        self._positions_R[:count] += 1
        self._sample(slice(0, count), logits_RV, range(count))

    def _sample(self, rows: slice, logits_PV: torch.Tensor, sources: Sequence[int]) -> None:
        """Append a token to each row, from the logits ``sources[i]``; for a few rows at a time, to save memory."""
        elements = CPU_DRAW_ELEMENTS if logits_PV.is_cpu else CHUNK_ELEMENTS
        height = max(1, elements // logits_PV.shape[1])
        for start in range(0, len(sources), height):
            some = sources[start : start + height]
            logits_RV = logits_PV[some.start : some.stop] if isinstance(some, range) else logits_PV[some]
            self._sample_rows(slice(rows.start + start, rows.start + start + len(some)), logits_RV)

    def _sample_rows(self, rows: slice, logits_RV: torch.Tensor) -> None:
        """Append one token per row: drawn with the row's next uniform number, or the most likely token if greedy."""
        logprobs_RV = distribution_logprobs(logits_RV.float(), self._temperature)
        places_R1 = self._counts_R[rows].unsqueeze(1)
        uniform_R1 = self._draws_RT[rows].gather(1, places_R1)
        if self._truncation is None:
            chosen_R1, drawn_R1 = draw(logprobs_RV, uniform_R1)
        else:
            chosen_R1, drawn_R1, supports = draw_truncated(logprobs_RV, uniform_R1, self._truncation)
            for row, support in enumerate(supports, rows.start):
                self._supports[row].append(support)
        if any(prompt.greedy for prompt in self._running[rows]):
            greedy_R1 = self._greedy_R[rows].unsqueeze(1)
            best_R1 = logits_RV.argmax(dim=-1, keepdim=True)
            chosen_R1 = torch.where(greedy_R1, best_R1, chosen_R1)
            drawn_R1 = torch.where(greedy_R1, logprobs_RV.gather(1, best_R1), drawn_R1)
        self._draw_own(rows, logits_RV, uniform_R1, chosen_R1, drawn_R1)
        self._tokens_RT[rows].scatter_(1, places_R1, chosen_R1.to(torch.int32))
        self._logprobs_RT[rows].scatter_(1, places_R1, drawn_R1)
        self._counts_R[rows] += 1
        self._generated[rows] = [count + 1 for count in self._generated[rows]]
        self._total_generated += rows.stop - rows.start
        if self._truncation is not None:
            self._join_supports(rows)

    def _join_supports(self, rows: slice) -> None:
        for supports, count in zip(self._supports[rows], self._generated[rows], strict=True):
            if count % JOINED_SUPPORTS == 0:
                supports[-JOINED_SUPPORTS:] = [join_supports(supports[-JOINED_SUPPORTS:])]

    def _draw_own(
        self,
        rows: slice,
        logits_RV: torch.Tensor,
        uniform_R1: torch.Tensor,
        chosen_R1: torch.Tensor,
        drawn_R1: torch.Tensor,
    ) -> None:
        """Replace the tokens of rows with sampling options of their own, and the log-probabilities of these tokens."""
        own: dict[SamplingOptions, list[int]] = {}
        for place, prompt in enumerate(self._running[rows]):
            if prompt.sampling is not None and not prompt.greedy:
                own.setdefault(prompt.sampling, []).append(place)
        for options, places in own.items():
            logprobs_NV = distribution_logprobs(logits_RV[places].float(), options.temperature)
            if options.truncation.is_active:
                chosen_N1, drawn_N1, _ = draw_truncated(logprobs_NV, uniform_R1[places], options.truncation)
            else:
                chosen_N1, drawn_N1 = draw(logprobs_NV, uniform_R1[places])
            chosen_R1[places], drawn_R1[places] = chosen_N1, drawn_N1
            if self._truncation is not None:
                for place, token_1 in zip(places, chosen_N1.to(torch.int32), strict=True):
                    self._supports[rows.start + place][-1] = singletons(token_1)

    def _remove_finished(self) -> list[Response]:
        """Remove the rows that have ended, close the gaps, and return their responses."""
        count = len(self._running)
        rows = self._cached.cache.row_index_R[:count]
        last_R = self._tokens_RT[rows, self._counts_R[:count] - 1]
        # The only point in a decode step at which the host waits for the device, unless sequences end or are truncated.
        tokens: list[int] = last_R.tolist()
        stopped = [token in self._stop_ids for token in tokens]
        if self._stop.strings:
            for host_tokens, token in zip(self._host_tokens, tokens, strict=True):
                host_tokens.append(token)
            complete = map(self._stop.complete_string, self._host_tokens)
            stopped = [is_stopped or other for is_stopped, other in zip(stopped, complete, strict=True)]
        ended = [row for row in range(count) if stopped[row] or self._generated[row] >= self._limit(self._running[row])]
        finished = self._responses(ended, [not stopped[row] for row in ended]) if ended else []
        for row in reversed(ended):
            self._free_row(row)
        return finished

    def _responses(self, rows: Sequence[int], truncated: Sequence[bool]) -> list[Response]:
        """The responses of these rows, which the host reads at once."""
        lengths = [self._generated[row] for row in rows]
        rows_N = torch.tensor(rows, device=self._device)
        tokens_NT = self._tokens_RT[:, : max(lengths)].index_select(0, rows_N)
        logprobs_NT = self._logprobs_RT[:, : max(lengths)].index_select(0, rows_N)
        read = torch.stack([tokens_NT, logprobs_NT.view(torch.int32)]).cpu()
        tokens_NT, logprobs_NT = read[0], read[1].view(torch.float32)
        return [
            Response(
                key=self._running[row].key,
                tokens=tokens_NT[place, :length].clone(),
                logprobs=logprobs_NT[place, :length].clone(),
                spans=self._spans_of(row, length),
                truncated=truncated[place],
                support=join_supports(self._supports[row]).to(CPU) if self._truncation else None,
            )
            for place, (row, length) in enumerate(zip(rows, lengths, strict=True))
        ]

    def _limit(self, prompt: Prompt) -> int:
        """Maximum length of the response to a prompt, in tokens."""
        return min(prompt.max_new_tokens or self._max_new, self._max_new)

    def _free_row(self, row: int) -> None:
        last = len(self._running) - 1
        if row != last:
            self._running[row] = self._running[last]
            self._spans[row] = self._spans[last]
            self._supports[row] = self._supports[last]
            self._generated[row] = self._generated[last]
            self._host_tokens[row] = self._host_tokens[last]
            length = _position(self._running[last], self._generated[last])
            self._cached.cache.copy(last, slice(row, row + 1), length)
            for state in (
                self._positions_R,
                self._counts_R,
                self._greedy_R,
                self._draws_RT,
                self._tokens_RT,
                self._logprobs_RT,
            ):
                state[row] = state[last]
        self._running.pop()
        self._spans.pop()
        self._supports.pop()
        self._generated.pop()
        self._host_tokens.pop()


def _with_rows(model: Any, rows: int, compiled: bool) -> CachedModel:
    step = None
    if compiled:
        # Imported here: the compiler is slow to import.
        from flowrt.engines.torch.compile import compile_decode_step

        step = compile_decode_step(model.eval(), single_row=rows == 1)
    return CachedModel(model.eval(), rows, step)


def _position(prompt: Prompt, generated: int) -> int:
    """The position of a sequence's last token, whose decode step is next."""
    return len(prompt.tokens) + generated - 1


def optimize_layout(model: Any) -> Any:
    """Store linear weights in column-major order where that is faster. Returns the model.

    Shapes [outputs, inputs] and values do not change. It is faster in float32 on a CPU: products of 4 to 128 rows with
    weights from outside the cache took 0.65 to 1 of the time (one of eleven shapes, 896 x 4864 with 16 rows, took 1.2),
    products of one row the same time. Other dtypes are repacked for each product in any layout. Weights shared with an
    embedding keep their layout. Training gains nothing.
    """
    layers = [module for module in model.modules() if isinstance(module, torch.nn.Linear)]
    others = (module for module in model.modules() if not isinstance(module, torch.nn.Linear))
    shared = {id(parameter) for module in others for parameter in module.parameters(recurse=False)}
    for layer in layers:
        weight = layer.weight
        if weight.is_cpu and weight.dtype is torch.float32 and id(weight) not in shared:
            weight.data = weight.detach().t().contiguous().t()
    return model
