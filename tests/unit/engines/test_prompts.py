"""Prompts as token ids: chat templates of six families, against transformers' own rendering."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import processors

from flowrt.engines.hf import save_model
from flowrt.engines.prompts import DataPrompt, PromptEncoder, PromptEncoders, PromptFormat, end_of_turn_ids
from flowrt.engines.stopping import StopConditions, stop_token_ids
from flowrt.engines.tiny_model import build_model
from flowrt.errors import ConfigError
from tests.proofs.chat_families import CHAT_FAMILIES, templates_of_families
from tests.proofs.chat_models import FAMILIES, Family, chat_tokenizer

TOKENIZERS = {name: chat_tokenizer(family) for name, family in FAMILIES.items()}
SYSTEM, USER = "You are terse.", "What is one and one?"
each_family = pytest.mark.parametrize(("name", "family"), FAMILIES.items(), ids=FAMILIES)


def question(family: Family) -> tuple[tuple[str, str], ...]:
    return (("system", SYSTEM), ("user", USER)) if family.takes_system else (("user", USER),)


@each_family
def test_messages_are_rendered_by_the_template_with_one_start_token(name: str, family: Family) -> None:
    tokenizer = TOKENIZERS[name]
    form = PromptFormat(variables=family.variables)
    ids = PromptEncoder(tokenizer, form)("", question(family))
    text = family.rendered.format(s=SYSTEM, u=USER)
    assert ids == tokenizer(text, add_special_tokens=False)["input_ids"]
    conversation = [{"role": role, "content": content} for role, content in question(family)]
    expected = tokenizer.apply_chat_template(
        conversation, add_generation_prompt=True, tokenize=True, return_dict=False, **family.variables
    )
    assert ids == expected
    assert ids.count(tokenizer.bos_token_id) == bool(family.start)


@each_family
def test_text_with_a_system_prompt_equals_the_same_messages(name: str, family: Family) -> None:
    tokenizer, system = TOKENIZERS[name], SYSTEM if family.takes_system else ""
    form = PromptFormat("chat", variables=family.variables, system_prompt=system)
    assert PromptEncoder(tokenizer, form)(USER) == PromptEncoder(tokenizer, PromptFormat("chat", family.variables))(
        "", question(family)
    )


@each_family
@settings(max_examples=25, deadline=None)
@given(st.lists(st.text(max_size=20), min_size=1, max_size=5))
def test_encoding_prompts_in_a_batch_equals_encoding_each_prompt(name: str, family: Family, texts: list[str]) -> None:
    encoder = PromptEncoder(TOKENIZERS[name], PromptFormat("chat"))
    prompts = [DataPrompt(text) for text in texts if text] + [DataPrompt("", (("user", text),)) for text in texts]
    assert encoder.encode_all(prompts) == [encoder(*prompt) for prompt in prompts]


@each_family
def test_the_end_of_turn_token_of_a_template_is_found(name: str, family: Family) -> None:
    tokenizer = TOKENIZERS[name]
    assert end_of_turn_ids(tokenizer, family.template) == (tokenizer.convert_tokens_to_ids(family.turn),)


@each_family
def test_stop_tokens_are_those_of_the_tokenizer_and_of_the_template(name: str, family: Family, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    tokenizer = TOKENIZERS[name]
    model = build_model(
        vocab_size=len(tokenizer), hidden_size=8, layers=1, heads=2, intermediate_size=8, max_length=64, seed=0
    )
    model.config.eos_token_id = model.generation_config.eos_token_id = tokenizer.eos_token_id
    save_model(model, tokenizer, tmp_path / "model")
    expected = {tokenizer.convert_tokens_to_ids(token) for token in (family.end, family.turn)}
    assert set(stop_token_ids(tmp_path / "model")) == expected
    assert set(StopConditions.of(tmp_path / "model").token_ids) == expected
    assert stop_token_ids(tmp_path / "model", None, "none") == (tokenizer.eos_token_id,)


@each_family
def test_a_last_message_of_the_assistant_prefills_the_response(name: str, family: Family) -> None:
    tokenizer = TOKENIZERS[name]
    encoder = PromptEncoder(tokenizer, PromptFormat(prefill=True))
    ids = encoder("", (("user", USER), ("assistant", "The answer")))
    assert tokenizer.decode(ids).endswith("The answer")
    assert ids.count(tokenizer.bos_token_id) == bool(family.start)


@each_family
def test_text_for_a_chat_model_needs_an_explicit_template_option(name: str, family: Family) -> None:
    tokenizer = TOKENIZERS[name]
    with pytest.raises(ConfigError, match=r"plain text.* --data\.chat-template chat .*, none leaves it"):
        PromptEncoder(tokenizer, PromptFormat())(USER)
    assert PromptEncoder(tokenizer, PromptFormat("none"))(USER) == tokenizer(USER)["input_ids"]


def test_text_with_a_start_token_gets_no_second_one() -> None:
    tokenizer = TOKENIZERS["llama"]
    ids = PromptEncoder(tokenizer, PromptFormat("none"))(f"{tokenizer.bos_token}{USER}")
    assert ids == tokenizer(USER)["input_ids"]
    assert tokenizer(f"{tokenizer.bos_token}{USER}")["input_ids"][:2] == [tokenizer.bos_token_id] * 2


def test_a_template_is_read_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.jinja"
    path.write_text("{% for m in messages %}Q: {{ m.content }}\n{% endfor %}A:")
    tokenizer = TOKENIZERS["phi"]
    ids = PromptEncoder(tokenizer, PromptFormat(str(path)))(USER)
    assert tokenizer.decode(ids) == f"Q: {USER}\nA:"
    path.write_text("{% for m in messages %}{{ m.content }}<|user|>{% endfor %}")
    assert end_of_turn_ids(tokenizer, path.read_text()) == (tokenizer.convert_tokens_to_ids("<|user|>"),)


@pytest.mark.parametrize(
    ("family", "form", "messages", "error"),
    [
        ("gemma", PromptFormat(), (("system", "s"), ("user", "u")), "refuses the prompt: no role system here"),
        ("mistral", PromptFormat(), (("user", "u"), ("user", "u")), "refuses the prompt: roles must alternate"),
        ("phi", PromptFormat("none"), (("user", "u"),), r"is messages, and data\.chat_template is none"),
        ("phi", PromptFormat("/nowhere.jinja"), (), "cannot be read: No such file"),
        ("phi", PromptFormat("/tmp"), (), "is not a file"),
    ],
)
def test_prompts_that_do_not_fit_their_template_are_refused(
    family: str, form: PromptFormat, messages: Any, error: str
) -> None:
    with pytest.raises(ConfigError, match=error):
        PromptEncoder(TOKENIZERS[family], form)("", messages)


def test_a_checkpoint_without_a_template_accepts_only_plain_text() -> None:
    tokenizer = chat_tokenizer(FAMILIES["phi"])
    tokenizer.chat_template = None
    assert PromptEncoder(tokenizer, PromptFormat())(USER) == tokenizer(USER)["input_ids"]
    with pytest.raises(ConfigError, match="the checkpoint has no chat template"):
        PromptEncoder(tokenizer, PromptFormat())("", (("user", USER),))
    with pytest.raises(ConfigError, match=r"data\.chat_template is chat, and the checkpoint has none"):
        PromptEncoder(tokenizer, PromptFormat("chat"))
    with pytest.raises(ConfigError, match="system_prompt is set, and there is no chat template"):
        PromptEncoder(tokenizer, PromptFormat(system_prompt="s"))(USER)


def test_an_invalid_jinja_template_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "broken.jinja"
    path.write_text("{% for m in messages %}{{ m.content ")
    with pytest.raises(ConfigError, match=r"the chat template refuses the prompt: .+"):
        PromptEncoder(TOKENIZERS["phi"], PromptFormat(str(path)))(USER)


def test_unknown_or_malformed_template_variables_are_refused() -> None:
    with pytest.raises(
        ConfigError, match="'enable_thinkin', which the chat template does not use; did you mean 'enable_"
    ):
        PromptEncoder(TOKENIZERS["qwen"], PromptFormat(variables={"enable_thinkin": False}))
    with pytest.raises(ConfigError, match="is not JSON"):
        PromptFormat.of("", "{", "", prefill=False)
    with pytest.raises(ConfigError, match="make it a JSON object"):
        PromptFormat.of("", "[1]", "", prefill=False)
    with pytest.raises(ConfigError, match=r"data\.system_prompt is set, and data\.chat_template is none"):
        PromptFormat.of("none", "", "s", prefill=False)


TOOLS = json.dumps([{"type": "function", "function": {"name": "add"}}])
OTHER_TOOLS = json.dumps([{"type": "function", "function": {"name": "sub"}}])
TOOL_TEMPLATE = (
    "{% if tools %}T{{ tools | tojson }}{% endif %}{% for m in messages %}{{ m.role }}:{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<{{ c.function.name }}>{% endfor %};{% endfor %}"
)
CALL = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add", "arguments": {"a": 1}}}]}
HISTORY = (("user", USER), ("assistant", "", json.dumps(CALL)), ("tool", "2"))


def tool_tokenizer(template: Any) -> Any:
    tokenizer = chat_tokenizer(FAMILIES["qwen"])
    tokenizer.chat_template = template
    return tokenizer


def test_tools_of_a_row_and_of_the_configuration_reach_the_template() -> None:
    tokenizer = tool_tokenizer(TOOL_TEMPLATE)
    by_setting = PromptEncoder(tokenizer, PromptFormat("chat", tools=TOOLS))
    by_row = PromptEncoder(tokenizer, PromptFormat("chat"))
    own = (("user", USER),)
    assert tokenizer.decode(by_row("", own, TOOLS)) == f"T{TOOLS}user:{USER};"
    assert by_setting("", own) == by_setting(USER) == by_row("", own, TOOLS)
    assert by_setting("", own, OTHER_TOOLS) == by_row("", own, OTHER_TOOLS) != by_setting("", own)
    assert by_setting("", own, "[]") == by_row("", own)
    prompts = [DataPrompt("", own, tools) for tools in (TOOLS, "", OTHER_TOOLS, "[]", TOOLS)]
    assert by_setting.encode_all(prompts) == [by_setting(*prompt) for prompt in prompts]


def test_calls_of_tools_in_the_history_are_rendered() -> None:
    tokenizer = tool_tokenizer(TOOL_TEMPLATE)
    encoder = PromptEncoder(tokenizer, PromptFormat())
    assert tokenizer.decode(encoder("", HISTORY)) == f"user:{USER};assistant:<add>;tool:2;"
    assert encoder.encode_all([DataPrompt("", HISTORY)]) == [encoder("", HISTORY)]


def test_a_checkpoint_with_a_template_for_tools_uses_it() -> None:
    tokenizer = tool_tokenizer({"default": "{{ messages[0].content }}", "tool_use": TOOL_TEMPLATE})
    encoder = PromptEncoder(tokenizer, PromptFormat())
    own = (("user", USER),)
    assert tokenizer.decode(encoder("", own)) == USER
    assert tokenizer.decode(encoder("", own, TOOLS)) == f"T{TOOLS}user:{USER};"
    assert encoder("", own, TOOLS) == tokenizer.apply_chat_template(
        [{"role": "user", "content": USER}], tools=json.loads(TOOLS), tokenize=True, return_dict=False
    )


@pytest.mark.parametrize(
    ("form", "prompt", "error"),
    [
        (
            PromptFormat(),
            DataPrompt("", (("user", "u"),), TOOLS),
            "the row has tools, which the chat template does not",
        ),
        (
            PromptFormat(),
            DataPrompt("", HISTORY),
            "message of role assistant has the field 'tool_calls', which the chat",
        ),
        (PromptFormat("none"), DataPrompt("u", (), TOOLS), "the row has tools, and there is no chat template"),
        (
            PromptFormat(tools=TOOLS),
            DataPrompt("", (("user", "u"),)),
            r"data\.tools is set, and the chat template do",
        ),
    ],
)
def test_tools_that_a_template_does_not_show_are_refused(form: PromptFormat, prompt: DataPrompt, error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        PromptEncoder(TOKENIZERS["phi"], form)(*prompt)
    with pytest.raises(ConfigError, match=error):
        PromptEncoder(TOKENIZERS["phi"], form).encode_all([prompt])


def test_tools_are_read_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "tools.json"
    path.write_text(TOOLS)
    assert PromptFormat.of("", "", "", prefill=False, tools=str(path)).tools == TOOLS
    assert PromptFormat.of("", "", "", prefill=False, tools=TOOLS).tools == TOOLS
    for tools, error in (
        ("[1]", r"data\.tools is no list of JSON objects"),
        ("[", r"data\.tools is not JSON"),
        ("/nowhere", r"data\.tools is '/nowhere', which is neither a JSON list nor a file"),
    ):
        with pytest.raises(ConfigError, match=error):
            PromptFormat.of("", "", "", prefill=False, tools=tools)
    path.write_bytes(b"\xff")
    with pytest.raises(ConfigError, match=r"data\.tools: file .* is not UTF-8 text"):
        PromptFormat.of("", "", "", prefill=False, tools=str(path))
    with pytest.raises(ConfigError, match=r"data\.chat_template_kwargs has 'tools'; name them with data\.tools"):
        PromptFormat.of("", '{"tools": []}', "", prefill=False)
    with pytest.raises(ConfigError, match=r"data\.tools is set, and data\.chat_template is none"):
        PromptFormat.of("none", "", "", prefill=False, tools=TOOLS)


def test_formats_of_data_sets_have_encoders_of_their_own() -> None:
    encoders = PromptEncoders(TOKENIZERS["phi"], PromptFormat("chat"))
    own = PromptFormat("chat", system_prompt=SYSTEM)
    assert encoders.of(None) is encoders.of(PromptFormat("chat")) is not encoders.of(own)
    assert encoders.of(own) is encoders.of(PromptFormat("chat", system_prompt=SYSTEM))
    assert encoders.of(own)(USER) == encoders.of(None)("", question(FAMILIES["phi"]))


def test_a_text_prompt_does_not_end_with_tokens_that_the_tokenizer_appends() -> None:
    tokenizer = chat_tokenizer(FAMILIES["llama"])
    plain = tokenizer(USER)["input_ids"]
    start, end = tokenizer.bos_token, tokenizer.eos_token
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{start} $A {end}",
        special_tokens=[(token, tokenizer.convert_tokens_to_ids(token)) for token in (start, end)],
    )
    assert tokenizer(USER)["input_ids"] == [*plain, tokenizer.eos_token_id]
    encoder = PromptEncoder(tokenizer, PromptFormat("none"))
    assert encoder(USER) == plain == encoder.encode_all([DataPrompt(USER)])[0]
    assert encoder(f"{USER}{end}") == [*plain, tokenizer.eos_token_id]  # as the data has it


def test_control_tokens_in_the_texts_of_a_prompt_are_found() -> None:
    encoder = PromptEncoder(TOKENIZERS["qwen"], PromptFormat("chat"))
    call = json.dumps({"role": "assistant", "content": "", "tool_calls": [{"arguments": {"a": "x<|im_end|>"}}]})
    for prompt, expected in (
        (DataPrompt("one and one"), ""),
        (DataPrompt("one <|im_start|>system\nand one"), "<|im_start|>"),
        (DataPrompt("", (("user", "u"), ("assistant", "", call))), "<|im_end|>"),
        (DataPrompt("u", (), json.dumps([{"description": "<think>"}])), "<think>"),
    ):
        assert encoder.control_token(prompt) == expected


@pytest.mark.slow
def test_rows_with_tools_thinking_prefill_and_late_system_messages_are_rendered_as_by_transformers() -> None:
    counts = templates_of_families(quick=True)
    assert len(CHAT_FAMILIES) == 24
    assert counts["wrong"] == 0
    assert counts["checked"] > 1000
    assert counts["refused"] < counts["checked"] / 2
