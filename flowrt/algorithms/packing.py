"""Layouts of ragged samples for one forward pass, padded or packed, and their splitting into micro-batches.

- Flat order is sample-major: all response tokens of sample 0, then of sample 1, and so on. Concatenation brings values
  that are stored per sample into this order.
- Padded: each sample is a row. For models that do not support packing.
- Packed with shared prefixes: a forward pass computes each distinct prompt once, without padding. The members of a
  group share their prompt, and a causal model's activations at the prompt do not depend on the response. Only attention
  mixes tokens: it runs on `PaddedTile`s, in which each sample is a row with its prompt and response. Everything else
  runs on the packed tokens. The last token of a response predicts nothing, so it is left out.

Shapes: B = rows (one per sample), L = padded length, T = response tokens, flattened; F packed
tokens, prompts first; U predictions, each used once, or by every member if it follows a prompt; N positions on all
tiles, row after row; D any width; G distinct prompts; S samples.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.utils.rnn import pad_sequence


@dataclass(frozen=True, slots=True, eq=False)
class Padded:
    """Prompts and responses as right-padded rows."""

    tokens_BL: Tensor
    """int64"""
    response_mask_BL: Tensor
    """bool, True on the tokens to train on"""

    @property
    def sample_T(self) -> Tensor:
        """int64, the row of each response token."""
        return self.response_mask_BL.nonzero()[:, 0]


def pad_samples(prompts: Sequence[Tensor], responses: Sequence[Tensor], pad_id: int) -> Padded:
    """One right-padded row per sample: its prompt, its response, then `pad_id`.

    Args:
        prompts: 1-D token ids each, not empty: the last token predicts the first of the response.
        responses: 1-D token ids each, possibly empty.
        pad_id: any token id, also one that samples contain, such as end of sequence.

    Raises:
        ValueError: for an empty prompt, no samples, or different numbers of prompts and responses.
    """
    if len(prompts) != len(responses) or not prompts:
        raise ValueError(f"got {len(prompts)} prompts and {len(responses)} responses; give one or more of each")
    for index, prompt in enumerate(prompts):
        if prompt.numel() == 0:
            raise ValueError(
                f"the prompt of sample {index} is empty, so nothing predicts its first response token; "
                "begin it with a BOS token"
            )
    rows = [torch.cat([prompt, response]).long() for prompt, response in zip(prompts, responses, strict=True)]
    tokens_BL = pad_sequence(rows, batch_first=True, padding_value=pad_id)
    column_L = torch.arange(tokens_BL.shape[1], device=tokens_BL.device)
    ends_B1 = torch.tensor([[len(row)] for row in rows], device=tokens_BL.device)
    starts_B1 = torch.tensor([[len(prompt)] for prompt in prompts], device=tokens_BL.device)
    return Padded(tokens_BL, (column_L >= starts_B1) & (column_L < ends_B1))


def cut_by_tokens(lengths: Sequence[int], budget_tokens: int) -> list[list[int]]:
    """Split samples into consecutive micro-batches of at most `budget_tokens` tokens, padding included.

    The order of the samples is kept. A sample longer than the budget gets its own micro-batch.

    Args:
        lengths: tokens of each sample, prompt and response.
        budget_tokens: largest size of a micro-batch, rows x longest sample.

    Returns:
        Sample indices of each micro-batch.

    Raises:
        ValueError: if the budget is below 1 or a length is negative.
    """
    if budget_tokens < 1:
        raise ValueError(f"budget_tokens is {budget_tokens}; it must be at least 1")
    micro_batches: list[list[int]] = []
    longest = 0
    for index, length in enumerate(lengths):
        if length < 0:
            raise ValueError(f"the length of sample {index} is {length}; count its tokens, prompt and response")
        rows = len(micro_batches[-1]) + 1 if micro_batches else 1
        if micro_batches and rows * max(longest, length) <= budget_tokens:
            micro_batches[-1].append(index)
            longest = max(longest, length)
        else:
            micro_batches.append([index])
            longest = length
    return micro_batches


MIN_FILL = 0.75
"""Minimum sample length relative to its tile's longest row, which bounds padding; shorter samples start a new tile."""


@dataclass(frozen=True, slots=True)
class PaddedTile:
    """Samples of similar length, one per row, right-padded to ``length`` tokens."""

    rows: int
    length: int

    @property
    def places(self) -> int:
        """Number of token positions."""
        return self.rows * self.length


