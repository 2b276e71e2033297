"""``flowrt slurm``: SLURM templates with the values of a site.

- A template is a shell script with placeholders ``{{NAME}}``; each placeholder must have a value.
- Values are checked or quoted, so that none can add a line or a command.
"""

import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from flowrt.errors import ConfigError

HERE = Path(__file__).parent / "slurm_templates"
"""Directory of the templates."""
JOB = "job.sh"
_PLACEHOLDER = re.compile(r"\{\{([A-Z_]+)\}\}")
_HEADER = re.compile(r"[A-Za-z0-9_.,:=+-]*")


@dataclass(frozen=True)
class Site:
    """The values that differ between clusters; each docstring is the help text of its flag."""

    directory: Annotated[str, tyro.conf.Positional] = "."
    """Directory to write the templates to."""
    partition: str = ""
    """Partition to submit to; empty: the cluster's default."""
    rollout_partition: str = ""
    """Partition of the generating part of a heterogeneous job, and of extra workers; empty: the same."""
    account: str = ""
    """Account to charge; empty: the user's default."""
    nodes: int = 2
    """Nodes of a multi-node job, including the training nodes."""
    train_nodes: int = 1
    """Training nodes among them."""
    gpus: str = ""
    """GPUs of a node, as in --gpus-per-node (8, or a100:8); empty: none are requested."""
    rollout_gpus: str = ""
    """GPUs of a generating node of a heterogeneous job; empty: the same number."""
    npus: str = "npu:8"
    """Ascend NPUs of a node, as in --gres (only for ascend.sbatch)."""
    cann: str = "/usr/local/Ascend/ascend-toolkit"
    """Installation directory of CANN (only for ascend.sbatch)."""
    cpus: int = 4
    """CPU cores of each worker."""
    time: str = "24:00:00"
    """Time limit of a job."""
    extra: int = 2
    """Number of rollout workers in the array of extra ones."""
    runs: str = "flowrt-jobs"
    """Directory in which each job creates its own, on a file system that all nodes mount."""
    recipe: str = "arithmetic"
    """Recipe of the run; a task of your own is the path of its file."""


def placeholders(site: Site) -> dict[str, str]:
    """The value of each placeholder. Raises ConfigError for values that are not allowed in a script."""
    if not 0 < site.train_nodes < site.nodes:
        raise ConfigError(
            f"--train-nodes is {site.train_nodes} of --nodes {site.nodes}: at least one node trains and one generates; "
            "on one node use one_node.sbatch"
        )
    if site.cpus < 1 or site.extra < 1:
        raise ConfigError(f"--cpus is {site.cpus} and --extra is {site.extra}; use 1 or more")
    header = {
        "PARTITION": site.partition,
        "ROLLOUT_PARTITION": site.rollout_partition or site.partition,
        "ACCOUNT": site.account,
        "GPUS": site.gpus,
        "ROLLOUT_GPUS": site.rollout_gpus or site.gpus,
        "ONE_GPU": _one(site.rollout_gpus or site.gpus),
        "NPUS": site.npus,
        "TIME": site.time,
        "RECIPE": site.recipe,
    }
    for name, value in header.items():
        if not _HEADER.fullmatch(value.replace("/", "") if name == "RECIPE" else value):
            raise ConfigError(f"{name.lower()} {value!r} is not allowed in a script; use letters, digits and .,:=+-_")
    train_gpus = _count(site.gpus)
    rollout_gpus = _count(site.rollout_gpus or site.gpus)
    rollout_nodes = site.nodes - site.train_nodes
    steps = f"--nodes={site.train_nodes} --ntasks={site.train_nodes} --cpus-per-task={site.cpus * train_gpus}"
    numbers = {
        "NODES": site.nodes,
        "TRAIN_NODES": site.train_nodes,
        "ROLLOUT_NODES": rollout_nodes,
        "CPUS": site.cpus,
        "NODE_CPUS": site.cpus * train_gpus,
        "LAST_EXTRA": site.extra - 1,
        "RANKS": site.train_nodes * train_gpus,
        "MANY_WORKERS": rollout_nodes * train_gpus,
        "HET_WORKERS": rollout_nodes * rollout_gpus,
        "TRAINER_STEP": f"{steps} --gpus-per-node={site.gpus}" if site.gpus else steps,
        "ROLLOUT_STEP": f"--nodes=1 --ntasks=1 --cpus-per-task={site.cpus}{' --gpus-per-task=1' if site.gpus else ''}",
    }
    device = " --device cuda" if site.gpus else ""
    paths = {"CANN": Path(site.cann), "BIN": Path(sys.executable).parent, "RUNS": Path(site.runs).absolute()}
    return {
        **header,
        "DEVICE": device,
        **{name: str(value) for name, value in numbers.items()},
        **{name: shlex.quote(str(path)) for name, path in paths.items()},
    }


def fill(text: str, values: Mapping[str, str]) -> str:
    """Replace every placeholder; an #SBATCH line with an empty value is removed, so that SLURM's default applies.

    Raises ConfigError for a placeholder without a value.
    """
    unknown = sorted({name for name in _PLACEHOLDER.findall(text) if name not in values})
    if unknown:
        raise ConfigError(f"a template has the unknown placeholder {unknown[0]}; known are {sorted(values)}")
    lines = []
    for line in text.splitlines():
        names = _PLACEHOLDER.findall(line)
        if line.startswith("#SBATCH") and names and not all(values[name] for name in names):
            continue
        lines.append(_PLACEHOLDER.sub(lambda found: values[found[1]], line))
    return "\n".join(lines) + "\n"


def filled(site: Site) -> dict[str, str]:
    """The text of each template with the values of the site, by file name. Raises ConfigError as `placeholders`."""
    values = placeholders(site)
    values["JOB"] = fill((HERE / JOB).read_text(), values).rstrip("\n")
    return {path.name: fill(path.read_text(), values) for path in sorted(HERE.glob("*.sbatch"))}


def write(arguments: Sequence[str]) -> list[Path]:
    """Write the templates; returns their paths.

    ``arguments``: the flags of `Site`. Raises ConfigError for bad values or if one of the files exists, with nothing
    written, and if writing fails.
    """
    site = tyro.cli(
        Site,
        prog="flowrt slurm",
        description="Write SLURM templates with this site's values.",
        args=list(arguments),
        config=(tyro.conf.FlagConversionOff,),
    )
    directory = Path(site.directory)
    texts = filled(site)
    for name in texts:
        if (directory / name).exists():
            raise ConfigError(f"{directory / name} exists; name another directory, or remove it")
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            (directory / name).write_text(text)
    except OSError as error:
        raise ConfigError(f"templates cannot be written to {directory}: {error.strerror}; name another") from error
    return [directory / name for name in texts]


def _count(gpus: str) -> int:
    """Number of workers on a node: 8 for ``8`` and ``a100:8``, 1 without GPUs."""
    last = gpus.rpartition(":")[2]
    if gpus and not last.isdigit():
        raise ConfigError(f"--gpus {gpus!r} does not end with a number; write 8, or a100:8")
    return int(last or 1)


def _one(gpus: str) -> str:
    """One GPU of the same type."""
    return f"{gpus.rpartition(':')[0]}:1".lstrip(":") if gpus else ""
