"""A dataflow that can never run is refused on construction; settings that name an unknown role, at the start."""

import asyncio
from dataclasses import replace

import pytest

from examples import custom_loop as loop
from flowrt import api
from flowrt.errors import ConfigError
from flowrt.recipes import grpo
from flowrt.recipes.config_io import parse

COLUMNS = loop.COLUMNS
ROLES = {"source": loop.source, "player": loop.player, "judge": loop.judge, "learner": loop.learner}


def flow(
    play: api.Stage = loop.PLAY, judge: api.Stage = loop.JUDGE, learn: api.Stage = loop.LEARN, **options: object
) -> api.Dataflow:
    """The example's dataflow with other stages or fields."""
    return replace(loop.FLOW, stages=(play, judge, learn), **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"learn": replace(loop.LEARN, needs=("choice", "rewards"))},
            "stage 'learn' needs column 'rewards', which no stage of flow 'train' makes and no offer brings; "
            "did you mean 'reward'?",
        ),
        (
            {"judge": replace(loop.JUDGE, makes=("zebra",))},
            "needs column 'reward', .*; there is 'choice', 'question', 'zebra'",
        ),
        (
            {"judge": replace(loop.JUDGE, flow="eval")},
            "stage 'learn' needs column 'reward', which no stage of flow 'train' makes",
        ),
        (
            {"judge": replace(loop.JUDGE, makes=("reward", "choice"))},
            "stages 'play' and 'judge' of flow 'train' both make column 'choice'",
        ),
        (
            {"judge": replace(loop.JUDGE, makes=("reward", "question"))},
            "stage 'judge' makes column 'question', which comes with the offer: it is a group column",
        ),
        (
            {"judge": replace(loop.JUDGE, makes=("reward", "label")), "tags": ("label",)},
            "stage 'judge' makes column 'label', which comes with the offer: it is a tag",
        ),
        (
            {"play": replace(loop.PLAY, needs=("question", "reward"))},
            r"stages of flow 'train' wait for each other's columns: 'play' needs \['reward'\], 'judge' needs "
            r"\['choice'\].*remove the cycle",
        ),
        ({"learn": replace(loop.LEARN, flow="trian")}, "train_flow is 'train', but .* 'learn' has flow 'trian'"),
        ({"learn": replace(loop.LEARN, flow="")}, "train_flow is 'train', but .* 'learn' has flow ''"),
        ({"token_columns": ("chioce",)}, "token_columns names 'chioce', .*; did you mean 'choice'?"),
        ({"columns": (*COLUMNS, COLUMNS[0])}, r"columns and tags \['question'\] are declared twice"),
        ({"tags": ("choice",)}, r"columns and tags \['choice'\] are declared twice"),
    ],
)
def test_a_dataflow_that_can_never_run_is_refused_on_construction(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        flow(**changes)  # type: ignore[arg-type]


BAND = api.Stage("band", needs=("reward",), makes=("kept",), flow="train", whole_groups=True)
LEARN_KEPT = replace(loop.LEARN, needs=("choice", "reward", "kept"))


def test_a_stage_before_the_train_stage_may_take_whole_groups() -> None:
    replace(loop.FLOW, stages=(loop.PLAY, loop.JUDGE, BAND, LEARN_KEPT))


@pytest.mark.parametrize(
    ("band", "message"),
    [
        (
            replace(BAND, flow="eval"),
            "stage 'band' has whole_groups=True and flow 'eval'; only stages of the flow that",
        ),
        (replace(BAND, makes=("kept", "choice")), "makes inline columns that no stage which generates needs"),
        (replace(BAND, generates=True), "and generates nothing"),
        (replace(BAND, makes=()), "makes inline columns"),
    ],
)
def test_other_stages_that_take_whole_groups_are_refused(band: api.Stage, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(loop.FLOW, stages=(loop.PLAY, loop.JUDGE, band, LEARN_KEPT))


def test_stages_that_do_not_generate_may_read_columns_of_a_whole_group_stage() -> None:
    log = api.Stage("log", needs=("kept",), makes=(), flow="train")
    replace(loop.FLOW, stages=(loop.PLAY, loop.JUDGE, BAND, log, LEARN_KEPT))
    replace(loop.FLOW, stages=(loop.PLAY, loop.JUDGE, replace(BAND, flow=""), replace(log, flow=""), LEARN_KEPT))
    with pytest.raises(ConfigError, match="the train stage takes whole groups"):
        replace(loop.FLOW, stages=(loop.PLAY, loop.JUDGE, replace(loop.LEARN, whole_groups=False)))


def test_one_stage_of_each_flow_may_produce_the_same_column() -> None:
    judge = replace(loop.JUDGE, flow="train")
    other = api.Stage("judge_eval", needs=("choice",), makes=("reward",), flow="eval")
    log = api.Stage("log", needs=("reward",), makes=())
    replace(loop.FLOW, stages=(loop.PLAY, judge, other, log, loop.LEARN))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"completing_roles": ("lerner",)}, "Settings.completing_roles names 'lerner', .*; did you mean 'learner'?"),
        ({"critical_roles": ("trainer",)}, "Settings.critical_roles names 'trainer'"),
        (
            {"replaceable_roles": ("zebra",)},
            "Settings.replaceable_roles names 'zebra', .*; there is 'judge', 'learner',",
        ),
        ({"checkpointing_roles": ("lerner",)}, "Settings.checkpointing_roles names 'lerner'"),
    ],
)
def test_settings_that_name_an_unknown_role_are_refused(changes: dict[str, object], message: str) -> None:
    settings = replace(loop.SETTINGS, **changes)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=message):
        asyncio.run(api.run_roles(loop.FLOW, settings, loop.POLICIES, ROLES))


@pytest.mark.parametrize("kl_coef", ["0", "0.001"])
def test_the_reference_role_is_replaceable_only_if_the_recipe_has_it(kl_coef: str) -> None:
    config = parse(["--algorithm.kl.coef", kl_coef])
    replaceable = grpo.settings(config).replaceable_roles
    assert ("reference" in replaceable) == any(stage.name == "reference" for stage in grpo.dataflow(config).stages)
