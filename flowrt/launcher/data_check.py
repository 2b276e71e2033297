"""``flowrt data check``: check data sets as a run would read them, without a process or a model in memory.

The command reads the rows, and the tokenizer and configuration of the model; with ``--deep`` also its weights.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from flowrt.engines.model_config import parse_overrides
from flowrt.errors import EXIT_BAD_INPUT, EXIT_OK, ConfigError, EngineError
from flowrt.launcher.absolute_paths import with_absolute_paths
from flowrt.launcher.run_checks import check_files, check_start, has_weights
from flowrt.launcher.terminal import printable
from flowrt.recipes.config import RunConfig
from flowrt.recipes.config_io import read, take
from flowrt.recipes.constraints import check
from flowrt.recipes.data.difficulty import Selection
from flowrt.recipes.eval_names import chat_templates
from flowrt.recipes.flag_help import HelpText
from flowrt.recipes.model_files import (
    base_model_dir,
    tokenizer_dir,
    weight_files,
)
from flowrt.recipes.prompt_limits import PromptLimits, prompt_limits
from flowrt.recipes.tasks.base import Example, PromptBlock
from flowrt.recipes.tasks.problems import Concatenated, ProblemSet, check_rows, folded, open_sets
from flowrt.recipes.tasks.registry import takes_reward
from flowrt.recipes.tasks.rows import data_path

ABOUT = (
    "Checks the data sets of flowrt run custom against its model, without a process or a model in memory. Takes every "
    "flag of that command, of which those listed here have an effect, and --show N: print the first N prompts. With "
    "--deep it loads the model and compares its rollout with its training, as a run does before its first step."
)
COMMON = (
    "model",
    "data.path",
    "data.split",
    "data.prompt_key",
    "data.answer_key",
    "data.chat_template",
    "data.system_prompt",
    "data.max_prompt_tokens",
    "data.overlong",
    "data.eval_prompts",
)
"""The keys that --help shows."""
DEEP = "--deep"
QUANTILES = (0.5, 0.9, 0.99)
MAX_COMPARED = 100
"""Prompts of each data set among which --deep looks for short and long ones."""
MAX_SHOWN_TOKENS = 64
"""Token ids of a prompt that are printed."""
MAX_SHOWN_TEXT = 2_000
"""Characters of a prompt that are printed."""


@dataclass(slots=True)
class PromptCount:
    """How many prompts were found, and the place of the first."""

    count: int = 0
    first: str = ""

    def add(self, block: PromptBlock, place: int) -> None:
        """Count a prompt."""
        self.count += 1
        self.first = self.first or block.where(place)


@dataclass(slots=True)
class Prompts:
    """Statistics of the prompts of all data sets."""

    lengths: list[int] = field(default_factory=list)
    """Length of each prompt in tokens, ascending."""
    longest: str = ""
    """File and line of the longest prompt."""
    overlong: PromptCount = field(default_factory=PromptCount)
    """Prompts above the limit."""
    empty: PromptCount = field(default_factory=PromptCount)
    """Prompts without a token."""
    outside: PromptCount = field(default_factory=PromptCount)
    """Prompts with a token id that the model does not have."""
    controls: PromptCount = field(default_factory=PromptCount)
    """Prompts whose own text has a control token."""
    control: str = ""
    """The control token of the first one."""
    double_starts: int = 0
    """Prompts with two start tokens."""
    duplicates: PromptCount = field(default_factory=PromptCount)
    """Training rows with the prompt of an earlier training row."""
    shared: PromptCount = field(default_factory=PromptCount)
    """Training rows with a held-out prompt."""


def read_arguments(words: Sequence[str]) -> tuple[RunConfig, int, bool]:
    """The configuration of the run that is checked, from the flags of ``flowrt run custom``, the value of --show, and
    whether --deep is given.

    Raises ConfigError for unknown flags and invalid values. Exits with code 0 after printing --help.
    """
    is_deep = DEEP in words
    show, rest = take("--show", [word for word in words if word != DEEP])
    if show and not (show.isascii() and show.isdecimal()):
        raise ConfigError(f"--show {show!r:.40} is not a whole number")
    text = HelpText(about=ABOUT, common=COMMON, is_listed=_is_listed)
    config = read(rest, "flowrt data check", default="custom", help_text=text, more=("--show", DEEP))
    if not takes_reward(config.recipe):
        raise ConfigError(f"flowrt data check reads data as recipe custom does, not as {config.recipe}")
    if not config.model:
        raise ConfigError("flowrt data check needs --model DIRECTORY, with a tokenizer and config.json")
    if not config.data.sets:
        data_path(config)
    return config, int(show or "0"), is_deep


def _is_listed(name: str) -> bool:
    return name in ("model", "rollout.max_new_tokens") or (name.startswith("data.") and "reward" not in name)


def check_data(config: RunConfig, show: int, is_deep: bool, console: Console) -> int:
    """Print the data sets' rows, lengths, stop tokens and duplicates, and their first prompts.

    Args:
        config: of the run; its model directory needs only a tokenizer and config.json.
        show: number of prompts to print.
        is_deep: whether rollout and trainer are compared on a few prompts; the directory then needs weights.
        console: receives the report.

    Returns:
        The exit code: `EXIT_BAD_INPUT` if rollout and trainer disagree.

    Raises ConfigError for what a run would refuse, mostly after the report.
    """
    check(config, has_weights=has_weights(Path(config.model)))
    with_absolute_paths(config)  # refuses guards.command without a program
    sets = open_sets(replace(config.data, eval_prompts=0) if config.eval.data else config.data)
    try:
        prompts = _report(config, sets, show, console)
    except ConfigError:
        check_rows(sets, replace(config.data, allow_overlap=True))  # all mistakes together
        raise
    except EngineError as error:
        raise ConfigError(str(error)) from error
    checked = check_files(config, lambda note: console.print(printable(note), soft_wrap=True))
    check_start(checked, are_fit=not (prompts.overlong.count or prompts.empty.count or prompts.outside.count))
    try:
        return _compare(config, sets, console) if is_deep else EXIT_OK
    except EngineError as error:
        raise ConfigError(str(error)) from error


def _reason(limits: PromptLimits) -> str:
    """What the maximum length of a prompt follows from; empty for ``data.max_prompt_tokens``."""
    if limits.most == limits.max_prompt_tokens:
        return ""
    return f" ({limits.positions:,} positions of the model, {limits.max_new_tokens:,} for {limits.max_new_tokens_key})"


def _report(config: RunConfig, sets: Sequence[ProblemSet], show: int, console: Console) -> Prompts:
    from flowrt.engines.prompts import PromptEncoders, template_text
    from flowrt.launcher.prompt_check import check_end_token

    model = base_model_dir(Path(config.model))
    tokenizer, model_config = _model(model, tokenizer_dir(Path(config.model)))
    notes = _check_model(config, model)
    encoders = PromptEncoders(tokenizer, config.data.prompt_format)
    limits = prompt_limits(config, model_config)
    check_end_token(tokenizer, limits.vocab_size, f"model {config.model}")
    prompts = _read(encoders, tokenizer.bos_token_id, limits, sets)

    def line(name: str, text: str) -> None:
        console.print(f"{name:<14}{text}", soft_wrap=True)

    for note in notes:
        line("weights", note)
    for data_set, of_share in zip(sets, _shares(sets), strict=True):
        training, held_out = len(data_set.training), len(data_set.held_out)
        counts = f"{len(data_set.rows):,}: {training:,} to train on, {held_out:,} held out{of_share}"
        left_out = (
            f"; {data_set.rows.left_out:,} by their difficulty left out" if isinstance(data_set.rows, Selection) else ""
        )
        line(f"rows {data_set.name}".strip(), counts + left_out)
    has_template = bool(template_text(tokenizer, config.data.chat_template))
    line("template", (config.data.chat_template or "of the checkpoint") if has_template else "none: text as it is")
    quantiles = ", ".join(f"{share:.0%} {_quantile(prompts.lengths, share):,}" for share in QUANTILES)
    line("tokens", f"shortest {prompts.lengths[0]:,}, {quantiles}, longest {prompts.lengths[-1]:,} ({prompts.longest})")
    if prompts.overlong.count:
        outcome = "left out (data.overlong drop)" if limits.overlong == "drop" else "refused by a run"
        line(
            "too long",
            f"{prompts.overlong.count:,} prompts over {limits.most:,} tokens{_reason(limits)}, {outcome}; first: "
            f"{prompts.overlong.first}",
        )
    if prompts.empty.count:
        line(
            "empty", f"{prompts.empty.count:,} prompts without a token, refused by a run; first: {prompts.empty.first}"
        )
    if prompts.outside.count:
        line(
            "vocabulary",
            f"{prompts.outside.count:,} prompts with token ids above the vocab_size of {limits.vocab_size:,}, refused "
            f"by a run; first: {prompts.outside.first}",
        )
    if prompts.double_starts:
        line("start token", f"twice in {prompts.double_starts:,} prompts: the template or the text has one of its own")
    if prompts.controls.count:
        line(
            "controls",
            f"{prompts.controls.count:,} prompts have the text of a control token, which becomes that token; first: "
            f"{prompts.control!r} in {prompts.controls.first}",
        )
    line("stop tokens", _stop_tokens(model, tokenizer, chat_templates(config)))
    if prompts.duplicates.count:
        line(
            "duplicates",
            f"{prompts.duplicates.count:,} training rows repeat a prompt; first: {prompts.duplicates.first}",
        )
    if prompts.shared.count:
        outcome = "allowed (data.allow_overlap)" if config.data.allow_overlap else "refused by a run"
        line(
            "held out",
            f"{prompts.shared.count:,} training rows have a held-out prompt, {outcome}; first: {prompts.shared.first}",
        )
    for problem in Concatenated([set_.training for set_ in sets])[:show]:
        _show(problem, encoders, tokenizer, console)
    return prompts


def _check_model(config: RunConfig, model: Path) -> list[str]:
    """What a run would say of a model before it starts. Raises ConfigError for one that a run would refuse."""
    from flowrt.launcher.model_check import check_overrides, check_weights

    notes: list[str] = []
    if overrides := parse_overrides(config.model_overrides):
        check_overrides(config.model, model, overrides)
    elif weight_files(model):
        check_weights(model, notes.append)
    return notes


def _compare(config: RunConfig, sets: Sequence[ProblemSet], console: Console) -> int:
    """Print how far rollout and trainer disagree on the first prompts of each data set; returns the exit code."""
    from flowrt.engines.prompts import PromptEncoders
    from flowrt.launcher.deep_check import compare

    tokenizer, model_config = _model(base_model_dir(Path(config.model)), tokenizer_dir(Path(config.model)))
    encoders = PromptEncoders(tokenizer, config.data.prompt_format)
    most = prompt_limits(config, model_config).most
    first = [set_.training[place] for set_ in sets for place in range(min(MAX_COMPARED, len(set_.training)))]
    encoded = [encoders.of(problem.form)(*problem.as_prompt) for problem in first]
    mismatch = compare(config, [ids for ids in encoded if len(ids) <= most])
    console.print(f"{'policies':<14}{mismatch}", soft_wrap=True)
    return EXIT_BAD_INPUT if mismatch.is_refused else EXIT_OK


def _model(path: Path, with_tokenizer: Path) -> tuple[Any, Any]:
    """The tokenizer and the configuration of a checkpoint. Raises ConfigError if it has none.

    ``with_tokenizer`` has the tokenizer: another directory for an adapter that has one of its own.
    """
    import transformers

    from flowrt.engines.hf import load_config, load_tokenizer

    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    if not (path / "config.json").is_file():
        raise ConfigError(f"model {path} has no config.json; is it a Hugging Face checkpoint?")
    config = load_config(path).get_text_config()
    return load_tokenizer(with_tokenizer), config


def _shares(sets: Sequence[ProblemSet]) -> list[str]:
    """The share of each data set as text; empty for a single data set."""
    total = sum(set_.weight for set_ in sets)
    return [f", {set_.weight / total:.3g} of the prompts" for set_ in sets] if len(sets) > 1 else [""]


def _read(encoders: Any, start: int | None, limits: PromptLimits, sets: Sequence[ProblemSet]) -> Prompts:
    """Tokenize all prompts, and find those that occur twice. ``start``: id of the start token."""
    prompts = Prompts()
    evaluated = {folded(*problem.as_prompt) for part in sets for problem in part.held_out}
    trained: set[int] = set()
    """Hashes of prompts; the prompts themselves would take as much memory as the data set."""
    longest = -1
    for set_ in sets:
        index = 0
        for block in set_.prompt_blocks():
            encoder = encoders.of(block.form)
            for place, ids in enumerate(_encoded(encoder, block)):
                prompts.lengths.append(len(ids))
                if len(ids) > longest:
                    longest, prompts.longest = len(ids), block.where(place)
                if not ids:
                    prompts.empty.add(block, place)
                elif len(ids) > limits.most:
                    prompts.overlong.add(block, place)
                elif max(ids) >= limits.vocab_size:
                    prompts.outside.add(block, place)
                prompts.double_starts += start is not None and ids[:2] == [start, start]
                if control := encoder.control_token(block.prompts[place]):
                    prompts.control = prompts.control or control
                    prompts.controls.add(block, place)
                index += 1
                if index > set_.first_held_out:
                    continue
                own = folded(*block.prompts[place])
                if own in evaluated:
                    prompts.shared.add(block, place)
                if (hashed := hash(own)) in trained:
                    prompts.duplicates.add(block, place)
                trained.add(hashed)
    prompts.lengths.sort()
    return prompts


def _encoded(encoder: Any, block: PromptBlock) -> list[list[int]]:
    """The token ids of prompts. Raises ConfigError with the place of a prompt that cannot be encoded."""
    try:
        ids: list[list[int]] = encoder.encode_all(block.prompts)
    except ConfigError:
        for place, prompt in enumerate(block.prompts):
            try:
                encoder(*prompt)
            except ConfigError as error:
                raise ConfigError(f"{block.where(place)}: {error}") from None
        raise
    return ids


def _quantile(ascending: Sequence[int], share: float) -> int:
    return ascending[round(share * (len(ascending) - 1))]


def _stop_tokens(model: Path, tokenizer: Any, templates: Sequence[str]) -> str:
    """The stop tokens by id and text, with a note if one of them comes from the chat template alone."""
    from flowrt.engines.prompts import end_of_turn_ids, template_text
    from flowrt.engines.stopping import stop_token_ids

    ids = stop_token_ids(model, tokenizer, templates)
    of_checkpoint = stop_token_ids(model, tokenizer, "none")
    names = ", ".join(f"{id_} {tokenizer.convert_ids_to_tokens(id_)!r}" for id_ in ids)
    own = [
        token_id
        for template in templates
        for token_id in end_of_turn_ids(tokenizer, template_text(tokenizer, template))
        if token_id not in of_checkpoint
    ]
    note = f"; {own[0]} is the template's end of turn alone, generation_config.json does not name it" if own else ""
    return names + note


def _show(problem: Example, encoders: Any, tokenizer: Any, console: Console) -> None:
    """Print a prompt as token ids and as text."""
    ids = encoders.of(problem.form)(*problem.as_prompt)
    text = str(tokenizer.decode(ids, skip_special_tokens=False))
    more = f" … ({len(ids):,} in all)" if len(ids) > MAX_SHOWN_TOKENS else ""
    cut = f"… ({len(text):,} characters)" if len(text) > MAX_SHOWN_TEXT else ""
    console.print(f"\n{problem.where}", soft_wrap=True)
    console.print(f"ids  {' '.join(map(str, ids[:MAX_SHOWN_TOKENS]))}{more}", soft_wrap=True)
    console.print(f"text {text[:MAX_SHOWN_TEXT]!r}{cut}", soft_wrap=True)
