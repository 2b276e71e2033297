"""``flowrt export RUN --hf DIR``: the model of a checkpoint; bad input is one sentence and leaves nothing behind."""

import json
import resource
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from flowrt.algorithms.objective import Objective
from flowrt.cli import main
from flowrt.engines.hf import load_model, save_model
from flowrt.engines.options import TrainOptions
from flowrt.engines.tiny_model import build_model, wrap_tokenizer
from flowrt.engines.torch.trainer import TorchTrainer
from flowrt.errors import ConfigError
from flowrt.recipes.checkpoint_checksums import write_checksums
from flowrt.recipes.config_io import parse, to_toml
from flowrt.recipes.model_files import TRAINER_STATE, check_model_files
from flowrt.recipes.run_dir import checkpoint_dir
from flowrt.recipes.tasks.arithmetic import Arithmetic

STEPS = (2, 4)


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run with two checkpoints, whose weights differ from the start by their step."""
    torch.set_num_threads(1)
    path = tmp_path_factory.mktemp("run") / "run"
    path.mkdir()
    (path / "config.toml").write_text(to_toml(parse(["arithmetic", "--run-dir", str(path)])))
    tokenizer = wrap_tokenizer(Arithmetic(0, 1).tokenizer())
    sizes = {"hidden_size": 32, "layers": 1, "heads": 2, "intermediate_size": 48, "max_length": 64}
    save_model(build_model(vocab_size=len(tokenizer), seed=1, **sizes), tokenizer, path / "model")
    for step in STEPS:
        engine = TorchTrainer(load_model(path / "model"), TrainOptions(), Objective(), temperature=1.0)
        with torch.no_grad():
            for parameter in engine.model.parameters():
                parameter += step
        checkpoint_dir(path, step).mkdir(parents=True)
        engine.save(checkpoint_dir(path, step))
        (checkpoint_dir(path, step) / TRAINER_STATE).write_text("{}")
        write_checksums(checkpoint_dir(path, step))
    return path


def export(capsys: pytest.CaptureFixture[str], run_dir: Path, *arguments: str) -> tuple[int, str]:
    code = main(["export", str(run_dir), *arguments])
    captured = capsys.readouterr()
    return code, " ".join((captured.out + captured.err).split())


@pytest.mark.parametrize(("flags", "step"), [((), 4), (("--step", "2"), 2)])
def test_the_model_of_a_checkpoint_is_written(
    capsys: pytest.CaptureFixture[str], run_dir: Path, tmp_path: Path, flags: tuple[str, ...], step: int
) -> None:
    (tmp_path / "model").mkdir()  # an empty one may be there
    code, output = export(capsys, run_dir, "--hf", str(tmp_path / "model"), *flags)
    assert (code, output) == (0, f"{tmp_path / 'model'}: the model of version {step}")
    start = dict(AutoModelForCausalLM.from_pretrained(run_dir / "model").named_parameters())
    written = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert all(torch.equal(parameter, start[name] + step) for name, parameter in written.named_parameters())
    assert (tmp_path / "model" / "tokenizer.json").is_file()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]


def test_final_dtype_is_that_of_the_run(capsys: pytest.CaptureFixture[str], run_dir: Path, tmp_path: Path) -> None:
    narrow = Path(shutil.copytree(run_dir, tmp_path / "run"))
    config = parse(["arithmetic", "--run-dir", str(narrow), "--trainer.final-dtype", "bfloat16"])
    (narrow / "config.toml").write_text(to_toml(config))
    assert export(capsys, narrow, "--hf", str(tmp_path / "model"))[0] == 0
    assert {tensor.dtype for tensor in load_file(tmp_path / "model" / "model.safetensors").values()} == {torch.bfloat16}
    assert json.loads((tmp_path / "model" / "config.json").read_text())["dtype"] == "bfloat16"


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (("--hf", "{tmp}/new", "--step", "3"), "has no checkpoint after 3 steps; there is: 2, 4"),
        (("--hf", "{tmp}/new", "--best"), "has no best weights; set checkpoint.best"),
        (("--hf", "{tmp}/full"), "full is not an empty directory; name a new one"),
        (("--hf", "{tmp}/full/file"), "file is not an empty directory; name a new one"),
        (("--hf", "{tmp}/nowhere/new"), "cannot be written: there is no directory"),
        (("--hf", "/proc/self/new"), "/proc/self/new cannot be written: no file can be created in /proc/self"),
        (("--html", "/proc/self/new"), "/proc/self/new cannot be written: no file can be created in /proc/self"),
        (("--prometheus", "/proc/self/new"), "/proc/self/new cannot be written: no file can be created"),
        (("--perfetto", "/proc/self/new"), "/proc/self/new cannot be written: no file can be created"),
        (("--hf", "{tmp}/new", "--step", "2", "--best"), "not allowed with argument --step"),
        (("--hf", "{tmp}/new", "--step", "-1"), "'-1' is not a whole number"),
        (("--hf", "{tmp}/new", "--steps", "1:2"), "--steps changes nothing for --hf"),
        (("--step", "2", "--html", "{tmp}/run.html"), "--step and --best change nothing without --hf DIR"),
        ((), "flowrt export needs a format: --hf DIR, --perfetto FILE"),
    ],
)
def test_bad_input_is_refused_and_nothing_is_written(
    capsys: pytest.CaptureFixture[str], run_dir: Path, tmp_path: Path, flags: tuple[str, ...], expected: str
) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("of the user")
    before = sorted(tmp_path.rglob("*"))
    code, output = export(capsys, run_dir, *(flag.format(tmp=tmp_path) for flag in flags))
    assert code == 2
    assert expected in output
    assert sorted(tmp_path.rglob("*")) == before


def test_a_run_without_checkpoints(capsys: pytest.CaptureFixture[str], run_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    shutil.copy(run_dir / "config.toml", tmp_path / "run")
    code, output = export(capsys, tmp_path / "run", "--hf", str(tmp_path / "new"))
    assert code == 2
    assert f"flowrt: run {tmp_path / 'run'} has no checkpoint, of which checkpoint.every is the interval" in output


def test_the_results_of_an_evaluation_cannot_be_written(
    capsys: pytest.CaptureFixture[str], run_dir: Path, tmp_path: Path
) -> None:
    assert main(["eval", str(run_dir), "--json", str(tmp_path / "nowhere" / "results.json")]) == 2
    assert "results.json cannot be written: there is no directory" in " ".join(capsys.readouterr().err.split())


def test_a_directory_without_a_run_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, output = export(capsys, tmp_path, "--hf", str(tmp_path / "new"))
    assert code == 2
    assert f"{tmp_path} is not a run directory" in output
    assert not list(tmp_path.iterdir())


def test_a_damaged_checkpoint_is_named(capsys: pytest.CaptureFixture[str], run_dir: Path, tmp_path: Path) -> None:
    damaged = Path(shutil.copytree(run_dir, tmp_path / "run"))
    (file,) = checkpoint_dir(damaged, 4).glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-4])
    code, output = export(capsys, damaged, "--hf", str(tmp_path / "new"))
    assert code == 2
    assert "step-000004" in output
    assert not (tmp_path / "new").exists()


def test_a_disk_that_is_full_is_one_sentence_and_leaves_nothing(
    capsys: pytest.CaptureFixture[str], run_dir: Path, tmp_path: Path
) -> None:
    """The limit of a file's size takes the place of a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        code, output = export(capsys, run_dir, "--hf", str(tmp_path / "new"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert code == 2
    assert output.startswith(f"flowrt: --hf {tmp_path / 'new'} cannot be written: ")
    assert not list(tmp_path.iterdir())


def test_a_checkpoint_is_no_model_and_is_refused(run_dir: Path) -> None:
    with pytest.raises(ConfigError, match=f"flowrt export {run_dir} --hf DIR --step 4 makes one of it"):
        check_model_files(checkpoint_dir(run_dir, 4), 8)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--checkpoint.hf-every", "-1"], "checkpoint.hf_every is -1; use"),
        (["--checkpoint.hf-every", "11"], "checkpoint.hf_every is 11, above steps (10): no model would be written"),
        (["--trainer.engine", "fsdp", "--trainer.lora.rank", "2", "--trainer.lora.alpha", "0"], "lora.alpha is 0"),
    ],
)
def test_keys_that_cannot_act_are_refused(capsys: pytest.CaptureFixture[str], flags: list[str], expected: str) -> None:
    assert main(["config", "arithmetic", "--steps", "10", *flags]) == 2
    assert expected in " ".join(capsys.readouterr().err.split())
