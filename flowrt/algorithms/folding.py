"""Samples of which equal prompts are one: a forward pass over each prompt once, and over no padding.

The members of a group share their prompt, and what a causal model computes of a prompt does not depend on what comes
after it. So a pass needs each prompt once, however many members it has. Only attention looks from one token at others:
it works on `Sheet`s, in which every sample is whole again, in a row of its own. All else works on the folded tokens.

A response's last token predicts nothing, so it is left out.

Shapes: F = folded tokens, prompts first; T = response tokens, flattened sample after sample; U = predictions, each of
them wanted once or, after a prompt, once a member; N = places on all sheets, row after row; D = any width.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

SHORTEST = 0.75
"""Of a sheet's longest row: a shorter sample begins another sheet, so little of any sheet is padding."""
UNFOLDED = 2
"""A pass needs memory for folded tokens in every layer's every part, for whole samples in its attention alone."""


@dataclass(frozen=True, slots=True)
class Sheet:
    """Samples of like length, whole, one a row, right-padded."""

    rows: int
    length: int

    @property
    def places(self) -> int:
        return self.rows * self.length


@dataclass(frozen=True, slots=True, eq=False)
class Folded:
    """Which tokens there are, where each stands on the sheets, and what predicts what."""

    tokens_F: Tensor
    """int64"""
    positions_F: Tensor
    """int64, of each token in its sample"""
    predicts_U: Tensor
    """int64, the folded tokens after which a prediction is wanted"""
    prediction_T: Tensor
    """int64, which of these is about each response token"""
    target_T: Tensor
    """int64, the response tokens themselves"""
    sample_T: Tensor
    """int64, the sample of each response token"""
    sheets: tuple[Sheet, ...]
    source_N: Tensor
    """int64, the folded token at each place of the sheets; token 0 at padding, where nobody looks"""
    first_F: Tensor
    """int64, the place of each token that its result is taken from"""
    again: tuple[Tensor, ...]
    """int64, the further places of the first so many tokens: those of prompts with 2, 3, ... members"""

    def to(self, device: torch.device) -> "Folded":
        """The same on a device."""

        def moved(value: Any) -> Any:
            if isinstance(value, Tensor):
                return value.to(device)
            return tuple(moved(one) for one in value) if isinstance(value, tuple) else value

        return Folded(**{field.name: moved(getattr(self, field.name)) for field in fields(self)})

    def spread(self, folded_FD: Tensor) -> Tensor:
        """[N, D]: every token's numbers at all its places. A token's gradient is the sum of theirs.

        In the order of members, so the sum has the same bits each time, on any device.
        """
        apply: Callable[[Tensor, Folded], Tensor] = _Spread.apply
        return apply(folded_FD, self)

    def collect(self, sheets_ND: Tensor) -> Tensor:
        """[F, D]: of every token the numbers at the first of its places."""
        apply: Callable[[Tensor, Tensor], Tensor] = _Collect.apply
        return apply(sheets_ND, self.first_F)


def fold_samples(prompts: Sequence[Tensor], responses: Sequence[Tensor]) -> Folded:
    """Fold samples, each a 1-D tensor of a prompt's token ids and one of a response's.

    A response may be empty, a prompt may not, since its last token predicts the first of the response. Raises
    ValueError for an empty prompt, no samples, unequal numbers of prompts and responses.
    """
    groups = prompt_groups(prompts, responses)
    # Prompts with most members first: those with at least so many are then the first so many tokens.
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
    sheets, order = _sheets([len(sample) for sample in samples])
    place_of = dict(zip(order, _starts_of_rows(sheets), strict=True))
    firsts = [_run(place_of[group[0]], len(prompts[group[0]])) for group in members]
    firsts += [_run(place_of[row] + len(prompts[row]), len(inputs[row])) for row in range(len(prompts))]
    predicts_U, prediction_T = _predictions(prompts, responses, members, starts_G, ends_S)
    return Folded(
        tokens_F=torch.cat(tokens).long(),
        positions_F=torch.cat(
            [_run(0, len(prompts[group[0]])) for group in members]
            + [_run(len(prompt), len(each)) for prompt, each in zip(prompts, inputs, strict=True)]
        ),
        predicts_U=predicts_U,
        prediction_T=prediction_T,
        target_T=torch.cat(list(responses)).long(),
        sample_T=torch.arange(len(responses)).repeat_interleave(torch.tensor([len(each) for each in responses])),
        sheets=sheets,
        source_N=_laid_out([samples[row] for row in order], sheets),
        first_F=torch.cat(firsts),
        again=_again(members, prompts, place_of),
    )


