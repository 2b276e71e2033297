"""Write the measured figures into the documents, each between its two markers, from the files in bench/results.

Run without arguments; it rewrites README.md, docs/benchmarks.md, docs/objectives.md and docs/guides/models.md. A test
compares the documents with its output.
"""

import argparse
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "results"
BEGIN, END = "<!-- figures: scripts/figures.py -->\n", "<!-- end of figures -->"
BOUNDS = (0, 1, 2, 4)


def result(name: str) -> dict[str, Any]:
    """The contents of one results file: ``metrics`` by name, and ``machine``."""
    loaded: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return loaded


def headline() -> str:
    """The table of the README, as Markdown."""
    job, trl, plain, rows, tensor, weight, steps, fault = (
        result(name)["metrics"]
        for name in (
            *("main_job", "compare_trl", "compare_trl_plain", "metadata", "tensors", "weights", "ablation", "faults"),
        )
    )
    lines = [
        (
            f"default job, mean reward, first to last ten steps, {job['staleness_1_seeds']} seeds",
            f"{job['staleness_1_reward_first']:.2f} to {job['staleness_1_reward_last']:.2f}",
            "",
            "main_job",
        ),
        (
            f"whole GRPO loop, compiled, {_types(trl)}, samples/s",
            f"{trl['samples_per_s']:.0f}",
            f"TRL: {trl['baseline_samples_per_s']:.0f}",
            "compare_trl",
        ),
        (
            f"the same in float32 without torch.compile{_old_task(plain)}, samples/s",
            f"{plain['samples_per_s']:.0f}",
            f"TRL: {plain['baseline_samples_per_s']:.0f}",
            "compare_trl_plain",
        ),
        (
            "delayed update, simulated engines, workload `paper`, speed-up",
            f"{steps['speedup_delayed_paper']:.2f}x",
            "synchronous loop: 1x",
            "ablation",
        ),
        (
            "metadata, 64 rows a request, rows/s",
            f"{rows['rows_per_s_64']:,.0f}",
            f"TransferQueue: {rows['baseline_rows_per_s_64']:,.0f}",
            "metadata",
        ),
        (
            "tensors between processes, rows of 1 MB, GB/s",
            f"{tensor['shm_gbps_1mb']:.2f}",
            f"TransferQueue: {tensor['baseline_gbps_1mb']:.2f}",
            "tensors",
        ),
        (
            "generation paused by weight updates, one every 2 s",
            f"{weight['stall_fraction']:.2%}",
            f"blocking update: {weight['stall_fraction_blocking']:.2%}",
            "weights",
        ),
        (
            f"{fault['trials']:.0f} runs with a random fault: prompts lost, trained twice, hangs",
            f"{fault['lost']:.0f}, {fault['doubled']:.0f}, {fault['hung']:.0f}",
            "",
            "faults",
        ),
    ]
    return "\n".join(
        [
            "| measurement (CPU) | flowrt | compared with | file in `bench/results` |",
            "|---|---|---|---|",
            *(f"| {what} | {own} | {other} | `{name}.json` |" for what, own, other, name in lines),
            "",
        ]
    )


def tables() -> str:
    """The tables of docs/benchmarks.md: a section for each file, with the command that measures it."""
    lines: list[str] = []
    for title, table, command in SECTIONS:
        name = table.__name__
        if (RESULTS / f"{name}.json").is_file():
            words = f"python bench/{command} --json bench/results/{name}.json"
            lines += [f"## {title}", "", *table(result(name)["metrics"], f"`bench/results/{name}.json`")]
            lines += ["```sh", words, "```", ""]
    return "\n".join(lines)


