"""Evaluation data sets: read from their own files, independent of the training data."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from flowrt.errors import ConfigError, refuse
from flowrt.launcher.absolute_paths import with_absolute_paths
from flowrt.launcher.evaluate import EvalOptions, evaluated_config
from flowrt.recipes.config import RunConfig
from flowrt.recipes.config_io import from_toml, read, to_toml
from flowrt.recipes.data_constraints import data_mistakes
from flowrt.recipes.eval_constraints import eval_mistakes
from flowrt.recipes.eval_names import chat_templates
from flowrt.recipes.eval_sets import check_eval_sets, eval_sets, run_prompts
from flowrt.recipes.tasks.registry import task_of


def rows(path: Path, prompts: Sequence[str]) -> Path:
    path.write_text("".join(json.dumps({"prompt": prompt, "answer": "1", "level": 1}) + "\n" for prompt in prompts))
    return path


def config(folder: Path, *flags: str) -> RunConfig:
    (folder / "mine.py").write_text("def reward(response, answer):\n    return 0.0\n")
    base_flags = ["custom", "--model", str(folder), "--reward", str(folder / "mine.py"), "--data.eval-prompts", "0"]
    return read([*base_flags, *flags], "flowrt run")


@pytest.mark.parametrize("difficulty", [[], ["--data.difficulty-key", "level", "--data.max-difficulty", "2"]])
def test_an_evaluation_set_is_independent_of_weights_and_difficulty(tmp_path: Path, difficulty: list[str]) -> None:
    training = [
        f"--data={name}={rows(tmp_path / name, [f'{name} 1', f'{name} 2'])}:0.5" for name in ("a.jsonl", "b.jsonl")
    ]
    training = [flag.replace(".jsonl=", "=", 1) for flag in training]
    eval_file = tmp_path / "held.jsonl"
    eval_file.write_text('{"prompt": "mine", "answer": "1"}\n')  # has no difficulty level
    run = config(tmp_path, *training, *difficulty, "--eval.data", f"mine={eval_file}")
    [(name, problems)] = eval_sets(run, task_of(run)).items()
    assert (name, [problem.prompt for problem in problems]) == ("mine", ["mine"])
    check_eval_sets(run, task_of(run))


def test_run_prompts_include_training_and_evaluation_prompts(tmp_path: Path) -> None:
    training, eval_file = rows(tmp_path / "a.jsonl", ["one", "two"]), rows(tmp_path / "held.jsonl", ["three"])
    run = config(tmp_path, "--data", str(training), "--eval.data", f"mine={eval_file}")
    prompts = [
        (prompt, block.where(at))
        for block in run_prompts(run, task_of(run))
        for at, (prompt, _, _) in enumerate(block.prompts)
    ]
    assert [prompt for prompt, _ in prompts] == ["one", "two", "three"]
    assert prompts[-1][1].endswith("held.jsonl, line 1")


def test_evaluation_with_several_samples_uses_the_rollout_temperature(tmp_path: Path) -> None:
    data_flags = ("--data", str(rows(tmp_path / "a.jsonl", ["one", "two"])), "--rollout.temperature", "0.7")

    def temperature(*flags: str) -> float | None:
        run = config(tmp_path, *data_flags, "--eval.data", "mine=held.jsonl", *flags)
        sampling = run.eval.sampling(run.rollout.temperature)
        return None if sampling is None else sampling.temperature

    assert temperature() is None
    assert temperature("--eval.samples", "4") == 0.7
    assert temperature("--eval.samples", "4", "--eval.temperature", "0.2") == 0.2
    assert temperature("--eval.temperature", "0.2") == 0.2


def test_evaluation_prompts_in_the_training_data_are_refused(tmp_path: Path) -> None:
    training = rows(tmp_path / "a.jsonl", ["one", "two", "three"])
    eval_file = rows(tmp_path / "held.jsonl", ["four", "two ", "one"])
    run = config(tmp_path, "--data", str(training), "--eval.data", f"mine={eval_file}")
    message = r"held\.jsonl, line 3: prompts of eval\.data are training prompts too, 2 rows, .*a\.jsonl, line 1; .*mine"
    with pytest.raises(ConfigError, match=message):
        check_eval_sets(run, task_of(run))
    allowed = config(
        tmp_path, "--data", str(training), "--eval.data", f"mine={eval_file}", "--data.allow-overlap", "True"
    )
    check_eval_sets(allowed, task_of(allowed))
    untrained = dataclasses.replace(run, eval=dataclasses.replace(run.eval, only=True))
    check_eval_sets(untrained, task_of(untrained))


def test_a_run_with_held_out_rows_is_evaluated_on_other_data(tmp_path: Path) -> None:
    training = rows(tmp_path / "a.jsonl", ["one", "two", "three"])
    run = config(tmp_path, "--data", str(training), "--data.eval-prompts", "1")
    options = EvalOptions(data=(str(training),))
    refuse(eval_mistakes(evaluated_config(run, options, tmp_path / "run", tmp_path)))
    assert evaluated_config(run, EvalOptions(), tmp_path / "run", tmp_path).data.eval_prompts == 1


def test_rows_of_an_evaluation_may_have_another_form_than_those_of_the_run(tmp_path: Path) -> None:
    run = config(tmp_path, "--data", str(rows(tmp_path / "a.jsonl", ["one", "two"])))
    other = tmp_path / "other.jsonl"
    other.write_text('{"text": [{"role": "user", "content": "three"}], "gold": "3"}\n')
    flags = ("--data.prompt-key=text", "--data.answer_key=gold", f"--data.chat-template={tmp_path / 'chat.jinja'}")
    evaluated = evaluated_config(run, EvalOptions(data=(str(other),), flags=flags), tmp_path / "run", tmp_path)
    assert evaluated.data.chat_template == str(tmp_path / "chat.jinja")
    [problem] = eval_sets(evaluated, task_of(evaluated))["eval"]
    assert problem.messages == (("user", "three"),)


def test_no_training_rows_are_held_out_when_an_evaluation_set_is_given(tmp_path: Path) -> None:
    training, eval_file = rows(tmp_path / "a.jsonl", ["one", "two", "three"]), rows(tmp_path / "held.jsonl", ["four"])
    held_out = ("--data", str(training), "--data.eval-prompts", "1")
    assert len(task_of(config(tmp_path, *held_out)).training_problems()) == 2
    both = config(tmp_path, "--data", str(training), "--data.eval-prompts", "0", "--eval.data", f"mine={eval_file}")
    with_default = dataclasses.replace(both, data=dataclasses.replace(both.data, eval_prompts=64))
    assert len(task_of(with_default).training_problems()) == 3


def splits(folder: Path, kind: str, names: Sequence[str]) -> Path:
    """A directory with one row in each split, whose prompt is the split's name."""
    for name in names:
        folder.mkdir(exist_ok=True)
        if kind == "directories":
            (folder / name).mkdir()
            rows(folder / name / "rows.jsonl", [name])
        elif kind == "suffixes":
            rows(folder / f"math_{name}.jsonl", [name])
        else:
            (folder / "data").mkdir(exist_ok=True)
            rows(folder / "data" / f"{name}-00000-of-00001.jsonl", [name])
    return folder


