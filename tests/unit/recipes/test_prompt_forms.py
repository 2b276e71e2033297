"""The format of a prompt, found from its number, is that with which it became tokens."""

import json
from pathlib import Path

import pytest

from flowrt.ids import prompt_number
from flowrt.recipes.config_io import parse
from flowrt.recipes.eval_names import first_number
from flowrt.recipes.eval_sets import eval_sets
from flowrt.recipes.prompt_forms import PromptForms
from flowrt.recipes.tasks.registry import task_of


def rows(folder: Path, name: str, count: int) -> str:
    path = folder / f"{name}.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{name} {n}", "answer": "1"}) + "\n" for n in range(count)))
    return str(path)


@pytest.mark.parametrize("weights", [("1", "1", "1"), ("0.7", "0.2", "0.1"), ("3", "0.001", "5")])
@pytest.mark.parametrize("has_eval_data", [False, True])
def test_the_format_of_each_prompt_is_that_of_its_set(
    tmp_path: Path, weights: tuple[str, str, str], has_eval_data: bool
) -> None:
    a, b, c, d, e = (rows(tmp_path, name, 12) for name in "abcde")
    flags = ["--data", f"a={a}:{weights[0]} system_prompt=A", "--data", f"b={b}:{weights[1]}"]
    flags += [
        "--data",
        f"c={c}:{weights[2]} system_prompt=C",
        "--data.system-prompt",
        "of the run",
        "--reward",
        "exact",
    ]
    if has_eval_data:
        flags += ["--eval.data", f"d={d} system_prompt=D", "--eval.data", f"e={e}"]
    config = parse(["custom", *flags, *([] if has_eval_data else ["--data.eval-prompts", "7"])])
    task, forms, default = task_of(config), PromptForms(config), config.data.prompt_format
    for index, data_set in enumerate(task.training_sets()):
        for row, problem in enumerate(data_set.problems):
            assert forms.trained(prompt_number(index, row)) == (problem.form or default)
    by_name = eval_sets(config, task)
    assert sorted(by_name) == (["d", "e"] if has_eval_data else ["held_out"])
    for name, problems in by_name.items():
        for row, problem in enumerate(problems):
            assert forms.evaluated(first_number(name) + row) == (problem.form or default), (name, row)
    prompts = {problem.form.system_prompt for problems in by_name.values() for problem in problems if problem.form}
    assert prompts == ({"D"} if has_eval_data else {"A", "C"})


def test_one_data_set_has_the_format_of_the_run(tmp_path: Path) -> None:
    config = parse(["custom", "--data", rows(tmp_path, "a", 9), "--reward", "exact", "--data.eval-prompts", "2"])
    forms = PromptForms(config)
    assert forms.trained(5) == forms.evaluated(first_number("held_out") + 1) == config.data.prompt_format
