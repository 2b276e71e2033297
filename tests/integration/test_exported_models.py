"""Models that a run writes are the policy that it trained, for a process that has transformers alone.

At staleness 0 the samples of a step are generated and trained with one version of the weights. So the log-probabilities
that rollout worker and trainer recorded of them are those of that version, and the model that was written of it has to
give the same for the same tokens.
"""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from flowrt.cli import main
from flowrt.engines.hf import load_model, save_model
from flowrt.engines.tiny_model import build_model
from flowrt.engines.training.forward import score
from flowrt.observability.stored_samples import Sample, SampleFilter, SampleReader
from flowrt.recipes.run_dir import checkpoint_steps, hf_steps
from tests.integration.helpers.forked_flowrt import run_flowrt
from tests.proofs.chat_models import FAMILIES, chat_tokenizer

STEPS = 4
LAST = STEPS - 1
"""The last step, which trains the version of this number."""
ROWS = 24
TEMPLATE = (
    "{%- for m in messages %}{{ '<|im_start|>' + m.role + ': ' + m.content + '<|im_end|>' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant: ' }}{%- endif %}"
)
REWARD = """
def reward(response, answer):
    return response.count("e") / 8
"""
TOLERANCE_NATS = 1e-4
BOTH = ("logprobs", "trainer_logprobs")
STORED_NATS = 0.004
"""Log-probabilities of stored samples are float16: rounding is half of this at 8 nats."""
READER = """
import json, sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

def read(directory, adapter, answers):
    model = AutoModelForCausalLM.from_pretrained(directory, dtype="auto")
    dtype = str(model.dtype)
    if adapter:
        from peft import PeftModel
        base = json.load(open(adapter + "/adapter_config.json"))["base_model_name_or_path"]
        model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype="auto"), adapter)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    found = []
    model.float()
    with torch.no_grad():
        for conversation, response in answers:
            text = tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True)
            prompt = tokenizer.apply_chat_template(
                conversation, tokenize=True, add_generation_prompt=True, return_dict=False
            )
            logits = model(input_ids=torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
            logprobs = logits.double().log_softmax(-1)
            found.append([text, prompt, logprobs[torch.arange(len(response)), torch.tensor(response)].tolist()])
    ends = GenerationConfig.from_pretrained(directory).eos_token_id
    return {"found": found, "ends": ends, "dtype": dtype}

for line in sys.stdin:
    print(json.dumps(read(**json.loads(line))), flush=True)
"""
Reader = Callable[..., dict[str, Any]]

pytestmark = pytest.mark.slow


