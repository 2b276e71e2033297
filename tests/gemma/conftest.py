"""A pretrained model, if scripts/install_gemma has written it."""

import json
from pathlib import Path

import pytest

MODEL = Path.home() / ".cache/flowrt/gemma-3-270m"


@pytest.fixture(scope="session")
def checkpoint() -> Path:
    """Gemma 3 270M in bfloat16: vocabulary 262,144, tied embeddings, windows of 512 tokens in five of six layers."""
    if not (MODEL / "config.json").is_file():
        pytest.skip(f"no model in {MODEL}; scripts/install_gemma writes it there")
    return MODEL


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """A data file of 40 conversations."""
    path = tmp_path / "rows.jsonl"
    path.write_text(
        "".join(
            json.dumps({"prompt": [{"role": "user", "content": f"What is {n} + 11?"}], "answer": str(n + 11)}) + "\n"
            for n in range(40)
        )
    )
    return path