@pytest.mark.parametrize("kind", ["snapshot", "suffixes", "directories"])
@pytest.mark.parametrize(
    ("names", "flags", "read_split"),
    [
        (("train", "validation", "test"), [], "test"),
        (("train", "validation"), [], "validation"),
        (("train", "dev"), [], "dev"),
        (("train", "validation", "test"), ["--eval.split", "validation"], "validation"),
        (("train", "test", "math500"), ["--eval.split", "train"], "train"),
    ],
)
def test_an_evaluation_reads_the_test_split_else_validation(
    tmp_path: Path, kind: str, names: tuple[str, ...], flags: list[str], read_split: str
) -> None:
    folder = splits(tmp_path / "bench", kind, names)
    run = config(tmp_path, "--data", str(folder), "--eval.data", f"bench={folder}", *flags)
    refuse(eval_mistakes(run))
    assert [held.prompt for held in eval_sets(run, task_of(run))["bench"]] == [read_split]
    assert [problem.prompt for problem in task_of(run).training_problems()] == ["train"]


@pytest.mark.parametrize("kind", ["snapshot", "suffixes", "directories"])
def test_an_evaluation_set_with_only_training_rows_is_refused(tmp_path: Path, kind: str) -> None:
    folder = splits(tmp_path / "bench", kind, ["train"])
    training = rows(tmp_path / "a.jsonl", ["one"])
    run = config(tmp_path, "--data", str(training), "--eval.data", f"bench={folder}")
    with pytest.raises(
        ConfigError, match=r"bench has no split test or validation to evaluate; it has 'train': .*eval\.s"
    ):
        eval_sets(run, task_of(run))
    run = config(tmp_path, "--data", str(training), "--eval.data", f"bench={folder}", "--eval.split", "dev")
    with pytest.raises(ConfigError, match=r"bench has no split 'dev'; it has 'train': name one with eval\.split"):
        eval_sets(run, task_of(run))


def test_a_directory_without_splits_is_evaluated_whole(tmp_path: Path) -> None:
    (tmp_path / "bench").mkdir()
    rows(tmp_path / "bench" / "a.jsonl", ["one"]), rows(tmp_path / "bench" / "b.jsonl", ["two"])
    training = rows(tmp_path / "a.jsonl", ["three"])
    run = config(tmp_path, "--data", str(training), "--eval.data", f"bench={tmp_path / 'bench'}")
    assert [held.prompt for held in eval_sets(run, task_of(run))["bench"]] == ["one", "two"]


