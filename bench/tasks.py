"""A user's own task: start with its data, tokens of its prompts, misbehaving rewards, evaluations, best weights.

    python bench/tasks.py [--parts PART ...] [--json PATH] [--quick]

Parts; without names, all of them:

- rows: a JSON Lines file of 1,000,000 rows (20,000 with --quick) in a process of its own: time until the first prompt
  can be offered (index, held-out rows, order) and its memory above an empty start; time of the two checks of every row
  before a run, of its fields (rows_check_s) and of its prompt against the model (rows_prompts_s), and the CPU time of
  both;
- data_check: `flowrt data check` of 100,000 conversations (2,000 with --quick) on one core: wall and CPU time;
- sets_exact: three data sets of weights 0.7, 0.2 and 0.1 over 100 steps of 16 prompts: largest difference between the
  prompts of a set in any window of steps and its share;
- templates: prompts of 24 families of chat models, with all combinations of tools, calls, thinking, prefill and a late
  system message, from rows of a file, against transformers' own rendering; of six also their start and stop tokens;
- checks: command lines that are drawn, right and wrong ones, on which `flowrt data check` or `flowrt reward check` and
  `flowrt run` disagree whether to refuse them;
- hostile: a reward function of 20 ms in 4 processes, of whose calls 1 in 50 hangs, takes 2 GB, or raises, and 1 in 200
  ends its process, or leaves 100 processes. The deadline is 1 s. hostile_ratio is the time that the calls need at the
  rate of a clean function, plus the deadlines of the hanging ones on 4 processes, relative to the time they took;
  hostile_raw_ratio is without these deadlines;
- reward_scaling: rate of 4 processes relative to that of one, with calls of 20 ms;
- reward_cost: processor time of scoring the samples of the default job, by its own reward, over that of the job;
- code: programs in responses, in bubblewrap (if it works here) and in limits: those that solve nothing and score 1,
  those that are right and do not, and the time of a call with a small program;
- judge: a server that answers 1 in 4 requests with 429 or 500 and 1 in 50 with prose, and is away for a second:
  rewards that do not match its answers, and requests of a second run with the same file of answers;
- async: 64 calls of an async reward function that each take a second;
- inapplicable: a run in which half of the rows have no reward function that applies: how many of their samples are
  trained;
- types: columns of JSON Lines and Parquet files whose type is another one when they reach the reward function;
- eval: samples/s with an evaluation every 10 steps over those without, by turns; pass@k against enumeration; two equal
  runs, and `flowrt eval` of a checkpoint, have the same results;
- best: runs that are killed and resumed: best weights that are not those of their version;
- first_step: a chat model and 1,000 conversations of one's own: `flowrt data check`, and `flowrt run --model DIR --data
  FILE --reward math` until its first step is trained.
"""

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from itertools import islice
from pathlib import Path

from common.first_run import first_step
from common.harness import Bench, quick_part
from common.reward_forms import async_calls, inapplicable, types
from common.rewards import hostile, judge, reward_cost, reward_scaling
from evaluation.runs import best, evaluation

from flowrt.engines.prompts import DataPrompt, PromptEncoder, PromptFormat, end_of_turn_ids
from flowrt.recipes.data.mixture import alternate
from tests.proofs.chat_families import templates_of_families
from tests.proofs.chat_models import FAMILIES, chat_tokenizer
from tests.proofs.check_agreement import check_agreement
from tests.proofs.programs import code

BOUNDS = {
    "rows_start_s": 5.0,
    "rows_check_s": 5.0,
    "rows_mb": 100.0,
    "data_check_s": 10.0,
    "sets_exact": 1.0,
    "templates_wrong": 0.0,
    "check_disagrees": 0.0,
    "overrun_s": 0.5,
    "processes_left": 0.0,
    "hostile_miscounted": 0.0,
    "reward_cost": 0.01,
    "code_cheats": 0.0,
    "code_refused": 0.0,
    "judge_lost": 0.0,
    "judge_calls_again": 0.0,
    "async_s": 2.0,
    "inapplicable_trained": 0.0,
    "types_changed": 0.0,
    "eval_mixed": 0.0,
    "eval_pass_error": 1e-12,
    "eval_differs": 0.0,
    "eval_of_checkpoint_differs": 0.0,
    "best_wrong": 0.0,
    "first_check_s": 10.0,
    "first_step_s": 30.0,
}
"""Largest values of figures; a figure without a bound is only reported."""
FLOORS = {"hostile_ratio": 0.95, "reward_scaling": 3.6, "eval_ratio": 0.95}
"""Smallest values of figures."""
ROWS, QUICK_ROWS = 1_000_000, 20_000
CHECKED, QUICK_CHECKED = 100_000, 2_000
HELD_OUT = 64
WEIGHTS, STEPS, PROMPTS_PER_STEP = (0.7, 0.2, 0.1), 100, 16
TIMEOUT_S = 600.0
STARTER = """
import json, random, sys, time
from pathlib import Path
from flowrt.recipes.data_config import DataConfig
from flowrt.recipes.data.files import open_rows
from flowrt.recipes.tasks.problems import Problems, ProblemSet
from flowrt.recipes.tasks.problems import check_rows

def peak_mb():
    status = Path("/proc/self/status").read_text()  # ru_maxrss would include the parent, before exec
    return int(status.partition("VmHWM:")[2].split()[0]) / 1024

data, before_mb, start_s = DataConfig(prompt_key="prompt", eval_prompts=int(sys.argv[2])), peak_mb(), time.monotonic()
rows = open_rows(Path(sys.argv[1]))
first = len(rows) - data.eval_prompts
problems = Problems(rows, data, range(first))
order = list(range(len(problems)))
random.Random("order 0 0").shuffle(order)
assert problems[order[0]].messages
found = {"rows_start_s": time.monotonic() - start_s}
start_s, cpu_s = time.monotonic(), time.process_time()
problem_set = ProblemSet("", 1.0, rows, data, first)
check_rows([problem_set], data)
found["rows_check_s"] = time.monotonic() - start_s
found["rows_check_cpu_s"] = time.process_time() - cpu_s
found["rows_mb"] = peak_mb() - before_mb

from transformers import AutoTokenizer
from flowrt.engines.prompts import PromptFormat
from flowrt.launcher.prompt_check import check_prompts
from flowrt.recipes.prompt_limits import PromptLimits

tokenizer = AutoTokenizer.from_pretrained(sys.argv[3], local_files_only=True)
limits = PromptLimits(positions=4096, vocab_size=len(tokenizer), max_new_tokens=256)
start_s, cpu_s = time.monotonic(), time.process_time()
check_prompts(problem_set.prompt_blocks(), tokenizer, limits=limits, what="the model", form=PromptFormat())
found["rows_prompts_s"] = time.monotonic() - start_s
found["rows_prompts_cpu_s"] = time.process_time() - cpu_s
print(json.dumps(found))
"""
CONVERSATIONS = (
    (("system", "You are terse."), ("user", "What is one and one?")),
    (("user", "  Räume\n\nund 数字 1 \t"),),
    (("user", "1 + 1?"), ("assistant", "2"), ("user", "2 + 2?")),
)


