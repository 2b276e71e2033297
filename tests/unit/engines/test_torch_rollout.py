"""The rollout engine against transformers; its samples depend only on their seeds and the weights."""

import threading
from dataclasses import replace
from typing import Any

import pytest
import torch

from flowrt.engines.base import Prompt, Response, sample_seed
from flowrt.engines.stopping import StopConditions
from flowrt.engines.tiny_model import build_model
from flowrt.engines.torch.rollout import TorchRollout
from flowrt.engines.training.forward import score
from flowrt.errors import EngineError
from flowrt.transport.weights.snapshot import Snapshot

EOS = 1
LENGTHS = (5, 9, 3, 9, 7, 5, 4, 70, 6, 8, 9, 3)


@pytest.fixture(scope="module")
def model() -> Any:
    return build_model(
        vocab_size=24, hidden_size=64, layers=2, heads=4, intermediate_size=96, max_length=256, seed=1
    ).eval()


def prompts(greedy: bool = False) -> list[Prompt]:
    generator = torch.Generator().manual_seed(0)
    return [
        Prompt(key, torch.randint(2, 24, (length,), generator=generator, dtype=torch.int32), 100 + key, greedy)
        for key, length in enumerate(LENGTHS)
    ]


def generate_all(model: Any, todo: list[Prompt], rows: int, arrivals: int, **settings: Any) -> dict[int, Response]:
    """Responses to all prompts, which are added ``arrivals`` at a time while others run."""
    options: dict[str, Any] = {"stop": StopConditions((EOS,)), "max_new_tokens": 40, "temperature": 1.0} | settings
    engine = TorchRollout(model, rows=rows, **options)
    done: dict[int, Response] = {}
    while todo or engine.running:
        count = min(engine.room, len(todo), arrivals)
        engine.add(todo[:count])
        todo = todo[count:]
        for response in engine.run(threading.Event()):
            done[response.key] = response
    return done


def drain(engine: TorchRollout) -> list[Response]:
    """Run until nothing is left."""
    finished = []
    while engine.running:
        finished += engine.run(threading.Event())
    return finished


def test_the_use_of_an_engine_is_what_it_has_generated_and_holds(model: Any) -> None:
    engine = TorchRollout(model, rows=12, stop=StopConditions((EOS,)), max_new_tokens=40, temperature=1.0)
    engine.add(prompts())
    done = list(engine.run(threading.Event()))
    while_running = engine.use()
    assert engine.running
    assert 0 < while_running.cache_tokens < while_running.cache_size
    done += drain(engine)
    generated = sum(len(response.tokens) for response in done)
    assert while_running.generated < generated
    assert engine.use()[:2] == (generated, 0)


@pytest.mark.slow
def test_greedy_answers_are_those_of_transformers(model: Any) -> None:
    responses = generate_all(model, prompts(greedy=True), rows=5, arrivals=2)
    for prompt in prompts():
        ids = prompt.tokens.long().unsqueeze(0)
        expected = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=40,
            do_sample=False,
            eos_token_id=EOS,
            pad_token_id=0,
        )
        assert responses[prompt.key].tokens.tolist() == expected[0, ids.shape[1] :].tolist()


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_the_log_probabilities_are_those_of_a_full_forward_pass(model: Any, temperature: float) -> None:
    done = generate_all(model, prompts(), rows=4, arrivals=3, temperature=temperature)
    responses = [done[key].tokens for key in range(len(LENGTHS))]
    scored = score(model, [prompt.tokens for prompt in prompts()], responses, temperature, budget_tokens=200)
    for key, expected in enumerate(scored):
        torch.testing.assert_close(done[key].logprobs, expected, atol=1e-5, rtol=0)


def test_a_sample_depends_on_its_seed_and_not_on_the_batch(model: Any) -> None:
    single = generate_all(model, prompts(), rows=1, arrivals=1)
    batched = generate_all(model, prompts(), rows=12, arrivals=12)
    staggered = generate_all(model, prompts()[::-1], rows=3, arrivals=1)
    for key in range(len(LENGTHS)):
        assert single[key].tokens.tolist() == batched[key].tokens.tolist() == staggered[key].tokens.tolist()


def test_prompts_may_have_limits_of_their_own(model: Any) -> None:
    """Those of others stay as they are in an engine of a larger limit, as with answers of evaluations."""
    plain = generate_all(model, prompts(), rows=4, arrivals=3, stop=StopConditions(), max_new_tokens=8)
    limits = {key: 8 if key % 2 else 30 for key in plain}
    mixed = [replace(prompt, max_new_tokens=limits[prompt.key]) for prompt in prompts()]
    responses = generate_all(model, mixed, rows=4, arrivals=3, stop=StopConditions(), max_new_tokens=30)
    for key, limit in limits.items():
        assert len(responses[key].tokens) == limit
        assert responses[key].truncated
        assert limit == 30 or torch.equal(responses[key].tokens, plain[key].tokens)


def test_one_row_repeats_bit_for_bit_in_any_order(model: Any) -> None:
    first, second = (generate_all(model, order, rows=1, arrivals=1) for order in (prompts(), prompts()[::-1]))
    assert all(torch.equal(first[key].logprobs, second[key].logprobs) for key in first)


def test_sampling_follows_the_distribution(model: Any) -> None:
    prompt = prompts()[0].tokens
    many = [Prompt(key, prompt, sample_seed(0, 0, 0, key, 0)) for key in range(4000)]
    done = generate_all(model, many, rows=4000, arrivals=4000, max_new_tokens=1)
    with torch.inference_mode():
        expected = model(input_ids=prompt.long().unsqueeze(0)).logits[0, -1].softmax(0)
    frequencies = torch.bincount(torch.cat([response.tokens for response in done.values()]).long(), minlength=24) / 4000
    assert (frequencies - expected).abs().max() < 0.03


def test_spans_record_the_version_of_the_weights(model: Any) -> None:
    engine = TorchRollout(model, stop=StopConditions((EOS,)), rows=2, max_new_tokens=4, temperature=1.0)
    snapshot = Snapshot.take(5, {name: parameter.detach() for name, parameter in model.named_parameters()})
    engine.add(prompts()[:1])
    (before,) = drain(engine)
    engine.swap(snapshot)
    engine.add(prompts()[:1])
    (after,) = drain(engine)
    assert before.spans == (0, len(before.tokens))
    assert after.spans == (5, len(after.tokens))


def test_an_interrupt_makes_the_engine_return(model: Any) -> None:
    engine = TorchRollout(model, stop=StopConditions(), rows=1, max_new_tokens=40, temperature=1.0)
    engine.add(prompts()[:1])
    interrupt = threading.Event()
    interrupt.set()
    assert engine.run(interrupt) == []
    assert engine.running == 1


def test_more_prompts_than_rows_are_refused(model: Any) -> None:
    engine = TorchRollout(model, stop=StopConditions((EOS,)), rows=2, max_new_tokens=4, temperature=1.0)
    with pytest.raises(EngineError, match="3 prompts for 2 free rows"):
        engine.add(prompts()[:3])


def test_sample_seeds_are_repeatable_and_depend_on_every_part() -> None:
    base = (1, 2, 3, 4, 5)
    changed = [tuple(value + (position == index) for position, value in enumerate(base)) for index in range(5)]
    seeds = {sample_seed(*parts) for parts in [base, *changed]}
    assert len(seeds) == 6
    assert sample_seed(*base) == sample_seed(*base)
    assert all(0 <= seed < 2**63 for seed in seeds)
