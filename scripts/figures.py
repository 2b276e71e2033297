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
    return "\n".join(lines)


def with_figures(readme: str) -> str:
    """The README with fresh figures."""
    before, rest = readme.split(BEGIN)
    return before + BEGIN + figures() + END + rest.split(END)[1]


if __name__ == "__main__":
    path = ROOT / "README.md"
    path.write_text(with_figures(path.read_text()))
