"""The fused LM head against whole logits: memory, and time of a forward and a backward pass.

Full size is 8,192 predictions of 151,936 words in bfloat16, which takes many minutes on a CPU without instructions for
this type. Times are CPU times of one thread: another process on the same cores does not count.
"""

import multiprocessing
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flowrt.algorithms import predicted_logprobs
from flowrt.algorithms.lm_head import fused_logprobs

WIDTH = 64
FULL = (8192, 151_936, torch.bfloat16)
QUICK = (512, 40_000, torch.float32)
Way = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def whole(hidden_UD: Tensor, weight_VD: Tensor, prediction_T: Tensor, target_T: Tensor) -> Tensor:
    """Log-probabilities from whole logits."""
    return predicted_logprobs(hidden_UD @ weight_VD.T, prediction_T, target_T)


def fused(hidden_UD: Tensor, weight_VD: Tensor, prediction_T: Tensor, target_T: Tensor) -> Tensor:
    """Log-probabilities without logits that are whole."""
    return fused_logprobs(hidden_UD, weight_VD, prediction_T, target_T)[0]


WAYS: dict[str, Way] = {"whole": whole, "fused": fused}


def measure(quick: bool) -> dict[str, float]:
    """Metrics of the fused head.

    Args:
        quick: at a small size, which says nothing about the goal.

    Returns:
        ``lm_head_gb``, peak memory (GB) of both passes beyond hidden states, weights and their gradients, and
        ``lm_head_speed_ratio``, time with whole logits over time with the fused head.
    """
    size = QUICK if quick else FULL
    spent = {name: _in_a_process(name, size) for name in WAYS}
    return {"lm_head_gb": spent["fused"][1] / 1e9, "lm_head_speed_ratio": spent["whole"][0] / spent["fused"][0]}


def _in_a_process(name: str, size: tuple[int, int, torch.dtype]) -> tuple[float, float]:
    """CPU time (seconds) and peak memory (bytes) of one way, in a process of its own."""
    mine, theirs = multiprocessing.Pipe(duplex=False)
    child = multiprocessing.get_context("spawn").Process(target=_passes, args=(name, size, theirs))
    child.start()
    theirs.close()
    found: tuple[float, float] = mine.recv()
    child.join()
    return found


def _passes(name: str, size: tuple[int, int, torch.dtype], found: Any) -> None:
    torch.set_num_threads(1)
    predictions, words, dtype = size
    generator = torch.Generator().manual_seed(0)
    hidden_UD = torch.randn(predictions, WIDTH, generator=generator).to(dtype).requires_grad_()
    weight_VD = torch.randn(words, WIDTH, generator=generator).to(dtype).requires_grad_()
    target_T = torch.randint(words, (predictions,), generator=generator)
    warm = torch.randn(8, WIDTH).to(dtype).requires_grad_()
    WAYS[name](warm, weight_VD, torch.arange(8), target_T[:8]).sum().backward()
    weight_VD.grad = None
    Path("/proc/self/clear_refs").write_text("5")
    before = _resident("VmRSS")
    begin_s = time.process_time()
    WAYS[name](hidden_UD, weight_VD, torch.arange(predictions), target_T).sum().backward()
    spent_s = time.process_time() - begin_s
    gradients = hidden_UD.nbytes + weight_VD.nbytes
    found.send((spent_s, float(_resident("VmHWM") - before - gradients)))


def _resident(what: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(what))
