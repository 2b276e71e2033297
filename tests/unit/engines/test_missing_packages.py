"""A checkpoint that needs a package which is not installed: the message names the package and blames no model."""

import importlib.util
import json
from pathlib import Path

import pytest

from flowrt.cli import main
from flowrt.engines.hf import load_tokenizer, missing_package, unloadable
from flowrt.engines.tiny_model import build_model
from flowrt.errors import EngineError

ADVICE = r"the tokenizer of .* is in no tokenizer\.json, and .* not installed here: pip install 'flowrt\[tokenizers\]'$"


@pytest.fixture
def sentencepiece_model(tmp_path: Path) -> Path:
    """A checkpoint whose tokenizer is in tokenizer.model alone."""
    path = tmp_path / "model"
    build_model(vocab_size=64, hidden_size=16, layers=1, heads=2, intermediate_size=16, max_length=64, seed=0
    ).save_pretrained(path)  # fmt: skip
    (path / "tokenizer.model").write_bytes(b"\n\x0e\n\x05<unk>\x15\x00\x00\x00\x00\x18\x02")
    (path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "LlamaTokenizer", "eos_token": "</s>"}))
    return path


@pytest.mark.skipif(importlib.util.find_spec("sentencepiece") is not None, reason="the package is installed here")
def test_a_tokenizer_that_needs_packages_names_the_extra(
    sentencepiece_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(EngineError, match=ADVICE):
        load_tokenizer(sentencepiece_model)
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "one", "answer": "1"}\n' * 2)
    words = ["--model", str(sentencepiece_model), "--data", str(rows), "--data.eval-prompts", "0"]
    words += ["--rollout.max-new-tokens", "16"]
    assert main(["data", "check", *words]) == 2
    assert "pip install 'flowrt[tokenizers]'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "package"),
    [
        (ValueError("`tiktoken2` is required to read a file. Install it with `pip install tiktoken2`."), "tiktoken2"),
        (ImportError("\nATokenizer requires the Sudachi-X library but it was not found in your env"), "sudachi-x"),
        (ImportError("Using `q` 4-bit requires q-bits: `pip install -U q-bits>=0.46.1`"), "q-bits"),
        (ModuleNotFoundError("No module named 'mamba_x.ops'", name="mamba_x.ops"), "mamba_x"),
        (ImportError("cannot import name 'A' from 'b'", name="b"), ""),
        (ValueError("model type `qwen99`; update it with `pip install --upgrade transformers`, or"), ""),
        (ValueError("or from source with `pip install git+git://host/transformers.git`"), ""),
        (RuntimeError("size mismatch"), ""),
    ],
)
def test_packages_in_errors_of_transformers(error: Exception, package: str) -> None:
    assert missing_package(error) == package
    text = unloadable("m", "is no causal LM", error)
    assert text.startswith(
        f"m needs the package {package}, which is not" if package else "m is no causal LM that transformers can load: "
    )
    assert "\n" not in text