def main_job(metrics: dict[str, Any], where: str) -> list[str]:
    """The default job under several staleness bounds."""
    machine = result("main_job")["machine"]
    lines = [
        f"{machine['steps']} steps of 16 prompts with 8 samples each on {machine['cores']} CPU cores ({where}, medians "
        "over seeds).",
        "",
        "| staleness bound | seeds | reward, first → last ten steps | held out, greedy | seconds until reward 0.8 "
        "| samples/s | busy: rollout, trainer | largest staleness | prompts lost, trained twice |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for bound in BOUNDS:
        one = {name.removeprefix(f"staleness_{bound}_"): value for name, value in metrics.items()}
        reached_s = one.get("seconds_to_0.8")
        lines.append(
            f"| {bound} | {one['seeds']} | {one['reward_first']:.2f} → {one['reward_last']:.2f} "
            f"| {one['eval_first']:.2f} → {one['eval_last']:.2f} "
            f"| {'never' if reached_s is None else f'{reached_s:.0f}'} "
            f"| {one['samples_per_s']:.0f} | {one['busy_rollout']:.0%}, {one['busy_trainer']:.0%} "
            f"| {one['staleness_max']} | {one['prompts_lost']}, {one['prompts_trained_twice']} |"
        )
    reached, seeds = metrics["staleness_1_seeds_from_0.4_to_0.8_in_240_s"], metrics["staleness_1_seeds"]
    return [
        *lines,
        "",
        f"At bound 1, {reached} of {seeds} seeds rose from at most 0.4 to at least 0.8 within four minutes of "
        f"the start of the command, and {metrics['staleness_1_seeds_to_0.9']} ended at 0.9 or more. The first training "
        f"step was done after {metrics['staleness_1_first_step_total_s']:.0f} s, which includes building the model and "
        "its supervised training.",
        "",
    ]


def gsm8k(one: dict[str, Any], where: str) -> list[str]:
    """Word problems from a file."""
    return [
        f"{one['steps']} steps in {one['wall_s']:.0f} s ({where}): mean reward {one['reward_first']:.3f} → "
        f"{one['reward_last']:.3f} ({one['reward_ratio']:.1f}x), held out {one['eval_first']:.3f} → "
        f"{one['eval_last']:.3f}, {one['samples_per_s']:.0f} samples/s, {one['tokens_per_s']:.0f} tokens/s, "
        f"{one['prompts_trained']} prompts trained, {one['prompts_lost']} lost, {one['prompts_trained_twice']} trained "
        "twice. The model has 1.3 million parameters, too few to reason: it learns the answer format, which is worth "
        "0.1, and right answers stay rare.",
        "",
    ]


def gemma(one: dict[str, Any], where: str) -> list[str]:
    """A pretrained model learns a task: the mean reward of each five steps."""
    seeds = result("gemma")["machine"]["seeds"]
    ends = sorted(int(name.removeprefix("reward_to_")) for name in one if name.startswith("reward_to_"))
    return [
        "Gemma 3 270M, which scripts/install_gemma writes, learns to name the larger of two numbers "
        f"(`examples/larger_number.py`; {where}, medians over {seeds} seed(s)): {ends[-1]} steps of 64 samples in "
        f"{one['minutes']:.0f} minutes, held-out answers right {one['held_out_first']:.2f} → "
        f"{one['held_out_last']:.2f} (the worst seed {one['held_out_last_least']:.2f}).",
        "",
        "| steps up to | " + " | ".join(map(str, ends)) + " |",
        "|---" * (len(ends) + 1) + "|",
        "| mean reward of five steps | " + " | ".join(f"{one[f'reward_to_{end}']:.2f}" for end in ends) + " |",
        "",
    ]


def sizes(one: dict[str, Any], where: str) -> list[str]:
    """Peak memory at real vocabularies and lengths, and what lengths of prompts cost."""
    names = [name.removeprefix("memory_ratio_") for name in one if name.startswith("memory_ratio_")]
    cases = {
        "lengths_256": "256 prompts of 256 lengths, 262k words",
        "prompt_32k": "one prompt of 32k tokens",
        "prompts_16k": "8 prompts of 16k tokens",
        "catch_up": "in-flight update of 256 sequences of 4,096 tokens",
        "top_k": "top-k training of 8,192 tokens, 262k words",
    }
    return [
        f"Peak memory over weights, cache and one chunk, tiny layers ({where}); prompts of 64 lengths take "
        f"{one['prefill_lengths_ratio']:.2f} times as long as equal ones with as many tokens.",
        "",
        "| case | peak MB | over weights, cache and one chunk |",
        "|---|---|---|",
        *(
            f"| {cases[name]} | {one[f'peak_mb_{name}']:.0f} | {one[f'memory_ratio_{name}']:.2f} |"
            for name in names
            if name in cases
        ),
        "",
    ]


def metadata(one: dict[str, Any], where: str) -> list[str]:
    """The metadata plane, compared with TransferQueue and with a server that only echoes."""
    rows = [
        ("produce then consume, 1 row a request, rows/s", "rows_per_s_1", "{:,.0f}"),
        ("64 rows a request", "rows_per_s_64", "{:,.0f}"),
        ("512 rows a request", "rows_per_s_512", "{:,.0f}"),
        ("1 row a request, 8 requests in flight", "rows_per_s_1_pipelined", "{:,.0f}"),
        ("64 rows a request, 8 in flight", "rows_per_s_64_pipelined", "{:,.0f}"),
        ("512 rows a request, 8 in flight", "rows_per_s_512_pipelined", "{:,.0f}"),
        ("time of a pull of 32: 100,000 rows outstanding against 1,000", "pull_ratio_100k", "{:.2f}x"),
        ("throughput of 4 producers and 4 consumers against 1 and 1", "scaling_4x4", "{:.2f}x"),
        ("idle memory of the controller, MB", "controller_rss_mb", "{:.0f}"),
        ("start to first row served, s", "start_s", "{:.2f}"),
    ]
    lines = [
        f"Medians ({where}). The metadata plane is everything but the tensors.",
        "",
        "| | flowrt | TransferQueue 0.1.11, same run |",
        "|---|---|---|",
    ]
    for text, key, form in rows:
        baseline = one.get(f"baseline_{key}")
        lines.append(f"| {text} | {form.format(one[key])} | {'' if baseline is None else form.format(baseline)} |")
    return [
        *lines,
        "",
        f"Pulls answered with a grant: {one['rtt_per_s_64']:,.0f} a second with 64 workers (a server that only echoes, "
        f"on the same sockets: {one['echo_per_s_64']:,.0f}), {one['rtt_per_s_4096']:,.0f} with 4,096 (echo: "
        f"{one['echo_per_s_4096']:,.0f}). The 99th percentile is {one['rtt_p99_ms_4096']:.1f} ms when 4,096 workers "
        "pull once a second each. The controller's state machine alone handles "
        f"{one['core_events_per_s_1e5']:,.0f} events a second with 100,000 slots. With the ledger a run takes "
        f"{one['ledger_ratio']:.2f}x the time of one without. `PYTHON` is an interpreter that has TransferQueue.",
        "",
    ]


def ablation(one: dict[str, Any], where: str) -> list[str]:
    """The effect of each further step of asynchrony."""
    modes, workloads = ("sync", "streaming", "delayed", "rolling", "tail"), ("paper", "balanced", "training", "uniform")
    lines = [
        f"Samples/s relative to the synchronous, task-separated loop ({where}), with simulated engines in real "
        "processes and the real protocol. The workloads are defined in "
        "[bench/end_to_end/simulated/workloads.py](../bench/end_to_end/simulated/workloads.py); "
        "`tail` is length-aware dispatch.",
        "",
        "| | " + " | ".join(workloads) + " | busy in `paper`: rollout, trainer |",
        "|---|" + "---|" * (len(workloads) + 1),
    ]
    for mode in modes:
        gains = " | ".join(f"{one[f'speedup_{mode}_{workload}']:.2f}" for workload in workloads)
        busy = f"{one[f'busy_rollout_{mode}_paper']:.0%}, {one[f'busy_trainer_{mode}_paper']:.0%}"
        lines.append(f"| {mode} | {gains} | {busy} |")
    return [*lines, ""]


def tensors(one: dict[str, Any], where: str) -> list[str]:
    """Put and get across processes."""
    lines = [
        f"GB/s of a put followed by a get in another process ({where}). `PYTHON` is an interpreter that has "
        "TransferQueue.",
        "",
        "| size of a row | shared memory | gloo | raw gloo | raw TCP | TransferQueue, same run |",
        "|---|---|---|---|---|---|",
    ]
    for case in ("1kb", "100kb", "1mb", "16mb"):
        names = ("shm", "gloo", "raw_gloo", "raw_tcp", "baseline")
        found = [one.get(f"{name}_gbps_{case}") for name in names]
        lines.append(f"| {case} | " + " | ".join("" if value is None else f"{value:.2f}" for value in found) + " |")
    return [*lines, ""]


def weights(one: dict[str, Any], where: str) -> list[str]:
    """Distribution of weight versions."""
    return [
        f"Sending a version to 8 receivers takes {one['fanout_ratio_8']:.2f} times as long as to 1, each behind a "
        f"rate-limited link of its own, and the trainer sends {one['egress_copies_8']:.2f} copies ({where}). The delta "
        f"of a step at learning rate 1e-6 has {one['delta_fraction']:.2%} of the bytes of the full version. With a new "
        f"version every 2 s, generation is paused {one['stall_fraction']:.2%} of the time, and "
        f"{one['stall_fraction_blocking']:.2%} when the update blocks. Run it as root, with `ip` and `tc`.",
        "",
    ]


def faults(one: dict[str, Any], where: str) -> list[str]:
    """Runs with injected faults."""
    what = "one process, drawn at random, was killed, stopped or disconnected at a random moment"
    ends = ""
    if "replaced_s_max" in one:
        what = (
            "faults came at random moments: processes were killed, stopped, disconnected or got SIGTERM, SIGINT or "
            "SIGHUP (workers, controller, launcher, fork server, ranks), two at once, all at once, or while a run was "
            "resumed; files were damaged, disks were full"
        )
        ends = (
            f" {one['resumed']:.0f} runs had to be resumed; a new step was done {one['resume_s_p50']:.1f} s later "
            f"(median), {one['resume_s_max']:.1f} s at worst. A worker that left after SIGTERM was replaced after "
            f"{one['replaced_s_p50']:.2f} s (median), {one['replaced_s_max']:.2f} s at worst."
        )
    return [
        f"In {one['trials']:.0f} runs {what} ({where}). Prompts lost: {one['lost']:.0f}; trained twice: "
        f"{one['doubled']:.0f}; runs that hung: {one['hung']:.0f}; runs that ended in another way than expected: "
        f"{one['wrong']:.0f}. The next step was done {one['recover_s_p50']:.2f} s after the fault (median), "
        f"{one['recover_s_max']:.1f} s at worst, with a worker timeout of {one['worker_timeout_s']:.0f} s.{ends}",
        "",
    ]


def durable(one: dict[str, Any], where: str) -> list[str]:
    """What survives of what was generated."""
    bounds = {name.rsplit("_", 1)[1]: value for name, value in one.items() if "fraction_bound_" in name}
    return [
        f"The worst of all repetitions, in tokens counted in the engine ({where}).",
        "",
        "| what ends a run or a worker | lost of what was generated | without kept samples |",
        "|---|---|---|",
        *(
            f"| preemption with notice, staleness bound {bound} | {value:.1%} of the tokens not trained then "
            f"| {'{:.0%}'.format(one['preempt_lost_fraction_without']) if bound == '1' else ''} |"
            for bound, value in bounds.items()
        ),
        f"| SIGKILL of all processes, `rollout.journal_s` 10 | {one['killed_lost_s']:.1f} s of generation | |",
        f"| SIGKILL of a rollout worker, `rollout.journal_s` 10 | {one['worker_lost_s']:.1f} s of its generation | |",
        "",
        f"In {one['trials']:.0f} runs with kills at random moments, {one['taken_over']:.0f} of which took over kept "
        f"samples: prompts lost {one['lost']:.0f}, trained twice {one['doubled']:.0f}, over the staleness bound "
        f"{one['over_bound']:.0f}; runs that hung {one['hung']:.0f}, ended in another way than expected "
        f"{one['wrong']:.0f}. Samples/s with a journal every second over those without: {one['journal_ratio']:.3f}.",
        "",
    ]


def core_events(one: dict[str, Any], where: str) -> list[str]:
    """Costs of single events of the controller at full size."""
    rows = [
        ("a worker dies", "death_ms", "{:.2f} ms"),
        ("200 workers die in one tick", "deaths_200_s", "{:.2f} s"),
        ("a tick with 16 draining workers", "drain_tick_ms", "{:.2f} ms"),
        ("a message during a preemption", "preempting_us", "{:.1f} us"),
        ("a step is closed", "step_closed_ms", "{:.1f} ms"),
        ("first pull of a step", "first_pull_ms", "{:.1f} ms"),
        ("one version by rolling weight sync, 2,048 workers", "rolling_version_s", "{:.2f} s"),
        ("a relay of weights breaks, 2,048 workers", "relay_break_s", "{:.2f} s"),
        ("attribution and timeline, share of the event loop", "attribution_loop_share", "{:.3f}"),
        (
            "weights to 4,096 receivers, one dies, one link 10 times slower: time over the usual",
            "relay_4096_ratio",
            "{:.2f}",
        ),
        ("start on a ledger of 10 million prompts", "ledger_10m_start_s", "{:.1f} s"),
        ("its summary", "ledger_10m_summary_s", "{:.1f} s"),
        (
            "growth of memory over the second half of 3 million steps with 10,000 deaths",
            "month_memory_growth",
            "{:.1%}",
        ),
    ]
    return [
        f"Processor time of the controller's core with 4,096 workers and 100,000 slots, medians ({where}).",
        "",
        "| event | cost |",
        "|---|---|",
        *(f"| {what} | {form.format(one[name])} |" for what, name, form in rows if name in one),
        "",
    ]


def sglang_updates(one: dict[str, Any], where: str) -> list[str]:
    """A weight update in a real SGLang server."""
    ways = [name.removeprefix("stand_ms_") for name in one if name.startswith("stand_ms_")]
    rows = [
        f"| {way.split('_', 1)[0]} | {way.split('_', 1)[1]} | {one[f'stage_ms_{way}']:.0f} "
        f"| {one[f'stand_ms_{way}']:.0f} | {one[f'load_ms_{way}']:.0f} | {one[f'check_ms_{way}']:.0f} |"
        for way in ways
    ]
    return [
        f"Time in ms to load {one['weight_mb']:.0f} MB of new float32 weights into a real SGLang server on a CPU while "
        f"sequences run ({where}).",
        "",
        "| `--rollout.sglang.weights` | `.pause` | staging, while it generates | total pause | of this: loading "
        "| of this: checksums |",
        "|---|---|---|---|---|---|",
        *rows,
        "",
    ]


TYPES = ("float32", "bfloat16")


def compare_trl(one: dict[str, Any], where: str) -> list[str]:
    """The whole loop compared with another trainer, in both types, both sides compiled."""
    by_type = [
        f"| {dtype} | {one[f'{dtype}_samples_per_s']:.0f} ({one[f'{dtype}_reward']:.2f}) "
        f"| {one[f'baseline_{dtype}_samples_per_s']:.0f} ({one[f'baseline_{dtype}_reward']:.2f}) "
        f"| {one[f'{dtype}_ratio']:.2f}x |"
        for dtype in TYPES
        if f"{dtype}_ratio" in one
    ]
    return [
        f"TRL's GRPO trainer with the same model, problems, lengths and steps; each has all cores ({where}). Both use "
        f"torch.compile: TRL for the trainer's passes, flowrt for decode steps as well. {_types(one).capitalize()}, "
        f"flowrt does {one['samples_per_s']:.0f} samples/s (reward {one['reward']:.2f}) and TRL "
        f"{one['baseline_samples_per_s']:.0f} (reward {one['baseline_reward']:.2f}): {one['ratio']:.2f}x. That is "
        f"{one['ratio_to_bound']:.2f} of the bound for perfectly overlapped generation and training."
        f"{_seconds_to_reward(one)} `PYTHON` is an interpreter that has TRL.",
        "",
        "| both in | flowrt, samples/s (reward) | TRL | speed-up |",
        "|---|---|---|---|",
        *by_type,
        "",
    ]


def compare_trl_plain(one: dict[str, Any], where: str) -> list[str]:
    """The same in float32, without torch.compile."""
    return [
        f"Both in float32{_old_task(one)} ({where}): {one['samples_per_s']:.0f} samples/s and reward "
        f"{one['reward']:.2f} against {one['baseline_samples_per_s']:.0f} and {one['baseline_reward']:.2f}: "
        f"{one['ratio']:.2f}x.{_seconds_to_reward(one)}",
        "",
    ]


def _old_task(one: dict[str, Any]) -> str:
    """What differs in a file that is older than the end token of the task's model."""
    return "" if "reached" in one else ", with a model without an end token"


def _types(one: dict[str, Any]) -> str:
    """In which type each side computes."""
    measured = [dtype for dtype in TYPES if f"{dtype}_ratio" in one]
    return "each in its faster type" if len(measured) > 1 else f"both in {measured[0]}"


def _seconds_to_reward(one: dict[str, Any]) -> str:
    """A sentence on the time to the target reward, and the worst seed; empty for a file without these figures."""
    if "reached" not in one:
        return ""
    sides = [
        f"{name} {one[f'{side}seconds_to_reward']:.0f} s" if f"{side}seconds_to_reward" in one else f"{name} never"
        for name, side in (("flowrt", ""), ("TRL", "baseline_"))
    ]
    return (
        f" Until the mean reward of five steps is at least the target, {sides[0]} after the first step, {sides[1]} "
        f"(medians; reached by {one['reached']:.0%} and {one['baseline_reached']:.0%} of the seeds; lowest final "
        f"reward {one['reward_min']:.2f} and {one['baseline_reward_min']:.2f})."
    )


def decoding(one: dict[str, Any], where: str) -> list[str]:
    """The torch rollout engine, eager and compiled."""
    numbers = [int(name.removeprefix("ratio_")) for name in one if name.startswith("ratio_")]
    rows = [
        f"| {number} | {one[f'plain_ms_{number}']:.1f} | {one[f'compiled_ms_{number}']:.1f} "
        f"| {one[f'ratio_{number}']:.2f}x |"
        for number in numbers
    ]
    return [
        f"The torch rollout engine with `--rollout.compile True`, responses of 64 tokens ({where}).",
        "",
        "| concurrent sequences | eager, ms a sample | compiled, ms a sample | speed-up |",
        "|---|---|---|---|",
        *rows,
        "",
    ]


def passes(one: dict[str, Any], where: str) -> list[str]:
    """A trainer's pass, padded and with shared prompts."""
    lengths = [int(name.removeprefix("ratio_")) for name in one if name.startswith("ratio_")]
    rows = [
        f"| {length} | {one[f'padded_ms_{length}']:.1f} | {one[f'folded_ms_{length}']:.1f} "
        f"| {one[f'ratio_{length}']:.2f}x | {one[f'memory_ratio_{length}']:.2f} |"
        for length in lengths
    ]
    return [
        f"Forward and backward pass over groups of 8 samples with responses of 64 tokens ({where}).",
        "",
        "| tokens of a prompt | padded, ms a sample | prompt computed once, ms a sample | speed-up "
        "| memory relative to padded |",
        "|---|---|---|---|---|",
        *rows,
        "",
    ]


TASKS: tuple[tuple[str, str, str], ...] = (
    ("rows_start_s", "start on 1,000,000 rows, until the first prompt can be offered, s", "<= 5"),
    ("rows_mb", "memory of the index, MB", "<= 100"),
    ("rows_check_s", "check of every row before a run, s", "<= 5"),
    ("data_check_s", "`flowrt data check` of 100,000 conversations on one core, s", "<= 10"),
    ("sets_exact", "three weighted sets: largest difference from their shares in any window of steps, prompts", "<= 1"),
    ("templates_wrong", "prompts of six families of chat models that differ from transformers' own", "<= 0"),
    ("hostile_ratio", "throughput of 4 reward processes when calls hang, take 2 GB, raise, die or fork", ">= 0.95"),
    ("overrun_s", "longest overrun of a deadline, s", "<= 0.5"),
    ("processes_left", "processes that are left", "<= 0"),
    ("reward_scaling", "4 reward processes over one, calls of 20 ms", ">= 3.6"),
    ("reward_cost", "processor time of the default job's own reward over that of the job", "<= 0.01"),
    ("judge_lost", "rewards lost with a judge that fails, answers prose and goes away", "<= 0"),
    ("judge_calls_again", "requests of a second run with the same answers", "<= 0"),
    ("eval_ratio", "samples/s with an evaluation every 10 steps over none", ">= 0.95"),
    ("eval_mixed", "answers of more than one version", "<= 0"),
    ("eval_pass_error", "pass@k against enumeration", "<= 1e-12"),
    ("eval_differs", "results that differ between two deterministic runs", "<= 0"),
    ("eval_of_checkpoint_differs", "results of `flowrt eval` that differ from those of the run", "<= 0"),
    ("best_wrong", "best weights that are not those that were evaluated, in runs with kills", "<= 0"),
    ("first_check_s", "first `flowrt data check` of one's own conversations, s", "<= 10"),
    (
        "first_step_s",
        "first `flowrt run --model DIR --data FILE --reward math`, until its first step is trained, s",
        "<= 30",
    ),
)
"""Name of a figure, its description and its bound."""


def tasks(one: dict[str, Any], where: str) -> list[str]:
    """A user's own task."""
    return [
        f"On two CPU cores ({where}). The hostile calls have a deadline of 1 s; the time that hanging calls take until "
        f"then is not counted (with it: {one['hostile_raw_ratio']:.2f}).",
        "",
        *bounded(TASKS, one),
        "",
    ]


SEEING: tuple[tuple[str, str, str], ...] = (
    ("replays_wrong", "of 200 simulated runs, replayed under 3 hash seeds: those that differ", "<= 0"),
    ("observed_wrong", "of 1,000 statuses of real runs with kills: those that the replay lacks", "<= 0"),
    ("recorder_bytes", "bytes of recording an event, default job", "<= 20"),
    ("recorder_bytes_simulated", "bytes of recording an event, simulated runs", "<= 20"),
    ("recorder_ratio", "samples/s of the default job with recording over without, median of 5 pairs", ">= 0.99"),
    (
        "core_recorded_ratio",
        "events that a processor second of the core handles, with recording over without",
        ">= 0.97",
    ),
    ("causes_planted", "runs in real processes with one planted cause of waiting", ">= 12"),
    ("causes_missed", "of these: those whose cause and root are not named first", "<= 0"),
    ("attribution_gap", "largest error of the planted seconds that were found again", "<= 0.1"),
    ("attribution_sum_error", "largest difference of a role's seconds from the time of its workers", "<= 0.001"),
    ("attribution_other", "largest share of `other` in a run with a planted cause", "<= 0.03"),
    ("attribution_other_job", "share of `other` in the default job", "<= 0.08"),
    ("samples_ratio", "samples/s of the default job with stored samples over without, median of 5 pairs", ">= 0.98"),
    ("store_mb", "largest size of the file of samples with a bound of 64 MB, 30,000 steps, MB", "<= 70"),
    ("store_flagged_kept", "share of flagged samples that are left", ">= 1"),
    ("status_ms", "brief status of 4,096 workers, processor time, ms", "<= 3"),
    ("status_kb", "its size, KB", "<= 40"),
    ("page_kb", "first load of the page of 4,096 workers and 10,000 steps, KB", "<= 1024"),
    ("paint_ms", "until its curves are drawn in Chromium, ms", "<= 300"),
    ("redraw_ms", "zoom of its timeline, 9 of 10 are faster, ms", "<= 50"),
    ("event_s", "from a lost worker to its red line on the page, s", "<= 1.5"),
    ("hostile_effects", "effects of 10,000 hostile texts on the page", "<= 0"),
    ("http_leaks", "requests without token, of foreign hosts or paths that are not refused", "<= 0"),
    ("cost_ratio", "samples/s of the default job with everything on and three open pages over nothing", ">= 0.98"),
    ("cost_memory_mb", "memory of its controller in addition, MB", "<= 40"),
    ("cost_rows_ratio", "rows/s of the metadata plane with three observers over without", ">= 0.95"),
    ("unopened", "of runs killed at a random instant: views that do not open", "<= 0"),
    ("numbers_wrong", "numbers that differ between the page, files and exporters", "<= 0"),
    ("trace_wrong", "spans that a Perfetto trace lacks or has at another time", "<= 0"),
)
"""Name of a figure, its description and its bound."""


def seeing(one: dict[str, Any], where: str) -> list[str]:
    """Correctness and cost of observability."""
    return [
        f"What a run shows, and what that costs, on two CPU cores ({where}). `bench/seeing.py --list` says what "
        "each row measures. Ratios of throughput need a machine without other load.",
        "",
        *bounded(SEEING, one),
        "",
    ]


OBJECTIVES: tuple[tuple[str, str, str], ...] = (
    ("closed_form_max", "every part against a scalar formula, value and gradient, 1,000 cases", "<= 1e-12"),
    ("paper_max", "gradient of every preset, from rewards on, against the formula of its paper", "<= 1e-12"),
    ("metrics_wrong", "metrics that differ from their definition at any drawn setting", "<= 0"),
    ("trl_gradient_max", "gradient against TRL's", "<= 1e-6"),
    ("trl_loss_max", "loss against TRL's", "<= 1e-6"),
    ("invariance_max", "gradient, however a step is cut, packed or spread", "<= 1e-11"),
    ("enumeration_exact_max", "expected gradient where theory says exact", "<= 1e-12"),
    ("enumeration_biased_max", "expected gradient against its own closed bias", "<= 1e-9"),
    ("bandit_tv_max", "total variation from the fixed point, 8 runs", "<= 0.005"),
    ("lm_head_gb", "memory of the fused LM head, 8,192 x 151,936, bfloat16, GB", "<= 0.3"),
    ("lm_head_speed_ratio", "its speed over whole logits, float32 on a CPU", ">= 1"),
    ("lm_head_value_error", "its log-probabilities in bfloat16 against float64, nats", "<= 1e-5"),
    ("lm_head_gradient_error", "its gradients in bfloat16 against float64, relative", "<= 2e-3"),
    ("c3po_cv_ratio", "spread of tokens a step, without a token budget over with", ">= 10"),
    ("c3po_length_bias", "mean length of what is trained with it over that of all (goal 0.97 to 1.03)", ">= 0.97"),
    ("staleness16_best", "accuracy with samples 16 versions old over 0, best objective", ">= 0.95"),
    ("retention_dpo_64", "gain kept if a generation serves 64 updates, online DPO", ">= 0.95"),
    ("retention_ppo_64", "the same, PPO clip", "<= 0.8"),
    ("dynamic_steps_ratio", "steps to accuracy 0.8, dynamic sampling over without", "<= 0.8"),
    ("dynamic_equal_groups_trained", "groups of equal rewards trained with it", "<= 0"),
    ("curriculum_ratio", "tokens to accuracy 0.8, half of the prompts impossible, over uniform", "<= 0.75"),
    ("presets_failed", "presets below reward 0.9 on the default job, of those in the table below", "<= 0"),
    ("bound4_over_bound0_min", "least reward at bound 4 over bound 0, of those run at both", ">= 0.98"),
    ("default_speed_ratio", "samples/s of the default job over the tree before objectives", ">= 0.98"),
)
"""Name of a figure, its description and its bound."""


def objectives() -> str:
    """The table of docs/objectives.md."""
    measured = result("objectives")["metrics"]
    return "\n".join([*bounded(OBJECTIVES, measured), "", *_runs_of(measured), *_staleness_of(measured)])


def bounded(figures: Sequence[tuple[str, str, str]], measured: Mapping[str, float]) -> list[str]:
    """The lines of a table; ``figures`` are a name, a description and a bound such as "<= 5" each."""
    lines = ["| figure | what it is | bound | measured | |", "|---|---|---|---|---|"]
    for figure, what, bound in figures:
        if figure not in measured:
            lines.append(f"| `{figure}` | {what} | {bound} | not measured | |")
            continue
        value, (sense, limit) = measured[figure], bound.split()
        is_kept = value <= float(limit) if sense == "<=" else value >= float(limit)
        lines.append(f"| `{figure}` | {what} | {bound} | {value:.3g} | {'' if is_kept else 'missed'} |")
    return lines


def _runs_of(measured: dict[str, float]) -> list[str]:
    """The reward of each preset, and over how many seeds."""
    at = {
        bound: [key for key in measured if key.endswith(f"_bound_{bound}") and key[:7] == "reward_"] for bound in (0, 4)
    }
    names = sorted({key[7:-8] for keys in at.values() for key in keys})
    if not names:
        return []
    cells = [
        f"| `{name}` | "
        + " | ".join(
            f"{measured[key]:.3f}" if (key := f"reward_{name}_bound_{bound}") in measured else "" for bound in at
        )
        + " |"
        for name in names
    ]
    return [
        f"Presets on the default job, reward of the last ten of {measured['runs_steps']:.0f} steps, "
        f"{measured['runs_seeds']:.0f} seed(s): {len(at[0])} presets at bound 0, {len(at[4])} at bound 4. "
        "With a group filter: held-out problems.",
        "",
        "| preset | bound 0 | bound 4 |",
        "|---|---|---|",
        *cells,
        "",
    ]


def _staleness_of(measured: dict[str, float]) -> list[str]:
    """Accuracy of each objective at each staleness: mean, least and most over seeds."""
    lags = (0, 1, 2, 4, 8, 16)
    names = [key[10:-3] for key in measured if key.startswith("staleness_") and key.endswith("_16")]
    if not names:
        return []

    def cell(name: str, lag: int) -> str:
        key = f"staleness_{name}_{lag}"
        if key not in measured:
            return ""
        return f"{measured[key]:.2f} ({measured[f'{key}_least']:.2f} to {measured[f'{key}_most']:.2f})"

    return [
        f"Held-out accuracy after {measured['staleness_steps']:.0f} steps on samples of one staleness (versions), "
        f"mean and range over {measured['staleness_seeds']:.0f} seed(s).",
        "",
        "| objective | " + " | ".join(map(str, lags)) + " |",
        "|---" * (len(lags) + 1) + "|",
        *(f"| {name} | " + " | ".join(cell(name, lag) for lag in lags) + " |" for name in names),
        "",
    ]


def architectures() -> str:
    """The tables of docs/guides/models.md: families by the way in which they generate and train, and those refused."""
    found = result("architectures")
    families: dict[str, dict[str, Any]] = found["families"]
    version = found["machine"]["transformers"]
    counts = {name.removeprefix("arch_"): f"{value:.0f}" for name, value in found["metrics"].items()}
    generation = {"rows": "rows of keys and values", "sequences": "a cache for each sequence"}
    generation |= {"anew": "the whole sequence for each token", "refused": "not at all; use SGLang"}
    lines = [
        f"Of the {len(families)} families of transformers {version}, {counts['right']} are right in all paths, "
        f"{counts['refused']} are refused, {counts['wrong']} are wrong, and {counts['tracebacks']} end in a traceback.",
        "",
        "| the torch rollout engine generates with | samples are trained | families |",
        "|---|---|---|",
    ]
    for way, text in generation.items():
        for form in ("packed", "padded"):
            paths = {"generation": way, "training": form}
            names = [name for name, one in families.items() if paths.items() <= one.items()]
            if names:
                lines.append(f"| {text} | {form} | {', '.join(f'`{name}`' for name in names)} |")
    reasons: dict[str, list[str]] = {}
    for name, one in families.items():
        if one["state"] == "refused" and one["training"] == "refused":
            reasons.setdefault(_general(one["reason"], name), []).append(name)
    lines += ["", "| refused because | families |", "|---|---|"]
    lines += [f"| {why} | {', '.join(f'`{name}`' for name in names)} |" for why, names in sorted(reasons.items())]
    return "\n".join([*lines, ""])


def _general(reason: str, family: str) -> str:
    """The reason of a refusal without the family's own name and number."""
    text = reason.removeprefix(f"model {family}").lstrip(": ").replace("|", "/")
    return re.sub(r"by [\d.e+-]+ nats", "by some nats", text)


SECTIONS: tuple[tuple[str, Callable[[dict[str, Any], str], list[str]], str], ...] = (
    ("Default job", main_job, "main_job.py --other-seeds 2"),
    ("GSM8K", gsm8k, "gsm8k.py --data problems.jsonl"),
    ("A pretrained model", gemma, "gemma.py"),
    ("Controller: the metadata plane", metadata, "metadata.py --baseline-python PYTHON"),
    ("Controller: the cost of single events", core_events, "core_events.py"),
    ("Asynchrony, step by step", ablation, "ablation.py"),
    ("Tensors", tensors, "tensors.py --baseline-python PYTHON"),
    ("Weights", weights, "weights.py"),
    ("Faults", faults, "faults.py"),
    ("What survives of what was generated", durable, "durable.py"),
    ("A user's own task", tasks, "tasks.py"),
    ("Seeing a run", seeing, "seeing.py"),
    ("Sizes", sizes, "sizes.py"),
    ("Training passes", passes, "passes.py"),
    ("Decoding", decoding, "decoding.py"),
    ("Weight updates of SGLang", sglang_updates, "sglang_updates.py --sglang-python PYTHON"),
    ("Whole loop, compared with TRL", compare_trl, "compare_trl.py --baseline-python PYTHON"),
    (
        "The same without a compiler",
        compare_trl_plain,
        "compare_trl.py --baseline-python PYTHON --no-compile --dtypes float32",
    ),
)
PAGES: dict[str, Callable[[], str]] = {
    "README.md": headline,
    "docs/benchmarks.md": tables,
    "docs/objectives.md": objectives,
    "docs/guides/models.md": architectures,
}


def rendered(text: str, figures: str) -> str:
    """The text of a page with new figures between its markers. Raises ValueError unless it begins them exactly once."""
    before, rest = text.split(BEGIN)
    return before + BEGIN + figures + END + rest.split(END)[1]


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    for name, figures in PAGES.items():
        page = ROOT / name
        page.write_text(rendered(page.read_text(), figures()))