def rows(quick: bool) -> dict[str, float]:
    """Start, checks and memory of a large data set."""
    count = QUICK_ROWS if quick else ROWS
    with tempfile.TemporaryDirectory() as folder:
        path = write_rows(Path(folder) / "rows.jsonl", count)
        chat_tokenizer(FAMILIES["qwen"]).save_pretrained(folder)
        command = [sys.executable, "-c", STARTER, str(path), str(HELD_OUT), folder]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=True)
    metrics: dict[str, float] = json.loads(ended.stdout)
    return {"rows": float(count), **metrics}


def write_rows(path: Path, count: int) -> Path:
    """A data set of ``count`` conversations."""
    with path.open("w") as file:
        for n in range(count):
            prompt = [{"role": "user", "content": f"What is {n} plus one? Answer with the number alone, please."}]
            file.write(json.dumps({"prompt": prompt, "answer": str(n + 1), "level": n % 5}) + "\n")
    return path


def data_check(quick: bool) -> dict[str, float]:
    """Wall and CPU time of `flowrt data check`, on one core."""
    count = QUICK_CHECKED if quick else CHECKED
    tokenizer = chat_tokenizer(FAMILIES["qwen"])
    core = min(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as folder:
        path = write_rows(Path(folder) / "rows.jsonl", count)
        tokenizer.save_pretrained(folder)
        config = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": len(tokenizer)}
        (Path(folder) / "config.json").write_text(json.dumps(config))
        command = [sys.executable, "-m", "flowrt.cli", "data", "check", "--model", folder, "--data", str(path)]
        before, start_s = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
        subprocess.run(
            command,
            stdout=subprocess.DEVNULL,
            timeout=TIMEOUT_S,
            check=True,
            preexec_fn=lambda: os.sched_setaffinity(0, {core}),
        )
        wall_s, after = time.monotonic() - start_s, resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"data_check_rows": float(count), "data_check_s": wall_s, "data_check_cpu_s": cpu_s}


def sets_exact(quick: bool) -> dict[str, float]:  # noqa: ARG001 (takes no time)
    """Largest difference between the prompts of a set and its share, in prompts, over all windows of steps."""
    order = list(islice(alternate(WEIGHTS), STEPS * PROMPTS_PER_STEP))
    largest = 0.0
    for at, weight in enumerate(WEIGHTS):
        excess, count = [0.0], 0
        for place, chosen in enumerate(order, 1):
            count += chosen == at
            if place % PROMPTS_PER_STEP == 0:
                excess.append(round(count - weight * place, 6))
        largest = max(largest, max(excess) - min(excess))
    return {"sets_exact": largest}


def templates(quick: bool) -> dict[str, float]:
    """Number of prompts checked, and of prompts and end-of-turn tokens that are wrong."""
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
            is_right = ids == expected == encoder.encode_all([DataPrompt("", conversation)])[0]
            wrong += not (is_right and (start is None or ids.count(start) == 1))
            checked += 1
        wrong += end_of_turn_ids(tokenizer, family.template) != (tokenizer.convert_tokens_to_ids(family.turn),)
    counts = templates_of_families(quick)
    return {
        "templates": float(checked + counts["checked"]),
        "templates_refused": float(counts["refused"]),
        "templates_wrong": float(wrong + counts["wrong"]),
    }


BENCH = Bench(
    about=__doc__,
    parts={
        name: quick_part(measure)
        for name, measure in {
            "rows": rows,
            "data_check": data_check,
            "sets_exact": sets_exact,
            "templates": templates,
            "checks": check_agreement,
            "hostile": hostile,
            "reward_scaling": reward_scaling,
            "reward_cost": reward_cost,
            "code": code,
            "judge": judge,
            "async": async_calls,
            "inapplicable": inapplicable,
            "types": types,
            "eval": evaluation,
            "best": best,
            "first_step": first_step,
        }.items()
    },
    most=BOUNDS,
    least=FLOORS,
)

if __name__ == "__main__":
    sys.exit(BENCH.main())
