"""``flowrt slurm``: SLURM templates with the values of a site.

- A template is a shell script with placeholders ``{{NAME}}``; each placeholder must have a value.
- Values are checked or quoted, so that none can add a line or a command.
- A step of a job names its memory (0: it shares that of the job) and its devices. By default SLURM gives the first step
  all of the job's memory and devices, and the next one waits until that has ended.
"""

import re
import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from flowrt.engines.registry import ROLLOUT_ENGINES
from flowrt.errors import ConfigError, refuse
from flowrt.recipes.config_io import parse
from flowrt.recipes.flag_help import HelpText, print_help, topic_of
from flowrt.recipes.flags import parse_flags

COMMAND = "flowrt slurm"
COMMON = ("partition", "account", "nodes", "train_nodes", "gpus", "mem", "time", "container", "runs", "recipe", "flags")
"""The flags that --help shows."""
HERE = Path(__file__).parent / "slurm_templates"
JOB, CANN = "job.sh", "cann.sh"
WHOLE_IN_CONTAINER = ("one_node.sbatch", "extra_rollout.sbatch")
"""Templates whose processes are all in the container, if there is one; in others the workers of steps are."""
CONTAINER_PYTHON = ("sh", "-c", 'shift; exec python3 "$$@"', "sh")
"""Runs the words after it with the container's Python in place of the first one; ``$$`` as in launch.rollout."""
SHARED_OPTIONS = ("qos", "constraint", "reservation", "exclude", "mem")
"""Options of sbatch that flags of the same name set in all jobs."""
SITE_OPTIONS = ("partition", "account", "nodes", "time", "requeue")
"""Others that flags of the same name set."""
_PLACEHOLDER = re.compile(r"\{\{([A-Z_]+)\}\}")
_WORD = re.compile(r"[A-Za-z0-9_.,:=+-]*")
_RECIPE = re.compile(r"[A-Za-z0-9_.,:=+/-]*")
_NODES = re.compile(r"[A-Za-z0-9_.,\[\]-]*")
_FEATURES = re.compile(r"[A-Za-z0-9_.,:=+*&|()\[\]-]*")
_MEMORY = re.compile(r"([0-9]+[KMGT]?)?")
_MODULES = re.compile(r"([A-Za-z0-9_./+][A-Za-z0-9_./+-]*( (?=[^-])[A-Za-z0-9_./+-]+)*)?")
_IMAGE = re.compile(r"[A-Za-z0-9_.,:=+@#/-]*")
_PATH = re.compile(r"[A-Za-z0-9_.=+@#/-]*")
_TIME = re.compile(r"(?:(?P<days>\d+)-)?(?P<first>\d+)(?::(?P<second>\d+))?(?::(?P<third>\d+))?")
OF_TEMPLATES = {
    "run-dir": "use --runs",
    "device": "use --gpus or --npus",
    "controller.bind": "edit the templates once they are written",
    "trainer.nodes": "use --train-nodes",
    "trainer.ranks": "use --gpus, or give it to one_node.sbatch",
    "rollout.workers": "use --nodes, or give it to one_node.sbatch",
    "launch.trainer": "edit the templates once they are written",
    "launch.rollout": "edit the templates once they are written",
    "launch.rollout-hosts": "edit the templates once they are written",
}
"""Flags of flowrt run that templates set, and what to do instead; ``device`` only with accelerators."""
NO_LIMIT = ("", "0", "UNLIMITED", "INFINITE")
"""Values of --time without a limit that is known here; empty: that of the partition."""
MAX_NUMBER = 1_000_000
"""Far above what SLURM accepts of any number; a larger one is a typing error."""
MIN_RUN_S = 60
"""Seconds that a job runs at least before it saves and ends."""
_OWN_OPTION = re.compile(r"^#SBATCH --([a-z-]+)", re.MULTILINE)
_OPTION = re.compile(r"--[a-z][a-z-]*(=[^\s\"'\\#]+)?")