def conversation(n: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"What is {n} and {n}?"}]


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model without a chat template, whose end token is not the end of turn; weights in float32, tied embeddings."""
    torch.set_num_threads(1)
    tokenizer = chat_tokenizer(FAMILIES["qwen"])
    tokenizer.chat_template = None
    built = build_model(
        vocab_size=len(tokenizer), hidden_size=32, layers=2, heads=2, intermediate_size=48, max_length=256, seed=0
    )
    built.config.eos_token_id = built.generation_config.eos_token_id = tokenizer.eos_token_id
    path = tmp_path_factory.mktemp("start") / "model"
    save_model(built, tokenizer, path)
    generation = json.loads((path / "generation_config.json").read_text())
    # transformers loads this configuration, and refuses to write it
    (path / "generation_config.json").write_text(json.dumps(generation | {"do_sample": False, "top_p": 0.5}))
    return path


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    directory = tmp_path_factory.mktemp("task")
    rows = [{"prompt": conversation(n), "answer": str(2 * n)} for n in range(ROWS)]
    (directory / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (directory / "reward.py").write_text(REWARD)
    (directory / "template.jinja").write_text(TEMPLATE)
    return [
        *("--recipe", "custom", "--data", f"{directory / 'rows.jsonl'}", "--reward", f"{directory / 'reward.py'}"),
        *(
            "--data.chat-template",
            f"{directory / 'template.jinja'}",
            "--data.eval-prompts",
            "4",
            "--max-staleness",
            "0",
        ),
        *("--steps", str(STEPS), "--prompts-per-step", "4", "--group-size", "4", "--rollout.workers", "1"),
        *("--rollout.max-new-tokens", "8", "--checkpoint.every", "2", "--checkpoint.keep", "3"),
        *("--checkpoint.hf-every", "1", "--trainer.lr", "0.02", "--trainer.warmup-steps", "1"),
        *("--algorithm.kl.coef", "0", "--eval.at-start", "False", "--eval.at-end", "False"),
    ]


@pytest.fixture(scope="module")
def reader() -> Iterator[Reader]:
    """Asks the other process, which reads one model after the other."""
    command = [sys.executable, "-c", READER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        asked, answers = process.stdin, process.stdout

        def ask(**question: Any) -> dict[str, Any]:
            asked.write(json.dumps(question) + "\n")
            asked.flush()
            answer: dict[str, Any] = json.loads(answers.readline())
            return answer

        yield ask


def samples(run_dir: Path) -> list[Sample]:
    """The samples of the last step, all of the version before it."""
    reader = SampleReader(run_dir)
    rows = reader.query(SampleFilter(first_step=LAST, last_step=LAST), limit=1000).samples
    stored = [sample for row in rows if (sample := reader.get(row.id)) is not None]
    assert len(stored) == 16
    assert all(row.version_min == row.version_max == LAST for row in rows)
    return stored


def assert_policy(
    reader: Reader, directory: Path, run_dir: Path, adapter: Path | None = None, recorded: Sequence[str] = ("logprobs",)
) -> dict[str, Any]:
    """Assert that a model gives the log-probabilities of the run, and of the trainer's passes; what the reader found.

    Args:
        reader: asks the process that has transformers alone.
        directory: of the model, which the trainer's passes are made with.
        run_dir: of the run.
        adapter: what the other process loads, with its base model; None: ``directory``.
        recorded: those of the rollout worker (logprobs), of the trainer (trainer_logprobs), or both.
    """
    of_run = samples(run_dir)
    numbers = [int(sample.row.prompt_text.split()[3]) for sample in of_run]
    output = reader(
        directory=str(directory),
        adapter="" if adapter is None else str(adapter),
        answers=[[conversation(n), list(sample.ids)] for n, sample in zip(numbers, of_run, strict=True)],
    )
    prompts = [torch.tensor(prompt) for _, prompt, _ in output["found"]]
    responses = [torch.tensor(sample.ids) for sample in of_run]
    scored = score(load_model(directory).eval(), prompts, responses, 1.0, 8192)
    for sample, passes, (text, _, logprobs) in zip(of_run, scored, output["found"], strict=True):
        assert sample.row.prompt_text == text
        torch.testing.assert_close(torch.tensor(logprobs), passes, atol=TOLERANCE_NATS, rtol=0.0)
        for name in recorded:
            torch.testing.assert_close(
                torch.tensor(logprobs), torch.tensor(getattr(sample, name)), atol=STORED_NATS, rtol=0.0
            )
    return output


def weights(directory: Path) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = load_file(directory / "model.safetensors")
    return tensors


def assert_equal_weights(first: Path, second: Path) -> None:
    assert weights(first).keys() == weights(second).keys()
    assert all(torch.equal(tensor, weights(second)[name]) for name, tensor in weights(first).items())


def assert_trained(start: Path, directory: Path) -> None:
    moved = [name for name, tensor in weights(directory).items() if not torch.equal(tensor, weights(start)[name])]
    assert len(moved) >= 10


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param(("--checkpoint.best", "held_out/avg@1", "--eval.interval", "3"), id="torch"),
        pytest.param(
            ("--trainer.dtype", "bfloat16", "--trainer.final-dtype", "bfloat16", "--rollout.dtype", "float32"),
            id="bfloat16",
            marks=pytest.mark.long,
        ),
        pytest.param(("--trainer.engine", "fsdp", "--trainer.fsdp.device", "cpu"), id="fsdp", marks=pytest.mark.long),
    ],
)
def test_written_models_are_the_trained_policy(
    launch: Callable[..., Any],
    start: Path,
    settings: list[str],
    flags: tuple[str, ...],
    tmp_path: Path,
    reader: Reader,
) -> None:
    run = launch(*settings, "--model", str(start), *flags)
    assert run.wait(240.0) == 0, run.output + run.log("trainer")
    final, last = run.run_dir / "final", run.run_dir / "hf" / f"step-{LAST:06}"
    # In bfloat16 the trainer's own passes are rounded.
    recorded = ("logprobs",) if "bfloat16" in flags else BOTH
    output = assert_policy(reader, last, run.run_dir, recorded=recorded)
    assert output["dtype"] == ("torch.bfloat16" if "bfloat16" in flags else "torch.float32")
    tokenizer = chat_tokenizer(FAMILIES["qwen"])
    ends = [tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|im_end|>")]
    assert output["ends"] == ends
    generation = json.loads((final / "generation_config.json").read_text())
    assert generation["top_p"] == 0.5
    assert_trained(start, final)
    assert hf_steps(run.run_dir) == [LAST - 1, LAST, STEPS]
    assert any(not torch.equal(tensor, weights(last)[name]) for name, tensor in weights(final).items())
    assert_equal_weights(run.run_dir / "hf" / f"step-{STEPS:06}", final)
    assert main(["export", str(run.run_dir), "--hf", str(tmp_path / "newest")]) == 0
    assert_equal_weights(tmp_path / "newest", final)
    assert sorted(path.name for path in (tmp_path / "newest").iterdir()) == sorted(p.name for p in final.iterdir())
    assert main(["export", str(run.run_dir), "--hf", str(tmp_path / "earlier"), "--step", "2"]) == 0
    moved = [
        name for name, tensor in weights(tmp_path / "earlier").items() if not torch.equal(tensor, weights(final)[name])
    ]
    assert moved
    if "--checkpoint.best" in flags:
        assert main(["export", str(run.run_dir), "--hf", str(tmp_path / "best"), "--best"]) == 0
        assert json.loads((tmp_path / "best" / "generation_config.json").read_text())["eos_token_id"] == ends
        assert (tmp_path / "best" / "chat_template.jinja").read_text() == TEMPLATE
        (best,) = (run.run_dir / "best").glob("step-*")  # compared with the checksum of the published version
        assert_equal_weights(best, run.run_dir / "hf" / best.name)


@pytest.fixture(scope="module")
def adapters(launch: Callable[..., Any], start: Path, settings: list[str]) -> Any:
    """A run that trains adapters, and its own copy of the start model, which is deleted later."""
    flags = ["--trainer.engine", "fsdp", "--trainer.fsdp.device", "cpu", "--trainer.lora.rank", "4"]
    run = launch(*settings, "--model", str(start), *flags)
    assert run.wait(240.0) == 0, run.output + run.log("trainer")
    return run


def test_adapters_are_written_merged_and_by_themselves(
    adapters: Any, start: Path, tmp_path: Path, reader: Reader
) -> None:
    final = adapters.run_dir / "final"
    assert_trained(start, final)
    last = adapters.run_dir / "hf" / f"step-{LAST:06}"
    assert_policy(reader, last, adapters.run_dir, last / "adapter", BOTH)
    described = json.loads((final / "adapter" / "adapter_config.json").read_text())
    assert (described["base_model_name_or_path"], described["r"]) == (str(start), 4)
    modules = ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
    assert described["target_modules"] == modules
    assert main(["export", str(adapters.run_dir), "--hf", str(tmp_path / "model")]) == 0
    assert_equal_weights(tmp_path / "model", final)
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        assert (tmp_path / "model" / "adapter" / name).read_bytes() == (final / "adapter" / name).read_bytes(), name


DRAWN = ("--temperature", "1", "--samples", "8")


@pytest.mark.long
def test_the_evaluation_of_a_run_with_adapters_is_that_of_its_model(
    adapters: Any, start: Path, settings: list[str], tmp_path: Path
) -> None:
    """Answers are drawn with the same numbers, and their rewards differ between the start and the trained model."""
    reports = {}
    for step in (2, STEPS):
        out = tmp_path / f"{step}.json"
        words = ["eval", str(adapters.run_dir), "--step", str(step), *DRAWN, "--json", str(out)]
        evaluated = run_flowrt(*words)
        assert evaluated.returncode == 0, evaluated.stdout
        reports[step] = json.loads(out.read_text())
        assert reports[step]["version"] == step
    by_model = {}
    for name, model in (("start", start), ("final", adapters.run_dir / "final")):
        words = ["run", "custom", *settings[2:], "--run-dir", str(tmp_path / name), "--model", str(model)]
        words += ["--eval.only", "True", "--checkpoint.hf-every", "0"]
        words += [f"--eval.{word[2:]}" if word.startswith("--") else word for word in DRAWN]
        completed = run_flowrt(*words, "--checkpoint.every", "0")
        assert completed.returncode == 0, completed.stdout
        by_model[name] = json.loads((tmp_path / name / "summary.json").read_text())["evaluations"]["held_out"]
    results = reports[STEPS]["results"]["held_out"]
    assert results["avg@8"] == by_model["final"]["avg@8"] != by_model["start"]["avg@8"]
    assert results["avg@8"] != reports[2]["results"]["held_out"]["avg@8"]


@pytest.mark.long
def test_a_run_starts_from_an_adapter_and_its_reference_is_that_start(
    adapters: Any, launch: Callable[..., Any], settings: list[str], tmp_path: Path, reader: Reader
) -> None:
    """KL at the first step is that of equal weights. The run is resumed without the adapter and its base model."""
    shutil.copytree(adapters.run_dir / "final" / "adapter", tmp_path / "adapter")
    shutil.copytree(adapters.run_dir / "start", tmp_path / "base")
    config = tmp_path / "adapter" / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"base_model_name_or_path": "../base"}))
    flags = ["--algorithm.kl.coef", "0.1", "--trainer.engine", "fsdp"]
    flags += ["--trainer.fsdp.device", "cpu", "--trainer.lora.rank", "2"]
    run = launch(*settings, "--model", str(tmp_path / "adapter"), *flags)
    assert run.wait(240.0) == 0, run.output + run.log("trainer")
    lines = [json.loads(line) for line in (run.run_dir / "metrics.jsonl").read_text().splitlines()]
    assert abs(lines[0]["kl"]) < 1e-6 < 1e-4 < lines[-1]["kl"]
    assert max(line["mismatch_kl_k3"] for line in lines) < 1e-6
    # The start is that of the run before, up to rounding: the same start without an adapter of its own.
    first, last = weights(run.run_dir / "model"), weights(adapters.run_dir / "final")
    assert first.keys() == last.keys()
    assert all(torch.allclose(first[name], tensor, atol=1e-6) for name, tensor in last.items())
    written = run.run_dir / "hf" / f"step-{LAST:06}"
    assert_policy(reader, written, run.run_dir, written / "adapter")
    shutil.rmtree(tmp_path / "adapter")
    shutil.rmtree(tmp_path / "base")
    resumed = launch("--steps", str(STEPS + 2), resume=run.run_dir)
    assert resumed.wait(240.0) == 0, resumed.output + resumed.log("trainer")
    assert checkpoint_steps(run.run_dir)[-1] == STEPS + 2
