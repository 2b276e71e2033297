"""What ends a sequence: several stop tokens, stop strings, the length limit; and the text that the reward reads."""

import asyncio
import json
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.decoders import ByteFallback, Fuse, Sequence
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from flowrt.engines.base import Prompt, Response
from flowrt.engines.descriptor import PublishedWeights, RolloutSetup
from flowrt.engines.hf import save_model
from flowrt.engines.registry import ROLLOUT_ENGINES
from flowrt.engines.server.dialect import PartialResponse
from flowrt.engines.server.engine import ServerRollout, _Sequence
from flowrt.engines.stopping import StopConditions, stop_token_ids
from flowrt.engines.tiny_model import build_model, wrap_tokenizer
from flowrt.engines.torch.rollout import TorchRollout
from flowrt.errors import EngineError, Stopped
from flowrt.recipes.config_io import parse
from flowrt.recipes.tasks.arithmetic import Arithmetic
from flowrt.roles import reward
from flowrt.runtime.clock import MonotonicClock
from flowrt.runtime.timeline import Timeline
from tests.effort import examples

MAX_NEW_TOKENS = 60


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return wrap_tokenizer(Arithmetic(0, 0).tokenizer())


@pytest.fixture(scope="module")
def model(tokenizer: Any) -> Any:
    return build_model(
        vocab_size=len(tokenizer), hidden_size=64, layers=2, heads=4, intermediate_size=96, max_length=128, seed=1
    ).eval()


@pytest.fixture
def checkpoint(model: Any, tokenizer: Any, tmp_path: Path) -> Path:
    save_model(model, tokenizer, tmp_path / "model")
    return tmp_path / "model"