@dataclass(frozen=True)
class Site:
    """The values that differ between clusters; each docstring is the help text of its flag."""

    directory: str = "."
    """Directory to write the templates to, given without a flag."""
    partition: str = ""
    """Partition to submit to; empty: the cluster's default."""
    rollout_partition: str = ""
    """Partition of the generating part of a heterogeneous job, and of extra workers; empty: the same."""
    account: str = ""
    """Account to charge; empty: the user's default."""
    qos: str = ""
    """Quality of service; empty: the account's default."""
    constraint: str = ""
    """Features that nodes must have, as in --constraint ("a100&ib"); empty: any node."""
    rollout_constraint: str = ""
    """The same for the generating part of a heterogeneous job, and for extra workers; empty: the same features."""
    reservation: str = ""
    """Reservation to run in; empty: none."""
    exclude: str = ""
    """Nodes not to use, as in --exclude (n1,n[7-9]); empty: none."""
    nodes: int = 2
    """Nodes of a multi-node job, including the training nodes."""
    train_nodes: int = 1
    """Training nodes among them."""
    gpus: str = ""
    """GPUs of a node, as in --gpus-per-node (8, or a100:8); empty: none are requested."""
    rollout_gpus: str = ""
    """GPUs of a generating node of a heterogeneous job; empty: the same number."""
    gres: bool = False
    """Request GPUs with --gres=gpu:8 in place of --gpus-per-node=8, for clusters that know only that."""
    npus: str = ""
    """Ascend NPUs of a node in place of GPUs, as in --gres (npu:8); empty: none are requested."""
    cann: str = "/usr/local/Ascend/ascend-toolkit"
    """Installation directory of CANN (only with --npus)."""
    cpus: int = 4
    """CPU cores of each worker; a worker with several devices has as many times more."""
    mem: str = ""
    """Memory of a node, as in --mem (500G; 0: all of it), which its workers share; empty: the cluster's default."""
    extra_mem: str = ""
    """Memory of an extra rollout worker; empty: the cluster's default."""
    time: str = "24:00:00"
    """Time limit of a job; empty: that of the partition."""
    save_s: int = 180
    """Seconds before the time limit at which a job saves a checkpoint and ends."""
    requeue: bool = True
    """Requeue a job at its time limit and after preemption; it then resumes from its checkpoint."""
    sbatch: tuple[str, ...] = ()
    """Further options of all jobs, as --sbatch=--mail-type=FAIL or --sbatch=--mem-per-gpu=60G."""
    modules: str = ""
    """Environment modules to load, separated by spaces; empty: none."""
    container: str = ""
    """Image that the workers run in, whose python3 has flowrt: a .sif file, or what pyxis imports; empty: none."""
    container_runtime: Literal["pyxis", "apptainer"] = "pyxis"
    """What starts containers: pyxis (srun --container-image), or apptainer."""
    container_mounts: str = ""
    """Directories to mount in the container, as SOURCE:TARGET, separated by commas; that of --runs always is."""
    extra: int = 2
    """Number of rollout workers in the array of extra ones."""
    runs: str = "flowrt-jobs"
    """Directory in which each job creates its own, on a file system that all nodes mount."""
    recipe: str = "arithmetic"
    """Recipe of the run; a task of your own is the path of its file."""
    flags: str = ""
    """Flags of flowrt run of all jobs. Those of the rollout engine also set the devices of a worker:
    --flags="--rollout.engine sglang --rollout.sglang.arguments='--tp 4'"."""


@dataclass(frozen=True)
class Devices:
    """The accelerators of a node, and how they are requested."""

    option: str
    """What precedes their number: ``--gpus-per-node=``, ``--gres=gpu:`` or ``--gres=``; empty without accelerators."""
    kind: str
    count: int

    def request(self, count: int | None = None) -> str:
        """The option that requests ``count`` of them, by default all; empty without accelerators."""
        return f"{self.option}{self.kind}{self.count if count is None else count}" if self.option else ""


