"""Truncated sampling of the torch engine: its distribution, the recorded supports, and their use in training."""

import gc
import threading
from typing import Any

import pytest
import torch

from flowrt.algorithms.objective import Objective
from flowrt.algorithms.support import Support
from flowrt.engines.base import Prompt, Response, TrainingBatch, sample_seed
from flowrt.engines.options import TrainOptions, Truncation
from flowrt.engines.stopping import StopConditions
from flowrt.engines.tiny_model import build_model
from flowrt.engines.torch import rollout
from flowrt.engines.torch.rollout import TorchRollout, draw, draw_truncated, sums_by_products
from flowrt.engines.torch.trainer import TorchTrainer
from flowrt.engines.training.forward import enable_packing, response_logprobs
from flowrt.transport.weights.snapshot import Snapshot

EOS, VOCABULARY, DRAWS = 1, 48, 20_000
MAX_SUPPORT = {Truncation(top_k=20): 20, Truncation(top_k=40, top_p=0.9): 40, Truncation(top_k=40, min_p=0.1): 40}
# Quantiles of chi-square at 0.999, by degrees of freedom (Wilson-Hilferty below 0.1 % off).
Z_999 = 3.0902


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def new_model(seed: int = 1) -> Any:
    model = build_model(
        vocab_size=VOCABULARY, hidden_size=64, layers=2, heads=4, intermediate_size=96, max_length=128, seed=seed
    ).eval()
    with torch.no_grad():
        model.model.embed_tokens.weight *= 2  # uneven distributions
    return model


@pytest.fixture(scope="module")
def model() -> Any:
    return new_model()


def prompts(count: int, *, greedy: bool = False) -> list[Prompt]:
    generator = torch.Generator().manual_seed(0)
    return [
        Prompt(key, torch.randint(2, VOCABULARY, (3 + key % 4,), generator=generator, dtype=torch.int32), key, greedy)
        for key in range(count)
    ]


def generate(model: Any, todo: list[Prompt], truncation: Truncation | None, **settings: Any) -> dict[int, Response]:
    options: dict[str, Any] = {"stop": StopConditions((EOS,)), "max_new_tokens": 12, "temperature": 0.7} | settings
    engine = TorchRollout(model, rows=len(todo), truncation=truncation, **options)
    engine.add(todo)
    done: dict[int, Response] = {}
    while engine.running:
        done |= {response.key: response for response in engine.run(threading.Event())}
    return done


def chi_square_quantile(degrees: int) -> float:
    term = 2 / (9 * degrees)
    return float(degrees * (1 - term + Z_999 * term**0.5) ** 3)


@pytest.mark.parametrize("truncation", [Truncation(40, 0.9), Truncation(20), Truncation(30, 0.9, 0.05), Truncation()])
@pytest.mark.parametrize("temperature", [0.7, 1.3])
def test_draws_follow_the_renormalised_distribution(truncation: Truncation, temperature: float) -> None:
    logits_V = 2 * torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(2))
    p = (logits_V / temperature).softmax(0).double()
    order = p.argsort(descending=True)
    more_likely = p[order].cumsum(0) - p[order]
    kept = (more_likely < truncation.top_p) & (p[order] >= truncation.min_p * p.max())
    kept[truncation.top_k or VOCABULARY :] = False
    expected = torch.zeros(VOCABULARY, dtype=torch.float64).index_copy(0, order[kept], p[order[kept]])
    expected /= expected.sum()
    uniform_R1 = torch.rand(DRAWS, 1, generator=torch.Generator().manual_seed(3))
    logprobs_RV = (logits_V / temperature).log_softmax(0).expand(DRAWS, VOCABULARY)
    tokens_R1, drawn_R1, supports = draw_truncated(logprobs_RV, uniform_R1, truncation)
    assert set(supports[0].tokens_E.tolist()) == set(order[kept].tolist())
    torch.testing.assert_close(drawn_R1.squeeze(1).double(), expected.log()[tokens_R1.squeeze(1)], atol=1e-5, rtol=0)
    counts = torch.bincount(tokens_R1.squeeze(1), minlength=VOCABULARY).double()
    assert counts[expected == 0].sum() == 0
    inside = expected > 0
    statistic = float(((counts - DRAWS * expected)[inside].square() / (DRAWS * expected)[inside]).sum())
    assert statistic < chi_square_quantile(int(inside.sum()) - 1)


