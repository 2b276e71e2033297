"""Write the figures of the README from bench/results, between its two markers; a test compares them.

python scripts/figures.py          rewrite README.md
"""

import json
from pathlib import Path

ROOT = Path(__file__).parents[1]
BEGIN, END = "<!-- figures: scripts/figures.py -->\n", "<!-- end of figures -->"
BOUNDS = (0, 1, 2, 4)


def figures() -> str:
    """The tables, as Markdown."""
    job = json.loads((ROOT / "bench/results/main_job.json").read_text())
    words = json.loads((ROOT / "bench/results/gsm8k.json").read_text())["metrics"]
    metrics, machine = job["metrics"], job["machine"]
    lines = [
        f"The default job, {machine['steps']} steps of 16 prompts x 8 samples on {machine['cores']} CPU cores "
        "(`bench/results/main_job.json`, medians over seeds):",
        "",
        "| staleness bound | seeds | reward, first → last ten steps | held out, greedy | seconds until reward 0.8 "
        "| samples/s | busy: rollout, trainer | largest staleness | lost, doubled |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for bound in BOUNDS:
        one = {name.removeprefix(f"staleness_{bound}_"): value for name, value in metrics.items()}
        until = one.get("seconds_to_0.8")
        lines.append(
            f"| {bound} | {one['seeds']} | {one['reward_first']:.2f} → {one['reward_last']:.2f} "
            f"| {one['eval_first']:.2f} → {one['eval_last']:.2f} | {'never' if until is None else f'{until:.0f}'} "
            f"| {one['samples_per_s']:.0f} | {one['busy_rollout']:.0%}, {one['busy_trainer']:.0%} "
            f"| {one['staleness_max']} | {one['prompts_lost']}, {one['prompts_trained_twice']} |"
        )
    made, seeds = metrics["staleness_1_seeds_from_0.4_to_0.8_in_240_s"], metrics["staleness_1_seeds"]
    lines += [
        "",
        f"At bound 1, {made} of {seeds} seeds went from at most 0.4 to at least 0.8 within four minutes of typing the "
        f"command, {metrics['staleness_1_seeds_to_0.9']} ended at 0.9 or more; the first training step was done after "
        f"{metrics['staleness_1_first_step_total_s']:.0f} s, building and warming up the model included.",
        "",
        f"GSM8K (`bench/results/gsm8k.json`): {words['steps']} steps in {words['wall_s']:.0f} s, mean reward "
        f"{words['reward_first']:.3f} → {words['reward_last']:.3f} ({words['reward_ratio']:.1f} x), held out "
        f"{words['eval_first']:.3f} → {words['eval_last']:.3f}, {words['samples_per_s']:.0f} samples/s, "
        f"{words['tokens_per_s']:.0f} tokens/s, {words['prompts_trained']} prompts trained, "
        f"{words['prompts_lost']} lost, {words['prompts_trained_twice']} trained twice.",
        "",
    ]
    for table in (
        metadata,
        ablation,
        tensors,
        weights,
        faults,
        passes,
        decoding,
        sglang_updates,
        peer_trl,
        peer_trl_plain,
    ):
        name = table.__name__
        path = ROOT / f"bench/results/{name}.json"
        if path.is_file():
            lines += table(json.loads(path.read_text())["metrics"], f"`bench/results/{name}.json`")
    return "\n".join(lines)


def metadata(one: dict[str, float], where: str) -> list[str]:
    """The metadata plane beside TransferQueue, and beside a server that only echoes."""
    rows = [
        ("produce then consume, 1 row a request, rows/s", "rows_per_s_1", "{:,.0f}"),
        ("64 rows a request", "rows_per_s_64", "{:,.0f}"),
        ("512 rows a request", "rows_per_s_512", "{:,.0f}"),
        ("1 row a request, 8 requests under way", "rows_per_s_1_pipelined", "{:,.0f}"),
        ("64 rows a request, 8 under way", "rows_per_s_64_pipelined", "{:,.0f}"),
        ("512 rows a request, 8 under way", "rows_per_s_512_pipelined", "{:,.0f}"),
        ("pull of 32: 100,000 rows outstanding against 1,000", "pull_ratio_100k", "{:.2f}x"),
        ("4 producers and 4 consumers against 1 and 1", "scaling_4x4", "{:.2f}x"),
        ("idle memory of the controller, MB", "controller_rss_mb", "{:.0f}"),
        ("start to first row served, s", "start_s", "{:.2f}"),
    ]
    lines = [
        f"The metadata plane ({where}, medians):",
        "",
        "| | flowrt | TransferQueue 0.1.11, same run |",
        "|---|---|---|",
    ]
    for text, key, form in rows:
        peer = one.get(f"peer_{key}")
        lines.append(f"| {text} | {form.format(one[key])} | {'' if peer is None else form.format(peer)} |")
    return [
        *lines,
        "",
        f"A pull answered by a grant: {one['rtt_per_s_64']:,.0f} a second with 64 workers (a bare echo on the same "
        f"sockets: {one['echo_per_s_64']:,.0f}), {one['rtt_per_s_4096']:,.0f} with 4,096 (echo: "
        f"{one['echo_per_s_4096']:,.0f}); 99 in 100 within {one['rtt_p99_ms_4096']:.1f} ms when each of 4,096 pulls "
        f"once a second. The mind alone handles {one['core_events_per_s_1e5']:,.0f} events a second with 100,000 "
        f"slots. The ledger costs {one['ledger_ratio']:.2f}x.",
        "",
    ]


def ablation(one: dict[str, float], where: str) -> list[str]:
    """What each further step of asynchrony is worth."""
    modes, workloads = ("sync", "streaming", "delayed", "rolling", "tail"), ("paper", "balanced", "training", "uniform")
    lines = [
        f"What each step is worth, with simulated engines in real processes over the real wire ({where}; the workloads "
        "are stated in [bench/simulated/workloads.py](bench/simulated/workloads.py)); samples/s over the synchronous, "
        "task-separated loop:",
        "",
        "| | " + " | ".join(workloads) + " | busy on paper: rollout, trainer |",
        "|---|" + "---|" * (len(workloads) + 1),
    ]
    for mode in modes:
        gains = " | ".join(f"{one[f'speedup_{mode}_{workload}']:.2f}" for workload in workloads)
        busy = f"{one[f'busy_rollout_{mode}_paper']:.0%}, {one[f'busy_trainer_{mode}_paper']:.0%}"
        lines.append(f"| {mode} | {gains} | {busy} |")
    return [*lines, ""]


def tensors(one: dict[str, float], where: str) -> list[str]:
    """Put then get across processes."""
    lines = [
        f"Tensors, put then get from process to process, GB/s ({where}):",
        "",
        "| rows of | shared memory | gloo | raw gloo | raw TCP | TransferQueue, same run |",
        "|---|---|---|---|---|---|",
    ]
    for case in ("1kb", "100kb", "1mb", "16mb"):
        names = ("shm", "gloo", "raw_gloo", "raw_tcp", "peer")
        found = [one.get(f"{name}_gbps_{case}") for name in names]
        lines.append(f"| {case} | " + " | ".join("" if value is None else f"{value:.2f}" for value in found) + " |")
    return [*lines, ""]


def weights(one: dict[str, float], where: str) -> list[str]:
    """Versions on their way."""
    return [
        f"Weights ({where}): a version reaches 8 receivers in {one['fanout_ratio_8']:.2f} times the time of 1 (each "
        f"behind a limited link of its own), and the trainer sends {one['egress_copies_8']:.2f} copies. Changes of a "
        f"step at learning rate 1e-6 are {one['delta_fraction']:.2%} of the bytes. With a version every 2 s generation "
        f"stands still for {one['stall_fraction']:.2%} of the time ({one['stall_fraction_blocking']:.2%} when the "
        "update blocks).",
        "",
    ]


def faults(one: dict[str, float], where: str) -> list[str]:
    """Runs to which something was done."""
    return [
        f"Faults ({where}): in {one['trials']:.0f} runs one process, drawn at random, was killed, stopped or cut off "
        f"at a random moment. Prompts lost: {one['lost']:.0f}, trained twice: {one['doubled']:.0f}; runs that hung: "
        f"{one['hung']:.0f}, that ended otherwise than they should: {one['wrong']:.0f}. The next step was done "
        f"{one['recover_s_p50']:.2f} s after the fault (median), {one['recover_s_max']:.1f} s at worst (silence counts "
        f"as death after {one['silence_s']:.0f} s in these runs).",
        "",
    ]


def sglang_updates(one: dict[str, float], where: str) -> list[str]:
    """A change of weights in a real SGLang server."""
    ways = [name.removeprefix("stand_ms_") for name in one if name.startswith("stand_ms_")]
    rows = [
        f"| {way.split('_', 1)[0]} | {way.split('_', 1)[1]} | {one[f'stage_ms_{way}']:.0f} "
        f"| {one[f'stand_ms_{way}']:.0f} | {one[f'load_ms_{way}']:.0f} | {one[f'check_ms_{way}']:.0f} |"
        for way in ways
    ]
    return [
        f"{one['weight_mb']:.0f} MB of new float32 weights in a real SGLang server on a CPU, with sequences under way, "
        f"ms ({where}):",
        "",
        "| `--rollout.sglang.weights` | `.pause` | made ready while it generates | it stands | for loading "
        "| for its checksums |",
        "|---|---|---|---|---|---|",
        *rows,
        "",
    ]


def peer_trl(one: dict[str, float], where: str) -> list[str]:
    """The whole loop beside another trainer, in both types, both sides compiled."""
    by_type = [
        f"| {dtype} | {one[f'{dtype}_samples_per_s']:.0f} ({one[f'{dtype}_reward']:.2f}) "
        f"| {one[f'peer_{dtype}_samples_per_s']:.0f} ({one[f'peer_{dtype}_reward']:.2f}) "
        f"| {one[f'{dtype}_ratio']:.2f}x |"
        for dtype in ("float32", "bfloat16")
    ]
    return [
        f"The whole loop beside TRL's GRPO trainer, same model, problems, lengths and steps, all cores for each, both "
        f"compiled by torch.compile, TRL the trainer's passes only, flowrt its decode steps as well ({where}): each in "
        f"the type in which it is faster, flowrt does "
        f"{one['samples_per_s']:.0f} samples/s and TRL {one['peer_samples_per_s']:.0f}, with rewards of "
        f"{one['reward']:.2f} and {one['peer_reward']:.2f}: {one['ratio']:.2f}x. That is "
        f"{one['ratio_to_bound']:.2f} of what generation and training could do, perfectly overlapped.",
        "",
        "| both in | flowrt, samples/s (reward) | TRL | times faster |",
        "|---|---|---|---|",
        *by_type,
        "",
    ]


def peer_trl_plain(one: dict[str, float], where: str) -> list[str]:
    """The same in float32, without a compiler."""
    return [
        f"In float32 and without torch.compile ({where}): {one['samples_per_s']:.0f} samples/s and reward "
        f"{one['reward']:.2f} against {one['peer_samples_per_s']:.0f} and {one['peer_reward']:.2f}: "
        f"{one['ratio']:.2f}x.",
        "",
    ]


def decoding(one: dict[str, float], where: str) -> list[str]:
    """The torch rollout engine, plain and compiled."""
    numbers = [int(name.removeprefix("ratio_")) for name in one if name.startswith("ratio_")]
    rows = [
        f"| {number} | {one[f'plain_ms_{number}']:.1f} | {one[f'compiled_ms_{number}']:.1f} "
        f"| {one[f'ratio_{number}']:.2f}x |"
        for number in numbers
    ]
    return [
        f"The torch rollout engine with `--rollout.compile True`, responses of 64 tokens ({where}):",
        "",
        "| sequences at a time | plain, ms a sample | compiled | times faster |",
        "|---|---|---|---|",
        *rows,
        "",
    ]


def passes(one: dict[str, float], where: str) -> list[str]:
    """A trainer's pass, padded and folded."""
    lengths = [int(name.removeprefix("ratio_")) for name in one if name.startswith("ratio_")]
    rows = [
        f"| {length} | {one[f'padded_ms_{length}']:.1f} | {one[f'folded_ms_{length}']:.1f} "
        f"| {one[f'ratio_{length}']:.2f}x | {one[f'memory_ratio_{length}']:.2f} |"
        for length in lengths
    ]
    return [
        f"A trainer's forward and backward pass over groups of 8 with responses of 64 tokens ({where}):",
        "",
        "| tokens of a prompt | padded, ms a sample | each prompt once | times faster | memory, of padded |",
        "|---|---|---|---|---|",
        *rows,
        "",
    ]


def with_figures(readme: str) -> str:
    """The README with fresh figures."""
    before, rest = readme.split(BEGIN)
    return before + BEGIN + figures() + END + rest.split(END)[1]


if __name__ == "__main__":
    path = ROOT / "README.md"
    path.write_text(with_figures(path.read_text()))
