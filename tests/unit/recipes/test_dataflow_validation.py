"""A dataflow that can never run, and settings that name a missing role, are refused when they are made."""

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
    play: api.Stage = loop.PLAY, judge: api.Stage = loop.JUDGE, learn: api.Stage = loop.LEARN, **more: object
) -> api.Dataflow:
    """The example's dataflow, with something else in it."""
    return replace(loop.FLOW, stages=(play, judge, learn), **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changed", "said"),
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
def test_a_dataflow_that_can_never_run_is_refused_when_it_is_made(changed: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        flow(**changed)  # type: ignore[arg-type]


BAND = api.Stage("band", needs=("reward",), makes=("kept",), flow="train", whole_groups=True)
LEARN_KEPT = replace(loop.LEARN, needs=("choice", "reward", "kept"))


def test_a_stage_before_the_train_stage_may_take_whole_groups() -> None:
    replace(loop.FLOW, stages=(loop.PLAY, loop.JUDGE, BAND, LEARN_KEPT))


@pytest.mark.parametrize(
    ("band", "said"),
    [
        (replace(BAND, flow=""), "stage 'band' has whole_groups=True and flow ''; only stages of the flow that is"),
        (replace(BAND, makes=("kept", "choice")), "makes inline columns that the train stage alone needs"),
        (replace(BAND, generates=True), "and generates nothing"),
        (replace(BAND, makes=()), "makes inline columns"),
    ],
)
def test_other_stages_of_whole_groups_are_refused(band: api.Stage, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        replace(loop.FLOW, stages=(loop.PLAY, loop.JUDGE, band, LEARN_KEPT))


def test_what_a_stage_of_whole_groups_makes_is_for_the_train_stage_alone() -> None:
    log = api.Stage("log", needs=("kept",), makes=(), flow="train")
    with pytest.raises(ConfigError, match="that the train stage alone needs"):
        replace(loop.FLOW, stages=(loop.PLAY, loop.JUDGE, BAND, log, LEARN_KEPT))
    with pytest.raises(ConfigError, match="the train stage takes whole groups"):
        replace(loop.FLOW, stages=(loop.PLAY, loop.JUDGE, replace(loop.LEARN, whole_groups=False)))


def test_a_column_may_be_made_by_one_stage_of_each_flow() -> None:
    judge = replace(loop.JUDGE, flow="train")
    other = api.Stage("judge_eval", needs=("choice",), makes=("reward",), flow="eval")
    log = api.Stage("log", needs=("reward",), makes=())
    replace(loop.FLOW, stages=(loop.PLAY, judge, other, log, loop.LEARN))


@pytest.mark.parametrize(
    ("changed", "said"),
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
def test_settings_that_name_a_role_which_is_not_there_are_refused(changed: dict[str, object], said: str) -> None:
    settings = replace(loop.SETTINGS, **changed)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=said):
        asyncio.run(api.run_roles(loop.FLOW, settings, loop.POLICIES, ROLES))


@pytest.mark.parametrize("kl_coef", ["0", "0.001"])
def test_the_recipe_needs_no_role_that_it_does_not_start(kl_coef: str) -> None:
    config = parse(["--algorithm.kl.coef", kl_coef])
    needed = grpo.settings(config).replaceable_roles
    assert ("reference" in needed) == any(stage.name == "reference" for stage in grpo.dataflow(config).stages)
