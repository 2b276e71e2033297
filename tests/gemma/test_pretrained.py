"""A pretrained model through every part: template, stop tokens, log-probabilities, training, export, SGLang."""

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from flowrt.cli import main
from flowrt.engines.base import Prompt, Response
from flowrt.engines.hf import load_model
from flowrt.engines.options import SglangOptions, TrainOptions
from flowrt.engines.server.engine import ServerRollout
from flowrt.engines.sglang.dialect import sglang_rollout
from flowrt.engines.stopping import StopConditions, stop_token_ids
from flowrt.engines.torch.rollout import TorchRollout
from flowrt.engines.training.forward import apply_optimizations, response_logprobs
from tests.integration.sglang.conftest import NOT_HERE, PYTHON, START_S

pytestmark = [pytest.mark.gemma, pytest.mark.timeout(1800)]

END, END_OF_TURN = 1, 106
MAX_DIFFERENCE_NATS = 1e-4
TEXTS = (
    "The capital of France is",
    "The larger of 355 and 274 is 355\nThe larger of 202 and 286 is",
    "One, two, three, " * 90,  # beyond the window of the sliding layers
)
TOKENS = 8


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> Any:
    torch.set_num_threads(1)
    return load_model(checkpoint).eval()


@pytest.fixture(scope="module")
def prompts(checkpoint: Path) -> list[torch.Tensor]:
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    return [torch.tensor(tokenizer(text)["input_ids"], dtype=torch.int32) for text in TEXTS]