def test_a_split_of_evaluations_that_are_files_is_refused(tmp_path: Path) -> None:
    training, held = rows(tmp_path / "a.jsonl", ["one"]), rows(tmp_path / "held.jsonl", ["two"])
    run = config(tmp_path, "--data", str(training), "--eval.data", f"mine={held}", "--eval.split", "test")
    with pytest.raises(ConfigError, match=r"eval\.split is 'test', and .*held\.jsonl is a file; a split is of a dir"):
        refuse(eval_mistakes(run))
    run = config(tmp_path, "--data", str(training), "--eval.split", "test")
    with pytest.raises(ConfigError, match=r"eval\.split is 'test', and eval\.data is empty"):
        refuse(eval_mistakes(run))


def test_each_set_has_keys_a_split_and_a_format_of_its_own(tmp_path: Path) -> None:
    """Of the training data and of evaluations, in flags and in a file, with paths made absolute."""
    (tmp_path / "own.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    training = tmp_path / "a.jsonl"
    training.write_text('{"problem": "1 + 1", "solution": "2"}\n')
    other = splits(tmp_path / "b", "snapshot", ["train", "extra"])
    held = tmp_path / "held.jsonl"
    held.write_text('{"q": {"text": "2 + 2"}, "gold": 4}\n')
    run = config(
        tmp_path,
        *("--data", f"a={training}:0.5 prompt_key=problem answer_key=solution system_prompt=Think, then answer."),
        *("--data", f"b={other}:0.5 split=extra chat_template={tmp_path}/own.jinja"),
        *("--eval.data", f"mine={held} prompt_key=q.text answer-key=gold chat_template=chat system_prompt="),
        *("--data.system-prompt", "Be terse."),
    )
    refuse(data_mistakes(run))
    refuse(eval_mistakes(run))
    for variant in (run, from_toml(to_toml(with_absolute_paths(run)))):
        task = task_of(variant)
        first, second = task.training_problems()
        assert (first.prompt, json.loads(first.answer)["answer"], second.prompt) == ("1 + 1", "2", "extra")
        assert first.form is not None
        assert first.form.system_prompt == "Think, then answer."
        assert second.form is not None
        assert (second.form.system_prompt, second.form.template) == ("Be terse.", f"{tmp_path}/own.jinja")
        [problem] = eval_sets(variant, task)["mine"]
        assert (problem.prompt, json.loads(problem.answer)["answer"]) == ("2 + 2", 4)
        assert problem.form is not None
        assert (problem.form.system_prompt, problem.form.template) == ("", "chat")
        forms = [block.form for block in run_prompts(variant, task)]
        assert forms == [first.form, second.form, problem.form]
    assert chat_templates(run) == ("", f"{tmp_path}/own.jinja", "chat")


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        (
            ["--eval.data", "x=held.jsonl promt_key=q"],
            r"has 'promt_key', which is no option of a.*prompt_key",
        ),
        (["--eval.data", "x=held.jsonl prompt_key=a prompt_key=b"], r"has prompt_key twice"),
        (["--eval.data", "x=held.jsonl chat_template_kwargs={"], r"data set 'x' of eval\.data: .*which is not JSON"),
        (
            ["--eval.data", "x=held.jsonl chat_template=none tools=[{}]"],
            r"data set 'x' of eval\.data: data\.tools is s",
        ),
        (["--eval.data", "x=held.jsonl split=test"], r"data set 'x' of eval\.data has split 'test', and .* is a file"),
        (["--eval.data", "x=held.jsonl prompt_key="], r"data set 'x' of eval\.data has an empty prompt_key"),
        (
            ["--data", "a=held.jsonl tools=/none.json"],
            r"data set 'a' of data: data\.tools is '/none\.json', which",
        ),
        (
            ["--data", "held.jsonl prompt_key=q"],
            r"prompt_key, which is an option of one of .*--data\.prompt-key",
        ),
    ],
)
def test_unusable_options_of_a_set_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: list[str], error: str
) -> None:
    monkeypatch.chdir(tmp_path)
    rows(tmp_path / "held.jsonl", ["one"]), rows(tmp_path / "a.jsonl", ["two"])
    base_flags = [] if flags[0] == "--data" else ["--data", "a.jsonl"]
    with pytest.raises(ConfigError, match=error):
        refuse(data_mistakes(config(tmp_path, *base_flags, *flags)))


def test_an_evaluation_by_flowrt_eval_takes_options_without_a_name(tmp_path: Path) -> None:
    training = rows(tmp_path / "a.jsonl", ["one"])
    run = config(tmp_path, "--data", str(training))
    options = EvalOptions(data=(f"{training} prompt_key=answer system_prompt=Be terse.",))
    evaluated = evaluated_config(run, options, tmp_path / "run", tmp_path)
    assert evaluated.eval.data == (f"eval={training} prompt_key=answer system_prompt=Be terse.",)
    assert [problem.prompt for problem in eval_sets(evaluated, task_of(evaluated))["eval"]] == ["1"]
