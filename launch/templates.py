"""SLURM templates with a site's values filled in: plain substitution of named placeholders, and nothing left over."""

import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from flowrt.errors import ConfigError

HERE = Path(__file__).parent
JOB = "job.sh"
_PLACEHOLDER = re.compile(r"\{\{([A-Z_]+)\}\}")
_HEADER = re.compile(r"[A-Za-z0-9_.,:=+-]*")


@dataclass(frozen=True)
class Site:
    """What differs between clusters."""

    directory: Annotated[str, tyro.conf.Positional] = "."
    """Where the templates are written."""
    partition: str = ""
    """Partition to submit to; empty: the cluster's default."""
    rollout_partition: str = ""
    """Partition of the generating part of a heterogeneous job, and of extra workers; empty: the same."""
    account: str = ""
    """Account to charge; empty: the user's default."""
    nodes: int = 2
    """Nodes of a job on several, the training ones included."""
    train_nodes: int = 1
    """How many of them train."""
    gpus: str = ""
    """GPUs of a node, as --gpus-per-node takes them (8, or a100:8); empty: none are asked for."""
    rollout_gpus: str = ""
    """GPUs of a generating node of a heterogeneous job; empty: as many."""
    npus: str = "npu:8"
    """Ascend NPUs of a node, as --gres takes them (for ascend.sbatch alone)."""
    cann: str = "/usr/local/Ascend/ascend-toolkit"
    """Where CANN is installed (for ascend.sbatch alone)."""
    cpus: int = 4
    """CPU cores of each worker."""
    time: str = "24:00:00"
    """Time limit of a job."""
    extra: int = 2
    """Workers of an array of extra rollout workers."""
    runs: str = "flowrt-jobs"
    """Directory in which each job makes one of its own: on a file system that all nodes mount."""
    recipe: str = "arithmetic"
    """Recipe of the run."""


def placeholders(site: Site) -> dict[str, str]:
    """The value of each placeholder. Raises ConfigError for values that cannot stand in a script."""
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
        if not _HEADER.fullmatch(value):
            raise ConfigError(f"{name.lower()} {value!r} cannot stand in a script; use letters, digits and .,:=+-_")
    here, there = _count(site.gpus), _count(site.rollout_gpus or site.gpus)
    generating = site.nodes - site.train_nodes
    steps = f"--nodes={site.train_nodes} --ntasks={site.train_nodes} --cpus-per-task={site.cpus * here}"
    numbers = {
        "NODES": site.nodes,
        "TRAIN_NODES": site.train_nodes,
        "ROLLOUT_NODES": generating,
        "CPUS": site.cpus,
        "LAST_EXTRA": site.extra - 1,
        "RANKS": site.train_nodes * here,
        "MANY_WORKERS": generating * here,
        "HET_WORKERS": generating * there,
        "TRAINER_STEP": f"{steps} --gpus-per-node={site.gpus}" if site.gpus else steps,
        "ROLLOUT_STEP": f"--nodes=1 --ntasks=1 --cpus-per-task={site.cpus}{' --gpus-per-task=1' if site.gpus else ''}",
    }
    paths = {"CANN": Path(site.cann), "BIN": Path(sys.executable).parent, "RUNS": Path(site.runs).absolute()}
    return {
        **header,
        **{name: str(value) for name, value in numbers.items()},
        **{name: shlex.quote(str(path)) for name, path in paths.items()},
    }


def fill(text: str, values: Mapping[str, str]) -> str:
    """The text with every placeholder replaced.

    An #SBATCH line whose value is empty is left out: SLURM's default holds. Raises ConfigError for a placeholder
    without a value.
    """
    unknown = sorted({name for name in _PLACEHOLDER.findall(text) if name not in values})
    if unknown:
        raise ConfigError(
            f"a template has the placeholder {unknown[0]}, which nobody fills; there are {sorted(values)}"
        )
    lines = []
    for line in text.splitlines():
        names = _PLACEHOLDER.findall(line)
        if line.startswith("#SBATCH") and names and not all(values[name] for name in names):
            continue
        lines.append(_PLACEHOLDER.sub(lambda found: values[found[1]], line))
    return "\n".join(lines) + "\n"


def filled(site: Site) -> dict[str, str]:
    """Every template by its file's name, ready to be submitted."""
    values = placeholders(site)
    values["JOB"] = fill((HERE / JOB).read_text(), values).rstrip("\n")
    return {path.name: fill(path.read_text(), values) for path in sorted(HERE.glob("*.sbatch"))}


def write(arguments: Sequence[str]) -> list[Path]:
    """Write the templates. Raises ConfigError, with nothing written, where one of them is there already."""
    site = tyro.cli(
        Site,
        prog="flowrt templates",
        description="Write SLURM templates with this site's values.",
        args=list(arguments),
        config=(tyro.conf.FlagConversionOff,),
    )
    directory = Path(site.directory)
    texts = filled(site)
    there = [name for name in texts if (directory / name).exists()]
    if there:
        raise ConfigError(f"{directory / there[0]} is there already; name another directory, or remove it")
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            (directory / name).write_text(text)
    except OSError as error:
        raise ConfigError(f"templates cannot be written to {directory}: {error.strerror}; name another") from error
    return [directory / name for name in texts]


def _count(gpus: str) -> int:
    """Workers on a node with so many GPUs: 8 for ``8`` and for ``a100:8``, one where there are none."""
    last = gpus.rpartition(":")[2]
    if gpus and not last.isdigit():
        raise ConfigError(f"--gpus {gpus!r} does not end with a number; write 8, or a100:8")
    return int(last or 1)


def _one(gpus: str) -> str:
    """One GPU of the same kind."""
    return f"{gpus.rpartition(':')[0]}:1".lstrip(":") if gpus else ""