def prompt_groups(prompts: Sequence[Tensor], responses: Sequence[Tensor]) -> dict[bytes, list[int]]:
    """The samples of each distinct prompt, by its bytes, in the order in which they first come.

    Raises ValueError as `fold_samples` does.
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


def cut_folded(prompts: Sequence[Tensor], responses: Sequence[Tensor], budget_tokens: int) -> list[list[int]]:
    """Indices of samples, cut into passes that fold to at most so many tokens, members of a prompt side by side.

    Whole, the samples of a pass have at most UNFOLDED times as many: on its sheets they are. A sample longer than the
    budget gets a pass of its own. Raises ValueError as `fold_samples` does, and if the budget is below 1.
    """
    if budget_tokens < 1:
        raise ValueError(f"budget_tokens is {budget_tokens}; it must be at least 1")
    passes: list[list[int]] = []
    folded = whole = 0
    for group in prompt_groups(prompts, responses).values():
        prompt = len(prompts[group[0]])
        begun = False  # whether this pass has the prompt
        for row in group:
            length = len(responses[row])
            more = length if begun else prompt + length
            fits = folded + more <= budget_tokens and whole + prompt + length <= UNFOLDED * budget_tokens
            if not (passes and fits):
                passes.append([])
                folded, whole, more = 0, 0, prompt + length
            passes[-1].append(row)
            folded, whole, begun = folded + more, whole + prompt + length, True
    return passes


def _run(start: int, count: int) -> Tensor:
    return torch.arange(start, start + count)


def _starts(lengths: Sequence[int], first: int = 0) -> list[int]:
    """Where each of them starts when they follow one another, and where the last one ends."""
    starts = [first]
    for length in lengths:
        starts.append(starts[-1] + length)
    return starts


def _sheets(lengths: Sequence[int]) -> tuple[tuple[Sheet, ...], list[int]]:
    """Sheets for samples of these lengths, longest first, and the samples in the order of their rows."""
    order = sorted(range(len(lengths)), key=lambda row: -lengths[row])
    sheets: list[Sheet] = []
    for row in order:
        if sheets and lengths[row] >= SHORTEST * sheets[-1].length:
            sheets[-1] = Sheet(sheets[-1].rows + 1, sheets[-1].length)
        else:
            sheets.append(Sheet(1, lengths[row]))
    return tuple(sheets), order


def _starts_of_rows(sheets: Sequence[Sheet]) -> list[int]:
    return _starts([sheet.length for sheet in sheets for _ in range(sheet.rows)])[:-1]


def _laid_out(samples: Sequence[Tensor], sheets: Sequence[Sheet]) -> Tensor:
    """The folded tokens of the samples in the order of rows, each padded with token 0."""
    source_N = torch.zeros(sum(sheet.places for sheet in sheets), dtype=torch.long)
    for sample, start in zip(samples, _starts_of_rows(sheets), strict=True):
        source_N[start : start + len(sample)] = sample
    return source_N


def _again(members: Sequence[list[int]], prompts: Sequence[Tensor], place_of: dict[int, int]) -> tuple[Tensor, ...]:
    """For the second members, the third, ...: where they have the tokens of their prompts."""
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
    """Each prompt's last token, then all of the responses; and by which of them each response token is predicted."""
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


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, folded_FD: Tensor, folded: Folded) -> Tensor:
        ctx.folded = folded
        return folded_FD.index_select(0, folded.source_N)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_ND: Tensor) -> tuple[Tensor, None]:
        folded: Folded = ctx.folded
        first_FD = gradient_ND.index_select(0, folded.first_F)
        # Members' gradients nearly cancel out: their sum must not be rounded to bfloat16 after each of them.
        total_FD = first_FD.to(torch.promote_types(first_FD.dtype, torch.float32))
        for places in folded.again:
            total_FD[: len(places)] += gradient_ND.index_select(0, places)
        return total_FD.to(gradient_ND.dtype), None


class _Collect(torch.autograd.Function):
    """As `index_select`, whose gradient would be added up place by place: here no place is wanted twice."""

    @staticmethod
    def forward(ctx: Any, sheets_ND: Tensor, first_F: Tensor) -> Tensor:
        ctx.save_for_backward(first_F)
        ctx.places = len(sheets_ND)
        return sheets_ND.index_select(0, first_F)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_FD: Tensor) -> tuple[Tensor, None]:
        (first_F,) = ctx.saved_tensors
        gradient_ND = gradient_FD.new_zeros(ctx.places, gradient_FD.shape[1])
        return gradient_ND.index_copy_(0, first_F, gradient_FD), None