@dataclass(frozen=True, slots=True, eq=False)
class PackedBatch:
    """Packed tokens, their positions on the tiles, and the predictions of response tokens. Index tensors are int64."""

    tokens_F: Tensor
    """Token ids."""
    positions_F: Tensor
    """Position of each token in its sample."""
    predicts_U: Tensor
    """Packed tokens whose next-token prediction is used."""
    prediction_T: Tensor
    """Index into ``predicts_U`` of the prediction of each response token."""
    target_T: Tensor
    """Token ids of the responses."""
    sample_T: Tensor
    """Sample of each response token."""
    tiles: tuple[PaddedTile, ...]
    source_N: Tensor
    """Packed token at each tile position; token 0 at padding, whose results are not used."""
    first_F: Tensor
    """Tile position that each packed token takes its result from."""
    further: tuple[Tensor, ...]
    """Tile positions of the prompt tokens of the second members, the third, ...; entry k is of the prompts with more
    than k + 1 members, which are the leading packed tokens."""

    def to(self, device: torch.device) -> "PackedBatch":
        """This batch on ``device``."""

        def move(value: Any) -> Any:
            if isinstance(value, Tensor):
                return value.to(device)
            return tuple(move(tensor) for tensor in value) if isinstance(value, tuple) else value

        return PackedBatch(**{field.name: move(getattr(self, field.name)) for field in fields(self)})

    def scatter(self, packed_FD: Tensor) -> Tensor:
        """Copy packed rows to all their tile positions: [F, D] to [N, D].

        In the backward pass gradients of copies are summed in the order of members, so the sum is deterministic.
        """
        apply: Callable[[Tensor, PackedBatch], Tensor] = _Scatter.apply
        return apply(packed_FD, self)

    def gather(self, tiles_ND: Tensor) -> Tensor:
        """The row of each packed token at its first tile position: [N, D] to [F, D]."""
        apply: Callable[[Tensor, Tensor], Tensor] = _Gather.apply
        return apply(tiles_ND, self.first_F)


def pack_samples(prompts: Sequence[Tensor], responses: Sequence[Tensor]) -> PackedBatch:
    """Pack samples, with each distinct prompt once.

    Args:
        prompts: 1-D token ids each, not empty: the last token predicts the first of the response.
        responses: 1-D token ids each, possibly empty.

    Raises:
        ValueError: for an empty prompt, no samples, or different numbers of prompts and responses.
    """
    groups = prompt_groups(prompts, responses)
    # Prompts with most members first, so that prompts with at least k members are the leading tokens.
    members = sorted(groups.values(), key=len, reverse=True)
    starts_G = _starts([len(prompts[group[0]]) for group in members])
    prompt_of = {row: starts_G[place] for place, group in enumerate(members) for row in group}
    inputs = [response[:-1] for response in responses]
    ends_S = _starts([len(each) for each in inputs], starts_G[-1])
    tokens = [prompts[group[0]] for group in members] + inputs
    samples = [
        torch.cat([_run(prompt_of[row], len(prompts[row])), _run(ends_S[row], len(inputs[row]))])
        for row in range(len(prompts))
    ]
    tiles, order = _tiles([len(sample) for sample in samples])
    place_of = dict(zip(order, _starts_of_rows(tiles), strict=True))
    firsts = [_run(place_of[group[0]], len(prompts[group[0]])) for group in members]
    firsts += [_run(place_of[row] + len(prompts[row]), len(inputs[row])) for row in range(len(prompts))]
    predicts_U, prediction_T = _predictions(prompts, responses, members, starts_G, ends_S)
    return PackedBatch(
        tokens_F=torch.cat(tokens).long(),
        positions_F=torch.cat(
            [_run(0, len(prompts[group[0]])) for group in members]
            + [_run(len(prompt), len(each)) for prompt, each in zip(prompts, inputs, strict=True)]
        ),
        predicts_U=predicts_U,
        prediction_T=prediction_T,
        target_T=torch.cat(list(responses)).long(),
        sample_T=torch.arange(len(responses)).repeat_interleave(torch.tensor([len(each) for each in responses])),
        tiles=tiles,
        source_N=_source([samples[row] for row in order], tiles),
        first_F=torch.cat(firsts),
        further=_further(members, prompts, place_of),
    )


def prompt_groups(prompts: Sequence[Tensor], responses: Sequence[Tensor]) -> dict[bytes, list[int]]:
    """Indices of the samples of each distinct prompt, by its bytes, in order of first occurrence.

    Raises ValueError as `pack_samples` does.
    """
    if len(prompts) != len(responses) or not prompts:
        raise ValueError(f"got {len(prompts)} prompts and {len(responses)} responses; give one or more of each")
    groups: dict[bytes, list[int]] = {}
    for row, prompt in enumerate(prompts):
        if prompt.numel() == 0:
            raise ValueError(
                f"the prompt of sample {row} is empty, so nothing predicts its first response token; "
                "begin it with a BOS token"
            )
        groups.setdefault(prompt.long().cpu().numpy().tobytes(), []).append(row)
    return groups