def test_the_first_token_of_the_engine_follows_the_truncated_distribution(model: Any) -> None:
    truncation, prompt = Truncation(40, 0.9), prompts(1)[0].tokens
    many = [Prompt(key, prompt, sample_seed(0, 0, 0, key, 0)) for key in range(4000)]
    done = generate(model, many, truncation, max_new_tokens=1)
    with torch.inference_mode():
        p = (model(input_ids=prompt.long().unsqueeze(0)).logits[0, -1] / 0.7).softmax(0).double()
    support = done[0].support
    assert support is not None
    assert p[support.tokens_E.long()].sum() >= 0.9 > p[support.tokens_E.long()].sum() - p[support.tokens_E[-1]]
    expected = torch.zeros(VOCABULARY, dtype=torch.float64).index_copy(
        0, support.tokens_E.long(), p[support.tokens_E.long()]
    )
    expected *= len(many) / expected.sum()
    counts = torch.bincount(torch.cat([response.tokens for response in done.values()]).long(), minlength=VOCABULARY)
    inside = expected > 0
    assert int(counts[~inside].sum()) == 0
    statistic = float(((counts - expected)[inside].square() / expected[inside]).sum())
    assert statistic < chi_square_quantile(int(inside.sum()) - 1)


def test_truncation_without_limits_changes_no_bit(model: Any) -> None:
    plain, identity = (generate(model, prompts(8), limits) for limits in (None, Truncation()))
    for key, response in plain.items():
        assert torch.equal(response.tokens, identity[key].tokens)
        assert torch.equal(response.logprobs, identity[key].logprobs)
        assert response.support is None
        assert identity[key].support is None


@pytest.mark.parametrize("truncation", [Truncation(3), Truncation(40, 0.4), Truncation(40, 1.0, 0.6)])
def test_each_option_changes_samples_but_not_greedy_ones(model: Any, truncation: Truncation) -> None:
    plain, truncated = (generate(model, prompts(16), limits) for limits in (None, truncation))
    assert any(not torch.equal(plain[key].tokens, truncated[key].tokens) for key in plain)
    greedy, greedy_truncated = (generate(model, prompts(16, greedy=True), limits) for limits in (None, truncation))
    for key, response in greedy.items():
        assert torch.equal(response.tokens, greedy_truncated[key].tokens)
        assert torch.equal(response.logprobs, greedy_truncated[key].logprobs)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("truncation", list(MAX_SUPPORT))
def test_recorded_log_probabilities_equal_the_trainers_over_the_support(
    model: Any, truncation: Truncation, packed: bool
) -> None:
    done = generate(model, prompts(12), truncation)
    responses = [done[key] for key in range(12)]
    supports = [response.support for response in responses if response.support is not None]
    assert len(supports) == 12
    assert all(response.support is not None and response.support.fits(response.tokens) for response in responses)
    assert max(int(support.counts_T.max()) for support in supports) <= MAX_SUPPORT[truncation]
    trained = new_model()
    assert not packed or enable_packing(trained)
    got, _ = response_logprobs(
        trained,
        [prompt.tokens for prompt in prompts(12)],
        [response.tokens for response in responses],
        0.7,
        supports=supports,
    )
    recorded = torch.cat([response.logprobs for response in responses])
    torch.testing.assert_close(got.detach(), recorded, atol=1e-5, rtol=0)
    whole, _ = response_logprobs(
        trained, [prompt.tokens for prompt in prompts(12)], [response.tokens for response in responses], 0.7
    )
    assert (whole.detach() - recorded).abs().max() > 0.01  # without the supports the ratios would be wrong


