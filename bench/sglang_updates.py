"""Pauses of a real SGLang server for new weights, by the way of the weights and the treatment of running sequences.

    python bench/sglang_updates.py --sglang-python PYTHON [--json PATH] [--quick]     # scripts/install_sglang makes one

One server on this machine's cores, with running sequences at each update. Staging runs during generation; the pause
lasts from the request that begins it to the answer to the request that ends it, and includes a check of checksums.
"""

import argparse
import itertools
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import torch
from common.harness import Bench, Figures, Options, Samples

from flowrt.engines.base import Prompt
from flowrt.engines.hf import load_model, named_parameters, save_model
from flowrt.engines.options import PauseMode, SglangOptions, WeightPath
from flowrt.engines.server.client import Call, ServerClient
from flowrt.engines.server.engine import ServerRollout
from flowrt.engines.sglang.dialect import sglang_rollout
from flowrt.engines.stopping import StopConditions
from flowrt.engines.tiny_model import build_model, wrap_tokenizer
from flowrt.recipes.tasks.arithmetic import Arithmetic
from flowrt.transport.weights.snapshot import Snapshot

VOCABULARY, PROMPT, ROWS, TOKENS, WARM = 320, 8, 8, 400, 4
ROUNDS = 5
WAYS: list[tuple[WeightPath, PauseMode]] = [
    ("disk", "retract"),
    ("disk", "in_place"),
    ("disk", "abort"),
    ("tensor", "retract"),
    ("broadcast", "retract"),
]
PARTS = {"/pause_generation": "pause", "/continue_generation": "continue", "/weights_checker": "check"}


class Clock:
    """Begin and end of each request to a server since the last `forget`; patches `ServerClient.post`."""

    def __init__(self) -> None:
        self._spans: list[tuple[str, float, float]] = []
        post = ServerClient.post
        spans = self._spans

        async def timed(self: ServerClient, call: Call, deadline_s: float) -> Any:
            begun_s = time.monotonic()
            answer = await post(self, call, deadline_s)
            spans.append((call.route, begun_s, time.monotonic()))
            return answer

        ServerClient.post = timed  # type: ignore[method-assign]

    def forget(self) -> None:
        self._spans.clear()

    def parts(self) -> dict[str, float]:
        """Milliseconds of the pause (``stand_ms``), and of its requests by kind."""
        spans = [span for span in self._spans if span[0] != "/generate"]
        begin = next(begun_s for route, begun_s, _ in spans if route == "/pause_generation")
        end = next(done_s for route, _, done_s in spans if route == "/continue_generation")
        times_ms = {"stand": end - begin, "load": 0.0} | dict.fromkeys(PARTS.values(), 0.0)
        for route, begun_s, done_s in spans:
            times_ms[PARTS.get(route, "load")] += done_s - begun_s
        return {f"{name}_ms": 1e3 * spent_s for name, spent_s in times_ms.items()}


def engine(options: SglangOptions, folder: Path, tokens: int) -> ServerRollout:
    """An engine whose end token is outside the vocabulary, so that every sequence has ``tokens`` tokens."""
    return sglang_rollout(
        options,
        folder / "model",
        stop=StopConditions((VOCABULARY + 1,)),
        rows=ROWS,
        max_new_tokens=tokens,
        temperature=1.0,
        threads=1,
        log_path=folder / "server.log",
    )


@contextmanager
def served(python: str, folder: Path) -> Iterator[str]:
    """Run a server; yields its address, with its key in the environment of this process."""
    options = SglangOptions(
        python=python, device="cpu", dtype="float32", arguments="--max-total-tokens 8192", start_s=900.0
    )
    with closing(engine(options, folder, TOKENS)) as owner:
        owner.start()
        os.environ["SGLANG_API_KEY"] = owner.server_key
        yield owner.url


def prompts(seed: int) -> list[Prompt]:
    dice = torch.Generator().manual_seed(seed)
    tokens = torch.randint(2, VOCABULARY, (ROWS, PROMPT), generator=dice, dtype=torch.int32)
    return [Prompt(key, row, seed * ROWS + key) for key, row in enumerate(tokens)]


def drain(rollout: ServerRollout) -> list[Any]:
    done = []
    while rollout.running:
        done += rollout.run(threading.Event())
    return done


def change(rollout: ServerRollout, warm: ServerRollout, snapshot: Snapshot, clock: Clock) -> dict[str, float]:
    """Update the weights during running sequences, once a short sequence that was added after them has ended.

    Returns milliseconds by part, and the share of sequences that span versions.
    """
    rollout.add(prompts(snapshot.version))
    warm.add(prompts(snapshot.version)[:1])
    drain(warm)
    clock.forget()
    work, begun_s = rollout.prepare(snapshot), time.monotonic()
    assert work is not None
    work()
    times_ms = {"stage_ms": 1e3 * (time.monotonic() - begun_s)}
    rollout.swap(snapshot)
    times_ms |= clock.parts()
    across = sum(len(set(response.spans[::2])) > 1 for response in drain(rollout))
    return times_ms | {"across_fraction": across / ROWS}


def measure(python: str, folder: Path, rounds: int, samples: Samples) -> None:
    clock, versions = Clock(), itertools.count(1)
    with served(python, folder) as url, ExitStack() as kept:
        ways = {}
        for weights, pause in WAYS:
            ways[weights, pause] = rollout = engine(
                SglangOptions(url=(url,), weights=weights, pause=pause), folder, TOKENS
            )
            kept.enter_context(closing(rollout))
            rollout.start()
        warm = kept.enter_context(closing(engine(SglangOptions(url=(url,)), folder, WARM)))
        warm.start()
        parameters = named_parameters(load_model(folder / "model"))
        for each in range(rounds + 1):
            for (weights, pause), rollout in ways.items():
                times_ms = change(rollout, warm, Snapshot.take(next(versions), parameters), clock)
                for name, value in times_ms.items():
                    if each:  # the first round is a warm-up and sets up the process group
                        samples.add(f"{name}_{weights}_{pause}", value)


def updates(options: Options) -> Figures:
    """Milliseconds of an update by part and way, and the share of sequences that span versions."""
    hidden, layers, rounds = (64, 2, 1) if options.quick else (512, 8, ROUNDS)
    model = build_model(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        layers=layers,
        heads=hidden // 32,
        intermediate_size=3 * hidden,
        max_length=512,
        seed=0,
    )
    weight_mb = sum(parameter.nbytes for parameter in named_parameters(model).values()) / 1e6
    samples = Samples()
    with tempfile.TemporaryDirectory(prefix="flowrt-bench-") as name:
        save_model(model, wrap_tokenizer(Arithmetic(0, 0).tokenizer()), Path(name) / "model")
        measure(options.sglang_python, Path(name), rounds, samples)
    return samples.medians() | {"weight_mb": round(weight_mb, 1)}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sglang-python", required=True, help="Python of an environment that has SGLang")


BENCH = Bench(
    about=__doc__,
    parts={"updates": updates},
    add_options=add_options,
    machine=lambda _: {"rounds": ROUNDS, "tokens": TOKENS, "rows": ROWS},
)

if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(BENCH.main())
