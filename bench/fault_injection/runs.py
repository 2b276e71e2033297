"""Preparation that all trials share: imported modules, data, a tiny model and a configuration."""

import dataclasses
import gc
import importlib
import json
import os
from pathlib import Path

from fault_injection.trial import MEMBERS, PROMPTS, STEPS

from flowrt.launcher.build_model import build as build
from flowrt.launcher.fork_server.child import SHARED
from flowrt.net.curve_keys import write_keys
from flowrt.recipes.config import RunConfig
from flowrt.recipes.config_io import defaults

HELD_OUT = 3
"""Problems on which a run is evaluated before its first step and after its last."""
WORKER_TIMEOUT_S = 3.0
KEYS = "keys"


def warm_up() -> None:
    """Import what the processes of a run import, without starting a thread."""
    import torch

    torch.set_num_threads(1)
    for module in (*SHARED, "flowrt.launcher.controller_main", "flowrt.launcher.resume"):
        importlib.import_module(module)
    # Forked processes share these pages as long as their garbage collectors do not write to them.
    gc.collect()
    gc.freeze()


def prepare(folder: Path, filtered: int = 0, max_length: int = 128) -> RunConfig:
    """Write the data and build a tiny model without warm start; returns the configuration of all trials.

    Raises RuntimeError if the model cannot be built.

    Args:
        folder: directory of all trials.
        filtered: groups that the group filter drops in each step for their equal rewards (dynamic sampling). The model
            solves no problem, so every group has equal rewards; the data has ``filtered`` more prompts a step.
        max_length: of prompt and response together, in tokens.
    """
    data = folder / "data.jsonl"
    rows = [
        {"question": f"What is {n} and {n + 3}?", "answer": f"#### {2 * n + 3}"}
        for n in range(STEPS * (PROMPTS + filtered) + HELD_OUT)
    ]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    base = defaults("gsm8k")
    dynamic = dataclasses.replace(base.algorithm.filter, zero_variance=True, tries=max(filtered, 1))
    config = dataclasses.replace(
        base,
        steps=STEPS,
        prompts_per_step=PROMPTS,
        group_size=MEMBERS,
        run_dir=str(folder / "base"),
        max_run_restarts=4,
        data=dataclasses.replace(base.data, path=str(data), epochs=1, eval_prompts=HELD_OUT),
        build=dataclasses.replace(
            base.build, hidden_size=32, layers=1, heads=2, intermediate_size=64, vocab_size=300, max_length=max_length
        ),
        sft=dataclasses.replace(base.sft, steps=0, answer_only_steps=0, eval_prompts=1),
        rollout=dataclasses.replace(base.rollout, workers=2, max_running_requests=4, max_new_tokens=8),
        trainer=dataclasses.replace(base.trainer, micro_batch_tokens=64, save=False),
        controller=dataclasses.replace(
            base.controller,
            heartbeat_s=0.2,
            worker_timeout_s=WORKER_TIMEOUT_S,
            reconnect_timeout_s=60.0,
            transfer_idle_timeout_s=WORKER_TIMEOUT_S,
            no_progress_timeout_s=60.0,
            connect_timeout_s=20.0,
            request_timeout_s=600.0,
        ),
        supervisor=dataclasses.replace(
            base.supervisor, backoff_s=0.05, hung_process_timeout_s=1.0, role_vacancy_timeout_s=10.0
        ),
        algorithm=dataclasses.replace(base.algorithm, filter=dynamic) if filtered else base.algorithm,
        checkpoint=dataclasses.replace(base.checkpoint, every=2, keep=2),
    )
    write_keys(folder / KEYS, [])
    pid = os.fork()
    if pid == 0:
        Path(config.run_dir).mkdir()
        build(config)
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    if status:
        raise RuntimeError("the model could not be built; see above")
    model = str(Path(config.run_dir) / "model")
    return dataclasses.replace(config, model=model, build=base.build, sft=base.sft)  # theirs would change nothing