def placeholders(site: Site) -> dict[str, str]:
    """The value of each placeholder. Raises ConfigError for values that are not allowed in a script."""
    refuse(_site_mistakes(site), _text_mistakes(site), _flag_mistakes(site))
    training, generating = devices(site, site.gpus), devices(site, site.rollout_gpus or site.gpus)
    each = worker_devices(site)  # also without devices, for it refuses what flowrt run refuses
    each = each if training.option else 1
    for of_node in (training, generating):
        if of_node.count < each:
            raise ConfigError(f"a rollout worker of --flags needs {each} devices, and a node has {of_node.count}")
    rollout_nodes = site.nodes - site.train_nodes
    train_cpus, rollout_cpus = site.cpus * training.count, site.cpus * each
    # Memory 0: the step shares the memory of the job with others.
    trainer_step = (
        f"--exact --mem=0 --nodes={site.train_nodes} --ntasks={site.train_nodes} --cpus-per-task={train_cpus}"
    )
    rollout_step = f"--exact --mem=0 --nodes=1 --ntasks=1 --cpus-per-task={rollout_cpus}"
    values = {
        "PARTITION": site.partition,
        "ROLLOUT_PARTITION": site.rollout_partition or site.partition,
        "ACCOUNT": site.account,
        "OPTIONS": _options(site, site.constraint, site.mem),
        "ROLLOUT_OPTIONS": _options(site, site.rollout_constraint or site.constraint, site.mem),
        "EXTRA_OPTIONS": _options(site, site.rollout_constraint or site.constraint, site.extra_mem),
        "DEVICES": training.request(),
        "ROLLOUT_DEVICES": generating.request(),
        "WORKER_DEVICES": generating.request(each),
        "TIME": site.time,
        "SAVE_S": site.save_s,
        "REQUEUE": "requeue" if site.requeue else "no-requeue",
        "NODES": site.nodes,
        "TRAIN_NODES": site.train_nodes,
        "ROLLOUT_NODES": rollout_nodes,
        "WORKER_CPUS": rollout_cpus,
        "NODE_CPUS": train_cpus,
        "LAST_EXTRA": site.extra - 1,
        "RANKS": site.train_nodes * training.count,
        "MANY_WORKERS": rollout_nodes * (training.count // each),
        "HET_WORKERS": rollout_nodes * (generating.count // each),
        "TRAINER_STEP": f"{trainer_step} {training.request()}".rstrip(),
        "MANY_STEP": f"{rollout_step} {training.request(each)}".rstrip(),
        "HET_STEP": f"{rollout_step} {generating.request(each)}".rstrip(),
        "RUN_FLAGS": "".join(f" {shlex.quote(word)}" for word in (*_device_flags(site), *shlex.split(site.flags))),
        "RECIPE": site.recipe,
        "MODULES": _load(site.modules),
        "CONTAINER": shlex.quote(shlex.join((*container(site), *CONTAINER_PYTHON)) if site.container else ""),
        "IN_CONTAINER": _in_container(site, train_cpus),
        "CANN": shlex.quote(str(Path(site.cann))),
        "BIN": shlex.quote(str(Path(sys.executable).parent)),
        "RUNS": shlex.quote(str(Path(site.runs).absolute())),
    }
    return {name: str(value) for name, value in values.items()}


def devices(site: Site, gpus: str) -> Devices:
    """The accelerators of a node with these ``gpus``, or with the site's NPUs.

    Raises ConfigError if the text does not end with a positive number.
    """
    flag, text = ("--npus", site.npus) if site.npus else ("--gpus", gpus)
    if not text:
        return Devices("", "", 1)
    kind, colon, last = text.rpartition(":")
    if not last.isdecimal() or not int(last) or bool(kind) != bool(colon):
        example = "npu:8" if site.npus else "8, or a100:8"
        raise ConfigError(f"{flag} {text!r} does not end with a number of devices; write {example}")
    option = "--gres=" if site.npus else "--gres=gpu:" if site.gres else "--gpus-per-node="
    return Devices(option, f"{kind}{colon}", int(last))


def worker_devices(site: Site) -> int:
    """The devices of a rollout worker of the site's recipe with its flags.

    Raises ConfigError for a recipe or flags that flowrt run refuses, such as a task file that does not exist.
    """
    rollout = parse([site.recipe, *shlex.split(site.flags)]).rollout
    return ROLLOUT_ENGINES[rollout.engine].devices(rollout)


def container(site: Site) -> list[str]:
    """The words that precede a command in the site's container, after those of srun; none without a container."""
    if not site.container:
        return []
    runs = Path(site.runs).absolute()
    if not _PATH.fullmatch(str(runs)):  # a comma or colon would end it
        raise ConfigError(f"--runs {str(runs)!r} cannot be mounted; use a path of letters, digits and _.=+@#-")
    mounts = ",".join([f"{runs}:{runs}", *filter(None, [site.container_mounts])])
    if site.container_runtime == "pyxis":
        return [f"--container-image={site.container}", f"--container-mounts={mounts}"]
    gpus = ["--nv"] if site.gpus else []
    return ["apptainer", "exec", *gpus, "--bind", mounts, site.container]


def _in_container(site: Site, cpus: int) -> str:
    """What precedes a command that runs in the container on the job's first node; empty without a container."""
    words = container(site)
    if words and site.container_runtime == "pyxis":
        words = ["srun", "--exact", "--mem=0", "--nodes=1", "--ntasks=1", f"--cpus-per-task={cpus}", *words]
    return "".join(f"{shlex.quote(word)} " for word in words)


def _site_mistakes(site: Site) -> Iterator[str]:
    """Values that are out of range, missing, or contradict each other. Raises ConfigError for a wrong ``time``."""
    if not 0 < site.train_nodes < site.nodes:
        yield (
            f"--train-nodes is {site.train_nodes} of --nodes {site.nodes}: at least one node trains and one generates; "
            "on one node use one_node.sbatch"
        )
    for name in ("cpus", "extra", "save_s", "nodes"):
        if not 1 <= getattr(site, name) <= MAX_NUMBER:
            yield f"{_flag(name)} is {getattr(site, name)}; use 1 to {MAX_NUMBER}"
    for name in ("recipe", "runs", "cann"):
        if not getattr(site, name):
            yield f"{_flag(name)} is empty; give a value, or leave it out for the default"
    if site.gpus and site.npus:
        yield "--gpus and --npus are given, and a node has one kind of accelerator; leave one out"
    for name, other in (
        ("rollout_gpus", "gpus"),
        ("gres", "gpus"),
        ("container_mounts", "container"),
        ("container_runtime", "container"),
    ):
        if getattr(site, name) != getattr(Site, name) and not getattr(site, other):
            yield f"{_flag(name)} is given without {_flag(other)}; give both"
    limit_s = _seconds(site.time)
    if limit_s is not None and limit_s < site.save_s + MIN_RUN_S:  # requeued, it would do so for ever
        yield (
            f"--save-s {site.save_s} is not {MIN_RUN_S} s below --time {site.time}: a job would save and end as soon "
            "as it starts; use less, or a longer time"
        )


def _seconds(time: str) -> int | None:
    """The seconds of a time limit of SLURM; None without a limit. Raises ConfigError for another text."""
    if time.upper() in NO_LIMIT:
        return None
    match = _TIME.fullmatch(time)
    if match is None:
        raise ConfigError(f"--time {time!r} is no time limit of SLURM; write HOURS:MINUTES:SECONDS, as 24:00:00")
    days, *rest = (int(value) if value else 0 for value in match.group("days", "first", "second", "third"))
    # "a" and "a:b" are minutes and seconds, but with days hours and minutes.
    hours, minutes, seconds = rest if match["days"] or match["third"] else (0, *rest[:2])
    return ((24 * days + hours) * 60 + minutes) * 60 + seconds


def _own_options() -> set[str]:
    """The options that templates set themselves, after those of --sbatch, or from other flags."""
    texts = [path.read_text() for path in HERE.glob("*.sbatch")]
    own = {name for text in texts for name in _OWN_OPTION.findall(text)} - {"job-name"}
    return own | {*SHARED_OPTIONS, "requeue", "no-requeue", "gpus-per-node"}


def _text_mistakes(site: Site) -> Iterator[str]:
    """Texts that could add a line or a command to a script."""
    words = ("partition", "rollout_partition", "account", "qos", "reservation", "gpus", "rollout_gpus", "npus", "time")
    checks = dict.fromkeys(words, (_WORD, "letters, digits and .,:=+-_")) | {
        "recipe": (_RECIPE, "letters, digits and .,:=+-_/"),
        "exclude": (_NODES, "node names and ranges, as n1,n[7-9]"),
        "constraint": (_FEATURES, "features and &|*()[]"),
        "rollout_constraint": (_FEATURES, "features and &|*()[]"),
        "mem": (_MEMORY, "a number and K, M, G or T, as 500G"),
        "extra_mem": (_MEMORY, "a number and K, M, G or T, as 60G"),
        "modules": (_MODULES, "names of modules, separated by single spaces"),
        "container": (_IMAGE, "letters, digits and .,:=+-_/@#"),
        "container_mounts": (_IMAGE, "SOURCE:TARGET, separated by commas"),
    }
    for name, (pattern, allowed) in checks.items():
        value = getattr(site, name)
        if not pattern.fullmatch(value):
            yield f"{_flag(name)} {value!r} is not allowed in a script; use {allowed}"
    for option in site.sbatch:
        if not _OPTION.fullmatch(option):
            yield f"--sbatch {option!r} is not an option of sbatch on one line; write --sbatch=--NAME=VALUE"
            continue
        name = option.partition("=")[0].removeprefix("--")
        if own := sorted(own for own in _own_options() if own.startswith(name)):  # sbatch accepts abbreviations
            yield f"--sbatch {option!r} contradicts a line that the templates have; {_instead(own[0])}"
        if name.startswith("mem-per-") and (site.mem or site.extra_mem):
            yield f"--sbatch {option!r} contradicts --mem and --extra-mem; give one of them"
    for name in ("runs", "cann", "flags"):
        if not getattr(site, name).isprintable():
            yield f"{_flag(name)} {getattr(site, name)!r} has a line end or a control character"


def _flag_mistakes(site: Site) -> Iterator[str]:
    """Flags that cannot be read, or that words of the templates would override."""
    try:
        words = shlex.split(site.flags)
    except ValueError as error:
        yield f"--flags {site.flags!r:.80} are no command line: {error}"
        return
    for word in words:
        name = word.partition("=")[0].removeprefix("--").replace("_", "-")
        if word == "--" or (
            word.startswith("--") and name in OF_TEMPLATES and (name != "device" or _device_flags(site))
        ):
            instead = OF_TEMPLATES.get(name, "leave it out")
            yield f"--flags has {word}, after which the templates set flags of their own; {instead}"


def _instead(option: str) -> str:
    """What to do in place of an option of sbatch that the templates set themselves."""
    flags = {"signal": "--save-s", "no-requeue": "--requeue", "array": "--extra", "gpus-per-node": "--gpus"}
    flags |= {"cpus-per-task": "--cpus"} | {name: f"--{name}" for name in (*SHARED_OPTIONS, *SITE_OPTIONS)}
    return f"use {flags[option]}" if option in flags else "edit them once they are written"


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _options(site: Site, constraint: str, mem: str) -> str:
    """The options of #SBATCH lines that apply to all jobs, each after the first with the start of its line."""
    given = dict(zip(SHARED_OPTIONS, (site.qos, constraint, site.reservation, site.exclude, mem), strict=True))
    return "\n#SBATCH ".join([*(f"--{name}={value}" for name, value in given.items() if value), *site.sbatch])


def _device_flags(site: Site) -> Iterable[str]:
    return ("--device", "npu") if site.npus else ("--device", "cuda") if site.gpus else ()


def _load(modules: str) -> str:
    """The lines that load environment modules, whose scripts read variables that may not be set."""
    if not modules:
        return ""
    return f"set +u\ncommand -v module >/dev/null || source /etc/profile\nmodule load {modules}\nset -u"


def fill(text: str, values: Mapping[str, str]) -> str:
    """Replace every placeholder.

    A line of nothing else, and an #SBATCH line with an empty value, is removed, so that SLURM's default applies.
    Raises ConfigError for a placeholder without a value.
    """
    unknown = sorted({name for name in _PLACEHOLDER.findall(text) if name not in values})
    if unknown:
        raise ConfigError(f"a template has the unknown placeholder {unknown[0]}; known are {sorted(values)}")
    lines = []
    for line in text.splitlines():
        names = _PLACEHOLDER.findall(line)
        optional = line.startswith("#SBATCH") or _PLACEHOLDER.fullmatch(line)
        if optional and names and not all(values[name] for name in names):
            continue
        lines.append(_PLACEHOLDER.sub(lambda match: values[match[1]], line))
    return "\n".join(lines) + "\n"


def filled(site: Site) -> dict[str, str]:
    """The text of each template with the values of the site, by file name. Raises ConfigError as `placeholders`."""
    values = placeholders(site)
    values["ENVIRONMENT"] = fill((HERE / CANN).read_text(), values).rstrip("\n") if site.npus else ""
    texts = {}
    for path in sorted(HERE.glob("*.sbatch")):
        own = values if path.name in WHOLE_IN_CONTAINER else {**values, "IN_CONTAINER": ""}
        own = {**own, "JOB": fill((HERE / JOB).read_text(), own).rstrip("\n")}
        texts[path.name] = fill(path.read_text(), own)
    return texts


def write(arguments: Sequence[str]) -> list[Path]:
    """Write the templates; returns their paths.

    ``arguments``: the flags of `Site`. Raises ConfigError for unknown flags, for bad values or if one of the files
    exists, with nothing written, and if writing fails. Exits with code 0 after printing --help.
    """
    if (topic := topic_of(arguments)) is not None:
        about = "Write SLURM templates with this site's values to DIR, by default the current directory."
        help_text = HelpText("[DIR]", about, common=COMMON, is_listed=lambda name: name != "directory")
        print_help(COMMAND, Site(), topic, help_text)
    site = parse_flags(Site(), arguments, COMMAND, positional="directory")
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