def cut_packed(
    prompts: Sequence[Tensor], responses: Sequence[Tensor], budget_tokens: int, max_unpacked_tokens: int
) -> list[list[int]]:
    """Split samples into passes, keeping members of a prompt together. A sample longer than a limit has its own pass.

    Args:
        prompts: the prompt of each sample.
        responses: the response of each sample.
        budget_tokens: maximum packed tokens of a pass: most layers need memory for these.
        max_unpacked_tokens: maximum tokens of its samples before packing: attention needs memory for these.

    Returns:
        Sample indices of each pass.

    Raises:
        ValueError: as `pack_samples`, or if the budget is below 1.
    """
    if budget_tokens < 1:
        raise ValueError(f"budget_tokens is {budget_tokens}; it must be at least 1")
    passes: list[list[int]] = []
    packed = 0
    unpacked = 0
    for group in prompt_groups(prompts, responses).values():
        prompt = len(prompts[group[0]])
        has_prompt = False  # the current pass has the prompt
        for row in group:
            length = len(responses[row])
            added = length if has_prompt else prompt + length
            fits = packed + added <= budget_tokens and unpacked + prompt + length <= max_unpacked_tokens
            if not (passes and fits):
                passes.append([])
                packed = 0
                unpacked = 0
                added = prompt + length
            passes[-1].append(row)
            packed += added
            unpacked += prompt + length
            has_prompt = True
    return passes


def _run(start: int, count: int) -> Tensor:
    return torch.arange(start, start + count)


def _starts(lengths: Sequence[int], first: int = 0) -> list[int]:
    """Start offsets of consecutive runs of these lengths, then the end offset of the last."""
    starts = [first]
    for length in lengths:
        starts.append(starts[-1] + length)
    return starts


def _tiles(lengths: Sequence[int]) -> tuple[tuple[PaddedTile, ...], list[int]]:
    """Tiles for samples of these lengths, longest first, and the sample indices in the order of the tiles' rows."""
    order = sorted(range(len(lengths)), key=lambda row: -lengths[row])
    tiles: list[PaddedTile] = []
    for row in order:
        if tiles and lengths[row] >= MIN_FILL * tiles[-1].length:
            tiles[-1] = PaddedTile(tiles[-1].rows + 1, tiles[-1].length)
        else:
            tiles.append(PaddedTile(1, lengths[row]))
    return tuple(tiles), order


def _starts_of_rows(tiles: Sequence[PaddedTile]) -> list[int]:
    return _starts([tile.length for tile in tiles for _ in range(tile.rows)])[:-1]


def _source(samples: Sequence[Tensor], tiles: Sequence[PaddedTile]) -> Tensor:
    """Packed token at each tile position, rows in order, padded with token 0."""
    source_N = torch.zeros(sum(tile.places for tile in tiles), dtype=torch.long)
    for sample, start in zip(samples, _starts_of_rows(tiles), strict=True):
        source_N[start : start + len(sample)] = sample
    return source_N


def _further(members: Sequence[list[int]], prompts: Sequence[Tensor], place_of: dict[int, int]) -> tuple[Tensor, ...]:
    """Tile positions of the prompt tokens of the second members, the third, ..."""
    return tuple(
        torch.cat([_run(place_of[group[nth]], len(prompts[group[0]])) for group in members if nth < len(group)])
        for nth in range(1, len(members[0]))
    )


def _predictions(
    prompts: Sequence[Tensor],
    responses: Sequence[Tensor],
    members: Sequence[list[int]],
    starts_G: Sequence[int],
    ends_S: Sequence[int],
) -> tuple[Tensor, Tensor]:
    """``predicts_U``: each prompt's last token, then all packed response tokens; and ``prediction_T``."""
    lasts = torch.tensor([starts_G[place + 1] - 1 for place in range(len(members))])
    place_of = {row: place for place, group in enumerate(members) for row in group}
    begins = len(members) - starts_G[-1]
    about = [
        torch.cat([torch.tensor([place_of[row]]), _run(ends_S[row] + begins, len(response) - 1)])
        for row, response in enumerate(responses)
        if len(response)
    ]
    inner = _run(starts_G[-1], ends_S[len(prompts)] - starts_G[-1])
    return torch.cat([lasts, inner]), torch.cat(about) if about else torch.zeros(0, dtype=torch.long)


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, packed_FD: Tensor, packed: PackedBatch) -> Tensor:
        ctx.packed = packed
        return packed_FD.index_select(0, packed.source_N)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_ND: Tensor) -> tuple[Tensor, None]:
        packed: PackedBatch = ctx.packed
        first_FD = gradient_ND.index_select(0, packed.first_F)
        # Gradients of members nearly cancel: do not round to bfloat16 after each addition.
        total_FD = first_FD.to(torch.promote_types(first_FD.dtype, torch.float32))
        for places in packed.further:
            total_FD[: len(places)] += gradient_ND.index_select(0, places)
        return total_FD.to(gradient_ND.dtype), None


class _Gather(torch.autograd.Function):
    """`index_select` with distinct indices, whose backward needs no accumulation."""

    @staticmethod
    def forward(ctx: Any, tiles_ND: Tensor, first_F: Tensor) -> Tensor:
        ctx.save_for_backward(first_F)
        ctx.places = len(tiles_ND)
        return tiles_ND.index_select(0, first_F)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_FD: Tensor) -> tuple[Tensor, None]:
        (first_F,) = ctx.saved_tensors
        gradient_ND = gradient_FD.new_zeros(ctx.places, gradient_FD.shape[1])
        return gradient_ND.index_copy_(0, first_F, gradient_FD), None
