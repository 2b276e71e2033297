"""Generation and training on one device at a time and at the same time, in processes of their own, as in a run."""

import multiprocessing
import time
from typing import Any

import torch
from accelerator.engines import batch_of, dtype_of, generate, load_of, rollout_of, trainer_of

from flowrt.transport.devices import choose

READY_S = 300.0
SPARE_S = 120.0


def serve_role(role: str, kind: str, quick: bool, link: Any) -> None:
    """Work for each number of seconds received over ``link``, and answer with tokens/s."""
    torch.set_num_threads(1)
    device, load = choose(kind), load_of(quick)
    device.use()
    batch = batch_of(load, 0)
    if role == "generation":
        rollout = rollout_of(load, device, dtype_of(device), compiled=device.kind == "cuda")
        tokens = load.rows * load.response
    else:
        trainer = trainer_of(load, device)
        tokens = len(batch.responses) * (load.prompt + load.response)

    def once(seed: int) -> None:
        if role == "generation":
            generate(rollout, load, seed)
        else:
            trainer.accumulate(batch)
            trainer.step()

    once(0)
    link.send(0.0)
    seed = 1
    while (seconds := link.recv()) > 0:
        begin_s, count = time.perf_counter(), 0
        while time.perf_counter() - begin_s < seconds:
            once(seed)
            seed, count = seed + 1, count + 1
        link.send(count * tokens / (time.perf_counter() - begin_s))


def overlap(kind: str, quick: bool) -> dict[str, float]:
    """Tokens/s of each alone and of both together, and the sum of the two ratios: 1 as by turns, 2 without any loss."""
    context = multiprocessing.get_context("spawn")
    seconds = 1.0 if quick else 20.0
    links, processes = {}, []
    try:
        for role in ("generation", "training"):
            links[role], theirs = context.Pipe()
            process = context.Process(target=serve_role, args=(role, kind, quick, theirs), daemon=True)
            process.start()
            processes.append(process)
        for role, link in links.items():
            _answer(link, READY_S, role)
        metrics = {}
        for role, link in links.items():
            link.send(seconds)
            metrics[f"{role}_alone_tokens_per_s"] = _answer(link, seconds + SPARE_S, role)
        for link in links.values():
            link.send(seconds)
        for role, link in links.items():
            metrics[f"{role}_together_tokens_per_s"] = _answer(link, seconds + SPARE_S, role)
        shares = [metrics[f"{role}_together_tokens_per_s"] / metrics[f"{role}_alone_tokens_per_s"] for role in links]
        return {**metrics, "sum_of_shares": sum(shares)}
    finally:
        for process in processes:
            process.kill()
            process.join()


def _answer(link: Any, limit_s: float, role: str) -> float:
    if not link.poll(limit_s):
        raise TimeoutError(f"{role} did not answer within {limit_s:.0f} s")
    return float(link.recv())