@pytest.mark.parametrize("joined", [3, rollout.JOINED_SUPPORTS])
def test_sequences_keep_their_supports_when_others_end_and_weights_change(
    model: Any, joined: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows are moved as sequences end, and an in-flight update changes the distribution in between."""
    monkeypatch.setattr(rollout, "JOINED_SUPPORTS", joined)
    engine = TorchRollout(
        new_model(),
        stop=StopConditions((EOS, 5, 9)),
        rows=6,
        max_new_tokens=12,
        temperature=1.0,
        truncation=Truncation(12, 0.95),
    )
    other = new_model(2)
    snapshot = Snapshot.take(1, {name: parameter.detach() for name, parameter in other.named_parameters()})
    todo, done, swapped = prompts(18), list[Response](), False
    while todo or engine.running:
        count = min(engine.room, len(todo))
        engine.add(todo[:count])
        todo = todo[count:]
        done += engine.run(threading.Event())
        if not swapped and len(done) >= 6:
            swapped = True
            while (work := engine.prepare(snapshot)) is not None:
                work()
            engine.swap(snapshot)
    assert any(len(response.spans) > 2 for response in done)
    models = {0: new_model(), 1: other}
    prompt_tokens = {prompt.key: prompt.tokens for prompt in prompts(18)}
    for response in done:
        assert response.support is not None
        assert response.support.fits(response.tokens)
        begin = 0
        for version, count in zip(response.spans[::2], response.spans[1::2], strict=True):
            expected, _ = response_logprobs(
                models[version], [prompt_tokens[response.key]], [response.tokens], 1.0, supports=[response.support]
            )
            part = slice(begin, begin + count)
            torch.testing.assert_close(response.logprobs[part], expected[part].detach(), atol=1e-5, rtol=0)
            begin += count


class _After(threading.Event):
    """An interrupt that is set after a number of checks."""

    def __init__(self, checks: int) -> None:
        super().__init__()
        self.left = checks

    def is_set(self) -> bool:
        self.left -= 1
        return self.left <= 0


def test_the_supports_of_a_long_response_are_few_tensors() -> None:
    engine = TorchRollout(
        new_model(), stop=StopConditions(()), rows=2, max_new_tokens=300, temperature=1.0, truncation=Truncation(8)
    )
    engine.add(prompts(2))
    assert not engine.run(_After(290))
    held = [object_ for object_ in gc.get_objects() if type(object_) is Support]
    assert len(held) <= 2 * (290 // rollout.JOINED_SUPPORTS + rollout.JOINED_SUPPORTS)
    done = engine.run(threading.Event())
    assert all(
        response.support is not None and response.support.fits(response.tokens) and len(response.tokens) == 300
        for response in done
    )


def training_batch(responses: list[Response], **changes: Any) -> TrainingBatch:
    columns: dict[str, Any] = {
        "prompts": [prompt.tokens for prompt in prompts(len(responses))],
        "responses": [response.tokens for response in responses],
        "rollout_logprobs": [response.logprobs for response in responses],
        "reference_logprobs": None,
        "advantages_N": torch.linspace(-1, 1, len(responses)),
        "weights_N": torch.ones(len(responses)),
        "groups_N": torch.zeros(len(responses), dtype=torch.int64),
        "supports": [response.support for response in responses],
    }
    return TrainingBatch(**columns | changes)


def test_an_unchanged_policy_has_ratios_of_one_only_with_supports(model: Any) -> None:
    responses = list(generate(model, prompts(8), Truncation(40, 0.8)).values())
    responses.sort(key=lambda response: response.key)
    trainer = TorchTrainer(new_model(), TrainOptions(warmup_steps=0), Objective(), temperature=0.7)
    trainer.accumulate(training_batch(responses))
    metrics = trainer.step()
    assert abs(metrics["mismatch_kl_k1"]) < 1e-5
    assert metrics["mismatch_kl_k3"] < 1e-9
    assert metrics["importance_truncated"] == 0
    assert metrics["invalid_samples"] == 0
    assert metrics["grad_norm"] > 0
    without = TorchTrainer(new_model(), TrainOptions(warmup_steps=0), Objective(), temperature=0.7)
    without.accumulate(training_batch(responses, supports=None))
    assert without.step()["mismatch_kl_k1"] > 0.01


def test_the_gradient_reaches_no_token_outside_of_the_supports(model: Any) -> None:
    """With tied weights, only the embedding rows of the supports and of the prompt have a gradient."""
    responses = [generate(model, prompts(1), Truncation(4))[0]]
    trained = new_model()
    trainer = TorchTrainer(trained, TrainOptions(warmup_steps=0), Objective(), temperature=0.7)
    trainer.accumulate(training_batch(responses, advantages_N=torch.ones(1)))
    support = responses[0].support
    assert support is not None
    gradient_V = trained.model.embed_tokens.weight.grad.abs().sum(1)
    touched = set(support.tokens_E.tolist()) | set(prompts(1)[0].tokens.tolist())
    assert {token for token in range(VOCABULARY) if gradient_V[token] > 0} <= touched
    assert len(touched) < VOCABULARY


def test_a_sample_whose_support_does_not_fit_is_masked_and_counted(model: Any) -> None:
    responses = [response for _, response in sorted(generate(model, prompts(4), Truncation(8)).items())]
    supports = [response.support for response in responses]
    first = supports[0]
    assert first is not None
    supports[0] = first.prefix(len(first.counts_T) - 1)
    trainer = TorchTrainer(new_model(), TrainOptions(warmup_steps=0), Objective(), temperature=0.7)
    trainer.accumulate(training_batch(responses, supports=supports))
    assert trainer.step()["invalid_samples"] == 1


@pytest.mark.parametrize("width", [1, 511, 512, 513, 152_064])
def test_sums_by_products_are_those_of_a_scan_and_draw_the_same_tokens(
    width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(width)
    logprobs_RV = (4 * torch.randn(16, width, generator=generator)).log_softmax(-1)
    uniform_R1 = torch.rand(16, 1, generator=generator)
    sums_RV = sums_by_products(logprobs_RV.exp())
    torch.testing.assert_close(sums_RV, logprobs_RV.exp().double().cumsum(-1), atol=1e-12, rtol=1e-12)
    assert bool((sums_RV.diff(dim=-1) >= -1e-12).all())
    expected = draw(logprobs_RV, uniform_R1), draw_truncated(logprobs_RV, uniform_R1, Truncation(top_p=0.9))[0]
    monkeypatch.setattr(rollout, "prefix_sums", sums_by_products)
    actual = draw(logprobs_RV, uniform_R1), draw_truncated(logprobs_RV, uniform_R1, Truncation(top_p=0.9))[0]
    assert torch.equal(actual[0][0], expected[0][0])
    assert torch.equal(actual[1], expected[1])
