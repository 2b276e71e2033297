"""A rollout engine on plain PyTorch: continuous batching over a row cache, seeded per sample.

Shapes: R running sequences, V vocabulary, P prompts of one prefill, L their padded length, U kept positions.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from flowrt.engines.checkpoint import named_parameters
from flowrt.engines.protocols import Interrupt, Prompt, Response
from flowrt.engines.refilling import Ahead, CachedModel
from flowrt.errors import EngineError
from flowrt.transport.weights import Snapshot


class TorchRollout:
    """Decodes up to ``rows`` sequences together; a finished one makes room at once.

    With ``rows=1`` every sequence is computed in the same shapes whatever runs beside it, so its bits depend on
    prompt, seed and weights alone. Weights may be swapped while sequences run: with ``recompute`` their keys and
    values are computed again by the new weights, without it they go on with those that the old ones made. ``compiled``
    is for decode steps. Raises EngineError for a model that cannot be decoded like that.
    """

    def __init__(
        self,
        model: Any,
        *,
        eos_id: int,
        rows: int,
        max_new_tokens: int,
        temperature: float,
        version: int = 0,
        recompute: bool = True,
        compiled: bool = False,
    ) -> None:
        if temperature <= 0:
            raise EngineError(
                f"rollout temperature is {temperature}; use a value above 0 (greedy is a prompt's choice)"
            )
        step = None
        if compiled:
            from flowrt.engines.compiled_trial import compiled_for  # others start sooner without the compiler

            step = compiled_for(model.eval(), alone=rows == 1)
        self._cached = CachedModel(model.eval(), rows, step)
        self._ahead = Ahead(self._cached)
        self._lacking = 0  # tokens of each row, before its last, that the next decode step has to compute as well
        self._eos_id = eos_id
        self._rows = rows
        self._max_new = max_new_tokens
        self._temperature = temperature
        self.version = version
        self._recompute = recompute
        self._waiting: list[Prompt] = []
        self._running: list[Prompt] = []
        self._spans: list[tuple[int, ...]] = []  # of each running sequence, what earlier versions made
        self._positions_R = torch.zeros(rows, dtype=torch.long)
        self._counts_R = torch.zeros(rows, dtype=torch.long)
        self._greedy_R = torch.zeros(rows, dtype=torch.bool)
        self._draws_RT = torch.zeros(rows, max_new_tokens)
        self._tokens_RT = torch.zeros(rows, max_new_tokens, dtype=torch.int32)
        self._logprobs_RT = torch.zeros(rows, max_new_tokens)

    @property
    def running(self) -> int:
        return len(self._running) + len(self._waiting)

    @property
    def room(self) -> int:
        return self._rows - self.running

    def add(self, prompts: Sequence[Prompt]) -> None:
        if len(prompts) > self.room:
            raise EngineError(f"{len(prompts)} prompts for {self.room} free rows; pull no more than there is room for")
        self._waiting.extend(prompts)

    def prepare(self, snapshot: Snapshot) -> Callable[[], None] | None:
        """Between two runs: what to do on another thread, beside the next ones, before a swap in flight is short.

        To be asked again when that is done; None: nothing more, it is time to swap. It takes a second copy of the
        model, and of the keys and values of what runs.
        """
        if not (self._recompute and self._running):
            return None
        sequences = self._sequences()
        self._ahead.begin(snapshot.version)
        return None if self._ahead.is_near(sequences) else partial(self._ahead.follow, snapshot, sequences)

    @torch.inference_mode()
    def swap(self, snapshot: Snapshot) -> None:
        if prepared := self._ahead.is_ready(snapshot.version) and bool(self._running):
            self._cached, self._lacking = self._ahead.exchange(self._cached, self._sequences())
        else:
            snapshot.restore(named_parameters(self._cached.model))
            self._lacking = 0
        counts = self._counts_R[: len(self._running)].tolist()
        self._spans = [self._spans_of(row, count) for row, count in enumerate(counts)]
        self.version = snapshot.version
        if self._running and self._recompute and not prepared:
            self._cached.fill(list(self._sequences().values()), range(len(self._running)))

    def _spans_of(self, row: int, count: int) -> tuple[int, ...]:
        """(version, tokens) pairs, flattened, of a sequence of which ``count`` tokens are made."""
        spans = self._spans[row]
        rest = count - sum(spans[1::2])
        return (*spans, self.version, rest) if rest else spans

    def _sequences(self) -> dict[int, torch.Tensor]:
        """By key, in the order of rows: all that runs, but for each sequence's last token, which comes next."""
        found = {}
        for row, prompt in enumerate(self._running):
            made = int(self._positions_R[row]) - len(prompt.tokens)
            found[prompt.key] = torch.cat([prompt.tokens.long(), self._tokens_RT[row, :made].long()])
        return found

    @torch.inference_mode()
    def run(self, interrupt: Interrupt) -> list[Response]:
        finished: list[Response] = []
        while not finished and self.running:
            if self._waiting:
                self._prefill()
            else:
                self._decode()
            finished = self._collect()
            if interrupt.is_set():
                break
        return finished

    def _prefill(self) -> None:
        new, self._waiting = self._waiting, []
        first = len(self._running)
        # The members of a group share a prompt: compute it once, copy its keys and values to every member's row.
        unique: dict[tuple[int, ...], int] = {}
        sources = [unique.setdefault(tuple(prompt.tokens.tolist()), len(unique)) for prompt in new]
        lengths_P = torch.tensor([len(tokens) for tokens in unique])
        longest = int(lengths_P.max())
        tokens_PL = torch.zeros(len(unique), longest, dtype=torch.long)
        for row, tokens in enumerate(unique):
            tokens_PL[row, : len(tokens)] = torch.tensor(tokens)
        self._cached.cache.begin_prefill(longest)
        mask = torch.ones(longest, longest, dtype=torch.bool).tril().expand(len(unique), 1, longest, longest)
        positions_PL = torch.arange(longest).expand(len(unique), longest)
        # Logits are wanted after each prompt's last token only: at few distinct positions U.
        kept_U, place_P = (lengths_P - 1).unique(return_inverse=True)
        logits_PUV = self._cached.forward(tokens_PL, mask, positions_PL, kept_U)
        last_PV = logits_PUV[torch.arange(len(unique)), place_P]
        rows, chosen = slice(first, first + len(new)), torch.tensor(sources)
        self._cached.cache.settle(torch.arange(rows.start, rows.stop), chosen)
        self._running.extend(new)
        self._spans.extend([()] * len(new))
        self._positions_R[rows] = lengths_P[chosen]
        self._counts_R[rows] = 0
        self._greedy_R[rows] = torch.tensor([prompt.greedy for prompt in new])
        for row, prompt in enumerate(new, first):
            generator = torch.Generator().manual_seed(prompt.seed)
            torch.rand(self._max_new, generator=generator, out=self._draws_RT[row])
        self._sample(rows, last_PV[chosen])

    def _decode(self) -> None:
        count = len(self._running)
        if self._lacking:
            last_R = self._tokens_RT[torch.arange(count), self._counts_R[:count] - 1].long().unsqueeze(1)
            whole = [torch.cat(pair) for pair in zip(self._sequences().values(), last_R, strict=True)]
            logits_R1V = self._cached.extend(whole, self._lacking + 1)
            self._lacking = 0
            self._positions_R[:count] += 1
            self._sample(slice(count), logits_R1V[:, 0])
            return
        rows = self._cached.cache.row_index_R[:count]
        positions_R = self._positions_R[:count]
        last_R = self._tokens_RT[rows, self._counts_R[:count] - 1].long()
        logits_RV = self._cached.decode(last_R, positions_R)
        self._positions_R[:count] += 1
        self._sample(slice(count), logits_RV)

    def _sample(self, rows: slice, logits_RV: torch.Tensor) -> None:
        """Append one token a row: by inverse transform of the row's own next uniform number, or the likeliest."""
        logprobs_RV = torch.log_softmax(logits_RV.float() / self._temperature, dim=-1)
        places_R1 = self._counts_R[rows].unsqueeze(1)
        cumulative_RV = logprobs_RV.exp().cumsum(dim=-1)
        draws_R1 = self._draws_RT[rows].gather(1, places_R1) * cumulative_RV[:, -1:]
        chosen_R1 = torch.searchsorted(cumulative_RV, draws_R1, right=True).clamp_(max=logits_RV.shape[1] - 1)
        greedy_R1 = self._greedy_R[rows].unsqueeze(1)
        if greedy_R1.any():
            chosen_R1 = torch.where(greedy_R1, logits_RV.argmax(dim=-1, keepdim=True), chosen_R1)
        self._tokens_RT[rows].scatter_(1, places_R1, chosen_R1.to(torch.int32))
        self._logprobs_RT[rows].scatter_(1, places_R1, logprobs_RV.gather(1, chosen_R1))
        self._counts_R[rows] += 1

    def _collect(self) -> list[Response]:
        """Take out the rows that have ended, and close the gaps."""
        count = len(self._running)
        rows = self._cached.cache.row_index_R[:count]
        last_R = self._tokens_RT[rows, self._counts_R[:count] - 1]
        done_R = (last_R == self._eos_id) | (self._counts_R[:count] == self._max_new)
        finished = []
        for row in reversed(done_R.nonzero().squeeze(1).tolist()):
            length = int(self._counts_R[row])
            finished.append(
                Response(
                    self._running[row].key,
                    self._tokens_RT[row, :length].clone(),
                    self._logprobs_RT[row, :length].clone(),
                    self._spans_of(row, length),
                )
            )
            self._vacate(row)
        return finished[::-1]

    def _vacate(self, row: int) -> None:
        last = len(self._running) - 1
        if row != last:
            self._running[row], self._spans[row] = self._running[last], self._spans[last]
            self._cached.cache.move(last, row)
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