@pytest.fixture(scope="module")
def responses(model: Any, prompts: list[torch.Tensor]) -> list[Response]:
    """Two samples of each prompt, by the torch engine."""
    engine = TorchRollout(model, stop=StopConditions(), rows=8, max_new_tokens=TOKENS, temperature=1.0)
    engine.add([Prompt(key, prompts[key // 2], key) for key in range(2 * len(prompts))])
    return sorted(finished(engine), key=lambda response: response.key)


def finished(engine: TorchRollout | ServerRollout) -> list[Response]:
    done: list[Response] = []
    while engine.running:
        done += engine.run(threading.Event())
    return done


@torch.no_grad()
def plain_logprobs(model: Any, prompt: torch.Tensor, response: torch.Tensor) -> torch.Tensor:
    """Log-probabilities of a response by one forward pass of transformers over the whole sequence."""
    tokens = torch.cat([prompt, response]).long()
    logits = model(input_ids=tokens.unsqueeze(0), use_cache=False).logits[0, len(prompt) - 1 : -1]
    logprobs: torch.Tensor = logits.double().log_softmax(-1).gather(1, response.long().unsqueeze(1)).squeeze(1)
    return logprobs


def test_template_and_stop_tokens_are_those_of_the_model(
    checkpoint: Path, rows: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--data.eval-prompts", "8", "--show", "1"]
    assert main(["data", "check", "--model", str(checkpoint), "--data", str(rows), *flags]) == 0
    printed = capsys.readouterr().out
    assert "'<eos>'" in printed
    assert "'<end_of_turn>'" in printed
    assert r"<start_of_turn>model\n'" in printed
    assert stop_token_ids(checkpoint) == (END, END_OF_TURN)


@pytest.mark.parametrize("end", [END, END_OF_TURN])
def test_a_response_ends_with_either_stop_token(
    checkpoint: Path, model: Any, prompts: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch, end: int
) -> None:
    """The third token of each response is made certain by a hook on the head."""
    calls = []

    def third(_module: Any, _inputs: Any, logits: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        if len(calls) == 3:
            logits[..., end] = 1e6
        return logits

    handle = model.get_output_embeddings().register_forward_hook(third)
    try:
        engine = TorchRollout(model, stop=StopConditions.of(checkpoint), rows=2, max_new_tokens=TOKENS, temperature=1.0)
        engine.add([Prompt(key, prompts[0], key) for key in range(2)])
        done = finished(engine)
    finally:
        handle.remove()
    assert [response.tokens[-1].item() for response in done] == [end, end]
    assert [len(response.tokens) for response in done] == [3, 3]
    assert not any(response.truncated for response in done)


def test_rollout_has_the_log_probabilities_of_transformers(
    model: Any, prompts: list[torch.Tensor], responses: list[Response]
) -> None:
    for response in responses:
        expected = plain_logprobs(model, prompts[response.key // 2], response.tokens)
        torch.testing.assert_close(response.logprobs.double(), expected, atol=MAX_DIFFERENCE_NATS, rtol=0)


def test_trainer_has_the_log_probabilities_of_transformers(
    checkpoint: Path, model: Any, prompts: list[torch.Tensor], responses: list[Response]
) -> None:
    """With the optimisations that a run applies: shared prompts and the fused head."""
    optimised = apply_optimizations(load_model(checkpoint), TrainOptions())
    asked = [prompts[response.key // 2] for response in responses], [response.tokens for response in responses]
    with torch.no_grad():
        logprobs_T, _ = response_logprobs(optimised, *asked, 1.0)
    expected = torch.cat([plain_logprobs(model, prompt, tokens) for prompt, tokens in zip(*asked, strict=True)])
    torch.testing.assert_close(logprobs_T.double(), expected, atol=MAX_DIFFERENCE_NATS, rtol=0)


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param((), id="full"),
        pytest.param(("--trainer.engine", "fsdp", "--trainer.lora.rank", "4"), id="lora"),
    ],
)
def test_a_trained_model_is_exported_as_it_was_trained(
    checkpoint: Path, rows: Path, tmp_path: Path, flags: tuple[str, ...]
) -> None:
    run_dir, reward = tmp_path / "run", tmp_path / "length.py"
    reward.write_text("def reward(response):\n    return len(response)\n")  # differs within a group
    command = ["run", "custom", "--model", str(checkpoint), "--data", str(rows), "--reward", str(reward), *flags]
    command += ["--steps", "2", "--prompts-per-step", "2", "--group-size", "2", "--rollout.workers", "1"]
    command += ["--rollout.max-new-tokens", "4", "--rollout.max-running-requests", "4", "--data.eval-prompts", "0"]
    command += ["--algorithm.kl.coef", "0", "--checkpoint.every", "0", "--trainer.lr", "1e-4"]
    command += ["--run-dir", str(run_dir)]
    assert main(command) == 0
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert len(lines) == 2
    assert all(line["mismatch_kl_k3"] < MAX_DIFFERENCE_NATS for line in lines if line["staleness_max"] == 0)
    exported = AutoModelForCausalLM.from_pretrained(run_dir / "final", dtype=torch.float32)
    start = load_model(checkpoint)
    differences = [
        name for name, parameter in start.named_parameters() if not torch.equal(parameter, exported.get_parameter(name))
    ]
    assert any("q_proj" in name for name in differences)
    assert AutoTokenizer.from_pretrained(run_dir / "final").chat_template == (
        AutoTokenizer.from_pretrained(checkpoint).chat_template
    )
    assert stop_token_ids(run_dir / "final") == (END, END_OF_TURN)


@pytest.fixture
def server(checkpoint: Path, tmp_path: Path) -> Iterator[ServerRollout]:
    if not PYTHON.exists():
        pytest.skip(NOT_HERE)
    options = SglangOptions(
        python=str(PYTHON),
        device="cpu",
        dtype="float32",
        arguments="--max-total-tokens 8192 --context-length 2048",
        start_s=START_S,
    )
    engine = sglang_rollout(
        options,
        checkpoint,
        stop=StopConditions.of(checkpoint),
        rows=8,
        max_new_tokens=TOKENS,
        temperature=1.0,
        truncation=None,
        threads=1,
        log_path=tmp_path / "server.log",
    )
    try:
        engine.start()
        yield engine
    finally:
        engine.close()


@pytest.mark.sglang
def test_sglang_has_the_log_probabilities_of_transformers(
    server: ServerRollout, model: Any, prompts: list[torch.Tensor]
) -> None:
    server.add([Prompt(key, prompt, key) for key, prompt in enumerate(prompts)])
    for response in finished(server):
        expected = plain_logprobs(model, prompts[response.key], response.tokens)
        torch.testing.assert_close(response.logprobs.double(), expected, atol=MAX_DIFFERENCE_NATS, rtol=0)
