import pytest
import torch
from torch import Tensor, nn

from flowrt.algorithms import logits_entropy, pad_samples, predicted_logprobs
from flowrt.algorithms import logprobs as module


class TinyTransformer(nn.Module):
    """One causal attention layer with learned positions: rows of different lengths don't get equal logits."""

    def __init__(self, vocabulary: int = 11, width: int = 8) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(32, width)
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens_BL: Tensor) -> Tensor:
        length = tokens_BL.shape[1]
        hidden = self.tokens(tokens_BL) + self.positions(torch.arange(length))
        causal = torch.ones(length, length, dtype=torch.bool).triu(1)
        attended, _ = self.attention(hidden, hidden, hidden, attn_mask=causal, need_weights=False)
        logits: Tensor = self.head(hidden + attended)
        return logits


def selected_logprobs(logits_BLV: Tensor, tokens_BL: Tensor, temperature: float = 1.0) -> Tensor:
    """Log-probabilities [B, L - 1] of the tokens of each row after its first."""
    rows, length = tokens_BL.shape
    prediction_T = torch.arange(rows * length).view(rows, length)[:, :-1].reshape(-1)
    target_T = tokens_BL[:, 1:].reshape(-1)
    return predicted_logprobs(logits_BLV.flatten(0, 1), prediction_T, target_T, temperature).view(rows, length - 1)


def naive_logprobs(logits_BLV: Tensor, tokens_BL: Tensor, temperature: float) -> Tensor:
    full = torch.log_softmax(logits_BLV / temperature, dim=-1)
    return full[:, :-1].gather(-1, tokens_BL[:, 1:, None]).squeeze(-1)


@pytest.mark.parametrize("chunk", [1, 40, 1 << 24])
def test_values_and_gradient_match_log_softmax(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK_ELEMENTS", chunk)
    generator = torch.Generator().manual_seed(0)
    logits = (5 * torch.randn(3, 7, 6, generator=generator, dtype=torch.float64)).requires_grad_()
    tokens = torch.randint(6, (3, 7), generator=generator)
    upstream = torch.randn(3, 6, generator=generator, dtype=torch.float64)
    got, expected = selected_logprobs(logits, tokens, 0.7), naive_logprobs(logits, tokens, 0.7)
    torch.testing.assert_close(got, expected)
    (got_gradient,) = torch.autograd.grad(got, logits, upstream)
    (expected_gradient,) = torch.autograd.grad(expected, logits, upstream)
    torch.testing.assert_close(got_gradient, expected_gradient)


def test_bfloat16_logits_are_summed_in_float32() -> None:
    logits = torch.randn(1, 2, 4096, generator=torch.Generator().manual_seed(0)).bfloat16().requires_grad_()
    tokens = torch.tensor([[0, 17]])
    got = selected_logprobs(logits, tokens)
    assert got.dtype == torch.float32
    exact = naive_logprobs(logits.detach().double(), tokens, 1.0)
    # bfloat16 arithmetic would be off by about 0.03 here.
    assert (got - exact).abs().max() < 1e-5
    got.sum().backward()
    assert logits.grad is not None
    assert logits.grad.dtype == torch.bfloat16


def test_huge_logits_do_not_overflow() -> None:
    logits = torch.tensor([[[3e4, 3e4, -3e4], [0.0, 0.0, 0.0]]])
    assert selected_logprobs(logits, torch.tensor([[0, 1]])).item() == pytest.approx(-0.693147, rel=1e-5)


def test_logits_are_the_only_vocabulary_sized_tensor_saved_for_backward() -> None:
    logits = torch.randn(2, 5, 100, requires_grad=True)
    saved: list[Tensor] = []

    def record(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(record, lambda tensor: tensor):
        selected_logprobs(logits, torch.zeros(2, 5, dtype=torch.long), temperature=0.5)
    large = [tensor for tensor in saved if tensor.numel() >= logits.numel()]
    assert [tensor.data_ptr() for tensor in large] == [logits.data_ptr()]


def test_padding_changes_no_logprob_and_no_gradient() -> None:
    torch.manual_seed(3)
    model = TinyTransformer().double()
    prompts = [torch.randint(11, (n,)) for n in (3, 1, 5, 2)]
    responses = [torch.randint(11, (n,)) for n in (4, 6, 1, 0)]

    padded = pad_samples(prompts, responses, pad_id=0)
    logprobs_BM = selected_logprobs(model(padded.tokens_BL), padded.tokens_BL, 0.9)
    flat_T = logprobs_BM[padded.response_mask_BL[:, 1:]]
    flat_T.sum().backward()
    padded_gradients = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()

    separate = []
    for prompt, response in zip(prompts, responses, strict=True):
        row = torch.cat([prompt, response])
        full = torch.log_softmax(model(row[None])[0] / 0.9, dim=-1)
        separate += [full[len(prompt) + i - 1, token] for i, token in enumerate(response.tolist())]
    separate_T = torch.stack(separate)
    separate_T.sum().backward()

    torch.testing.assert_close(flat_T, separate_T)
    assert padded.sample_T.tolist() == [0] * 4 + [1] * 6 + [2]
    for got, parameter in zip(padded_gradients, model.parameters(), strict=True):
        torch.testing.assert_close(got, parameter.grad)


def test_entropy_of_known_distributions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK_ELEMENTS", 4)
    uniform, certain = torch.zeros(4), torch.tensor([0.0, -1e4, -1e4, -1e4])
    halves = torch.tensor([1.0, 1.0, -1e4, -1e4])
    entropy = logits_entropy(torch.stack([uniform, certain, halves]))
    torch.testing.assert_close(entropy, torch.tensor([4.0, 1.0, 2.0]).log())
    probabilities = torch.softmax(torch.tensor([0.0, 2.0]), dim=0)
    uneven = logits_entropy(torch.tensor([[0.0, 1.0]]), temperature=0.5)[0]
    torch.testing.assert_close(uneven, -(probabilities * probabilities.log()).sum())


def test_temperatures_that_are_not_positive_are_refused() -> None:
    logits, tokens = torch.zeros(2, 3, 4), torch.zeros(2, 3, dtype=torch.long)
    with pytest.raises(ValueError, match="temperature is 0"):
        selected_logprobs(logits, tokens, 0)
    with pytest.raises(ValueError, match="temperature is -1"):
        logits_entropy(logits[0], -1)


def test_no_predictions_have_no_logprobs() -> None:
    assert selected_logprobs(torch.zeros(2, 1, 4), torch.zeros(2, 1, dtype=torch.long)).shape == (2, 0)
