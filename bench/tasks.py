"""A user's own task: how its data starts, and whether its prompts are the right tokens.

    python bench/tasks.py [ROW ...] [--json PATH] [--quick]

Rows, all of them without names:

- rows: a JSON Lines file of 1,000,000 rows (20,000 with --quick) in a process of its own: time until the first prompt
  can be offered (index, held-out rows, order) and its memory above an empty start; time of the check of every row;
- eval: samples/s with an evaluation every 10 steps over those without, by turns; pass@k against enumeration; two equal
  runs, and `flowrt eval` of a checkpoint, have the same results;
- best: runs that are killed and resumed: best weights that are not those of their version;
- templates: prompts of six families of chat models against transformers' own rendering, their start and stop tokens.

Exits with 1 if a figure is above its bound.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from common.chat_models import FAMILIES, chat_tokenizer
from common.report import write
from evaluation.runs import best, evaluation

from flowrt.engines.prompts import PromptEncoder, PromptFormat, end_of_turn_ids

BOUNDS = {
    "rows_start_s": 5.0,
    "rows_mb": 100.0,
    "templates_wrong": 0.0,
    "eval_mixed": 0.0,
    "eval_pass_error": 1e-12,
    "eval_differs": 0.0,
    "eval_of_checkpoint_differs": 0.0,
    "best_wrong": 0.0,
}
"""Of the figures that must not be above one; the others are reported alone."""
ROWS, QUICK_ROWS = 1_000_000, 20_000
HELD_OUT = 64
TIMEOUT_S = 600.0
STARTER = """
import json, random, sys, time
from pathlib import Path
from flowrt.recipes.config import DataConfig
from flowrt.recipes.data.files import open_rows
from flowrt.recipes.tasks.custom import CustomProblems, check_rows

def peak_mb():
    status = Path("/proc/self/status").read_text()  # ru_maxrss would include the parent, before exec
    return int(status.partition("VmHWM:")[2].split()[0]) / 1024

data, before_mb, start_s = DataConfig(prompt_key="prompt", eval_prompts=int(sys.argv[2])), peak_mb(), time.monotonic()
rows = open_rows(Path(sys.argv[1]))
first = len(rows) - data.eval_prompts
problems = CustomProblems(rows, data, range(first))
order = list(range(len(problems)))
random.Random("order 0 0").shuffle(order)
assert problems[order[0]].messages
found = {"rows_start_s": time.monotonic() - start_s}
start_s = time.monotonic()
check_rows(rows, data, first)
found["rows_check_s"] = time.monotonic() - start_s
found["rows_mb"] = peak_mb() - before_mb
print(json.dumps(found))
"""
CONVERSATIONS = (
    (("system", "You are terse."), ("user", "What is one and one?")),
    (("user", "  Räume\n\nund 数字 1 \t"),),
    (("user", "1 + 1?"), ("assistant", "2"), ("user", "2 + 2?")),
)


def rows(quick: bool) -> dict[str, float]:
    """Start, check and memory of a large data set."""
    count = QUICK_ROWS if quick else ROWS
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.jsonl"
        with path.open("w") as file:
            for n in range(count):
                prompt = [{"role": "user", "content": f"What is {n} plus one? Answer with the number alone, please."}]
                file.write(json.dumps({"prompt": prompt, "answer": str(n + 1), "level": n % 5}) + "\n")
        command = [sys.executable, "-c", STARTER, str(path), str(HELD_OUT)]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=True)
    found: dict[str, float] = json.loads(ended.stdout)
    return {"rows": float(count), **found}


def templates(quick: bool) -> dict[str, float]:  # noqa: ARG001 (takes a second)
    """Number of prompts and of families with other tokens than they must have."""
    wrong = checked = 0
    for family in FAMILIES.values():
        tokenizer = chat_tokenizer(family)
        encoder = PromptEncoder(tokenizer, PromptFormat())
        for conversation in CONVERSATIONS:
            if conversation[0][0] == "system" and not family.takes_system:
                continue
            messages = [{"role": role, "content": content} for role, content in conversation]
            expected = tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, tokenize=True, return_dict=False
            )
            ids = encoder("", conversation)
            start = tokenizer.bos_token_id
            is_right = ids == expected == encoder.encode_all([("", conversation)])[0]
            wrong += not (is_right and (start is None or ids.count(start) == 1))
            checked += 1
        wrong += end_of_turn_ids(tokenizer, family.template) != (tokenizer.convert_tokens_to_ids(family.turn),)
    return {"templates": float(checked), "templates_wrong": float(wrong)}


MEASURED: dict[str, Callable[[bool], dict[str, float]]] = {
    "rows": rows,
    "templates": templates,
    "eval": evaluation,
    "best": best,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", metavar="ROW", help=f"default: all of {', '.join(MEASURED)}")
    parser.add_argument("--json", type=Path, help="write {metrics, machine} here")
    parser.add_argument("--quick", action="store_true", help="fewer cases")
    arguments = parser.parse_args()
    unknown = [name for name in arguments.rows if name not in MEASURED]
    if unknown:
        parser.error(f"there is no row {unknown[0]!r}; choose from {', '.join(MEASURED)}")
    metrics: dict[str, float] = {}
    for name in arguments.rows or MEASURED:
        metrics |= MEASURED[name](arguments.quick)
    for name, value in metrics.items():
        print(f"{name:<28}{value:12.6g}   {f'<= {BOUNDS[name]:g}' if name in BOUNDS else ''}")
    write(arguments.json, metrics)
    return int(any(metrics[name] > bound for name, bound in BOUNDS.items() if name in metrics))


if __name__ == "__main__":
    sys.exit(main())
