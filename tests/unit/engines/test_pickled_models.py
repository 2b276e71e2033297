"""A checkpoint that is a pickle is refused unopened, by the configuration check and by the loader."""

import pickle
from pathlib import Path

import pytest

from flowrt.engines.hf import load_model
from flowrt.engines.tiny_model import build_model
from flowrt.errors import ConfigError, EngineError
from flowrt.recipes.model_files import check_model_files


class FileCreator:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[object, tuple[Path]]:
        return Path.touch, (self._path,)


def test_a_pickled_checkpoint_is_refused_by_the_check_and_the_loader(tmp_path: Path) -> None:
    model, marker = tmp_path / "model", tmp_path / "marker"
    build_model(
        vocab_size=24, hidden_size=32, layers=1, heads=2, intermediate_size=48, max_length=64, seed=1
    ).save_pretrained(model)
    (model / "model.safetensors").unlink()
    (model / "tokenizer.json").write_text("{}")
    (model / "pytorch_model.bin").write_bytes(pickle.dumps(FileCreator(marker)))
    with pytest.raises(ConfigError, match="in a pickle"):
        check_model_files(model, 16)
    with pytest.raises(EngineError, match="no causal LM that transformers can load"):
        load_model(model)
    assert not marker.exists()
    pickle.loads((model / "pytorch_model.bin").read_bytes())
    assert marker.exists(), "unpickling does not create the file"