def update_json(file: Path, **values: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def generate(model: Any, stop: StopConditions, count: int = 24, tokens: int = MAX_NEW_TOKENS) -> list[Response]:
    engine = TorchRollout(model, stop=stop, rows=count, max_new_tokens=tokens, temperature=1.0)
    engine.add([Prompt(key, torch.tensor([3, 4], dtype=torch.int32), key) for key in range(count)])
    done: list[Response] = []
    while engine.running:
        done += engine.run(threading.Event())
    return sorted(done, key=lambda response: response.key)


@pytest.mark.parametrize(
    ("config", "generation", "ids"),
    [
        (1, 1, (1,)),
        (1, [1, 5], (1, 5)),
        ([1, 7], None, (1, 7)),
        (None, 5, (1, 5)),
        ([9, 7], [7, 5], (1, 5, 7, 9)),
    ],
)
def test_stop_tokens_are_merged_from_both_files_of_a_checkpoint(
    checkpoint: Path, config: Any, generation: Any, ids: Any
) -> None:
    update_json(checkpoint / "config.json", eos_token_id=config)
    update_json(checkpoint / "generation_config.json", eos_token_id=generation)
    assert stop_token_ids(checkpoint) == StopConditions.of(checkpoint).token_ids == ids


def test_a_checkpoint_without_generation_config_has_stop_tokens(checkpoint: Path) -> None:
    (checkpoint / "generation_config.json").unlink()
    assert stop_token_ids(checkpoint) == (1,)


def test_an_invalid_stop_token_is_refused(checkpoint: Path) -> None:
    update_json(checkpoint / "generation_config.json", eos_token_id=[1, -3])
    with pytest.raises(EngineError, match=r"generation_config\.json .* make it a token id, or a list"):
        stop_token_ids(checkpoint)


def test_each_stop_token_ends_a_sequence_without_truncation(model: Any) -> None:
    single, several = (generate(model, StopConditions(ids)) for ids in ((1,), (1, 5, 7)))
    assert {int(response.tokens[-1]) for response in several if not response.truncated} == {1, 5, 7}
    for response, longer in zip(several, single, strict=True):
        tokens = response.tokens.tolist()
        assert set(tokens[:-1]).isdisjoint({1, 5, 7})
        assert response.truncated == (tokens[-1] not in (1, 5, 7))
        assert not response.truncated or len(tokens) == MAX_NEW_TOKENS
        assert longer.tokens.tolist()[: len(tokens)] == tokens  # the same draws, ended earlier


def test_a_stop_token_at_the_length_limit_is_no_truncation(model: Any) -> None:
    ended = next(
        response for response in generate(model, StopConditions((1,))) if 2 < len(response.tokens) < MAX_NEW_TOKENS
    )
    again = generate(model, StopConditions((1,)), tokens=len(ended.tokens))[ended.key]
    shorter = generate(model, StopConditions((1,)), tokens=len(ended.tokens) - 1)[ended.key]
    assert (again.truncated, shorter.truncated) == (False, True)


@pytest.mark.parametrize("strings", [("1",), ("2+", "9"), ("no such text",)])
def test_a_stop_string_ends_a_sequence_with_the_token_that_completes_it(
    model: Any, tokenizer: Any, strings: tuple[str, ...]
) -> None:
    without = generate(model, StopConditions((1,)))
    for response, longer in zip(generate(model, StopConditions((1,), strings, tokenizer)), without, strict=True):
        texts = [tokenizer.decode(longer.tokens[:count].tolist()) for count in range(1, len(longer.tokens) + 1)]
        ends = [count for count, text in enumerate(texts, 1) if any(string in text for string in strings)]
        expected = min([*ends, len(longer.tokens)])
        assert torch.equal(response.tokens, longer.tokens[:expected])
        torch.testing.assert_close(response.logprobs, longer.logprobs[:expected], atol=1e-5, rtol=0)
        assert response.truncated == (not ends and longer.truncated)


def test_the_reward_reads_the_text_before_the_stop_token_or_string(tokenizer: Any) -> None:
    ids = tokenizer("12+34")["input_ids"]
    stop = StopConditions((1, ids[-1]), ("+3",), tokenizer)
    assert StopConditions((1,), (), tokenizer).text([*ids, 1]) == tokenizer.decode(ids)
    assert StopConditions((ids[-1],), (), tokenizer).text(ids) == tokenizer.decode(ids[:-1])
    assert stop.text(ids) == "12"
    assert stop.end_of(ids) == 4
    assert stop.end_of(ids[:3]) is None


def test_a_stop_string_ends_a_sequence_though_the_next_token_changes_its_text() -> None:
    """A run of byte tokens that is no UTF-8 is decoded without the characters that its beginning has."""
    names = ["</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    whole = Tokenizer(BPE({name: index for index, name in enumerate(names)}, [], byte_fallback=True))
    whole.decoder = Sequence([ByteFallback(), Fuse()])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=whole, eos_token="</s>")
    tokens = [1 + ord("x"), 1 + ord("a"), 1 + 0xFF]
    assert ["a" in tokenizer.decode(tokens[:count]) for count in (1, 2, 3)] == [False, True, False]
    assert StopConditions((0,), ("a",), tokenizer).end_of(tokens) == 2


# ---- SGLang: answers of the server are corrected


def response(stop: StopConditions, *parts: PartialResponse) -> Response:
    sequence = _Sequence(Prompt(0, torch.tensor([3]), 0))
    for part in parts:
        sequence.add(part, stop)
    return sequence.response(with_support=False)


def part(tokens: list[int], *, version: int = 0, at_limit: bool = False, abort: str = "") -> PartialResponse:
    logprobs = tuple(-1.0 for _ in tokens)
    return PartialResponse(tuple(tokens), logprobs, (version, len(tokens)), abort, at_limit)


def test_a_response_that_the_server_stopped_is_not_truncated() -> None:
    assert not response(StopConditions((1, 5)), part([4, 5])).truncated
    assert response(StopConditions((1,)), part([4, 5], at_limit=True)).truncated
    assert not response(StopConditions((1, 5)), part([4, 5], at_limit=True)).truncated


def test_a_stop_string_across_two_parts_of_a_sequence_ends_it(tokenizer: Any) -> None:
    ids = tokenizer("12+34")["input_ids"]
    stop = StopConditions((1,), ("2+3",), tokenizer)
    ended = response(stop, part(ids[:3], abort="a pause"), part([*ids[3:], *ids], version=1, at_limit=True))
    assert ended.tokens.tolist() == ids[:4]
    assert (len(ended.logprobs), ended.spans, ended.truncated) == (4, (0, 3, 1, 1), False)


def test_both_engines_are_built_with_the_same_stop_tokens(checkpoint: Path) -> None:

    update_json(checkpoint / "generation_config.json", eos_token_id=[1, 5])
    flags = ["--rollout.stop", "=", "--rollout.engine", "sglang", "--rollout.workers", "2"]
    flags += ["--rollout.sglang.url", "http://127.0.0.1:9", "http://127.0.0.1:10"]
    setup = RolloutSetup(
        model=checkpoint,
        settings=parse(flags).rollout,
        published=PublishedWeights(),
        deterministic=False,
        threads=1,
        log_path=checkpoint / "log",
    )
    torch_engine = cast(Any, ROLLOUT_ENGINES["torch"].build(setup))
    server: ServerRollout = cast(Any, ROLLOUT_ENGINES["sglang"].build(setup))
    try:
        assert torch_engine._stop.token_ids == server._sampling.stop_token_ids == (1, 5)
        assert torch_engine._stop.strings == server._sampling.stop_strings == ("=",)
    finally:
        server.close()


async def test_the_reward_role_uses_the_truncated_flag_not_the_last_token(
    checkpoint: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four responses: two end in stop tokens, a truncated one ends in a stop token, a truncated one does not."""

    update_json(checkpoint / "generation_config.json", eos_token_id=[1, 5])
    scored_texts: list[str] = []

    def score(text: str, _: str) -> float:
        scored_texts.append(text)
        return float(len(text))

    task = SimpleNamespace(
        scores_truncated=False,
        reward=score,
    )
    monkeypatch.setattr(reward, "task_of", lambda _: task)
    ids = tokenizer("12")["input_ids"]
    rows = [[*ids, 1], [*ids, 5], [*ids, 1], ids]
    batch = SimpleNamespace(
        tensors={"response": [torch.tensor(row) for row in rows], "answer": [torch.zeros(0, dtype=torch.uint8)] * 4},
        inline={"truncated": [0.0, 0.0, 1.0, 1.0]},
        slots=(0, 1, 2, 3),
        leases=(1, 1, 1, 1),
    )

    class Session:
        timeline = Timeline(MonotonicClock())

        async def pull(self, *_: Any, **__: Any) -> Any:
            if scored_texts:
                raise Stopped("done", 0)
            return batch

        def start_commit(self, *columns: Any) -> "asyncio.Future[None]":
            assert columns[-1] == {"reward": [2.0, 2.0, 0.0, 0.0]}
            committed = asyncio.get_running_loop().create_future()
            committed.set_result(None)
            return committed

    with pytest.raises(Stopped):
        await reward.run(cast(Any, Session()), parse(["--model", str(checkpoint), "--samples.per-step", "0"]))
    assert scored_texts == ["12", "12", "", ""]


class ByteTokenizer:
    """Token i is the i-th of a few byte strings: parts of characters, several characters, nothing. Counts its work."""

    parts = (b"", b"a", b"b", b"ab", b"aab", "é".encode()[:1], "é".encode()[1:], b"\n", b" ")

    def __init__(self) -> None:
        self.decoded = 0

    def decode(self, tokens: list[int], skip_special_tokens: bool) -> str:
        assert not skip_special_tokens
        self.decoded += len(tokens)
        return b"".join(self.parts[token] for token in tokens).decode(errors="replace")


@given(
    st.lists(st.integers(0, len(ByteTokenizer.parts) - 1), max_size=40),
    st.lists(st.sampled_from(["aba", "bb", "é", "aé\n", "a" * 9, "b é"]), min_size=1, max_size=3, unique=True),
    st.integers(0, 40),
)
@settings(max_examples=examples(300))
def test_stop_strings_are_found_where_the_whole_text_first_has_one(
    tokens: list[int], strings: list[str], begin: int
) -> None:
    """Also in characters split over tokens, in tokens without text, and from any token before it on."""
    tokenizer = ByteTokenizer()
    stop = StopConditions((), tuple(strings), tokenizer)
    texts = [tokenizer.decode(tokens[:count], skip_special_tokens=False) for count in range(len(tokens) + 1)]
    ends = [count for count, text in enumerate(texts) if any(string in text for string in strings)]
    first = ends[0] if ends else None
    assert stop.end_of(tokens) == first
    assert stop.end_of(tokens, min(begin, len(tokens) if first is None else first - 1)) == first
    last = len(tokens) if first is None else first
    assert [stop.complete_string(tokens[:count]) for count in range(last + 1)] == [
        count == first for count in range(last + 1)
    ]


def test_the_cost_of_a_stop_string_is_that_of_its_length() -> None:
    tokenizer = ByteTokenizer()
    stop = StopConditions((), ("bbé",), tokenizer)
    tokens = [1] * 32_000
    assert not stop.complete_string(tokens)
    assert stop.complete_string([*tokens, 2, 2, 5, 6])
    assert tokenizer.decoded < 30
