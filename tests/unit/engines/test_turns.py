"""The text of a turn: what a chat template opens, a prefill, and tags of thinking that are special tokens."""

from typing import Any

import pytest

from flowrt.engines.prompts import DataPrompt, PromptEncoder, PromptFormat
from flowrt.engines.stopping import StopConditions
from flowrt.engines.turns import Turns
from tests.proofs.chat_models import FAMILIES, chat_tokenizer

HEADER = "{%- for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{%- endfor %}"
PROMPT = "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n@' }}{%- endif %}"


def tokenizer(opened: str = "") -> Any:
    """A tokenizer whose template opens this text."""
    loaded = chat_tokenizer(FAMILIES["qwen"])
    loaded.chat_template = HEADER + PROMPT.replace("@", opened.replace("\n", "\\n"))
    return loaded


DEFAULT = PromptFormat()


def turns(of: Any, form: PromptFormat = DEFAULT, strings: tuple[str, ...] = ()) -> Turns:
    return Turns(StopConditions((of.convert_tokens_to_ids("<|im_end|>"),), strings, of), form)


@pytest.mark.parametrize("opened", ["", "<think>\n", "<think>\n\n</think>\n\n", "<answer>", "[THINK]"])
def test_what_the_template_opens_begins_the_turn(opened: str) -> None:
    of = tokenizer(opened)
    assert turns(of).beginning() == opened
    rendered = PromptEncoder(of, PromptFormat()).render(DataPrompt("", (("user", "1"),)))
    assert rendered.endswith(f"assistant\n{opened}")


def test_special_tokens_of_the_header_are_not_part_of_the_turn() -> None:
    for name in FAMILIES:
        form = PromptFormat(variables={"enable_thinking": True} if name == "qwen" else {})
        assert turns(chat_tokenizer(FAMILIES[name]), form).beginning() == "", name


def test_a_variable_of_the_template_changes_what_it_opens() -> None:
    of = chat_tokenizer(FAMILIES["qwen"])
    assert turns(of, PromptFormat(variables={"enable_thinking": False})).beginning() == "<think>\n\n</think>\n\n"


def test_a_prefill_begins_the_turn_in_place_of_what_the_template_opens() -> None:
    of = tokenizer("<think>\n")
    turn = turns(of, PromptFormat(prefill=True))
    assert turn.depends_on_prompt
    assert turn.beginning([{"role": "user", "content": "1"}, {"role": "assistant", "content": "It is"}]) == "It is"
    assert turn.beginning([{"role": "user", "content": "1"}]) == "<think>\n"
    assert not turns(of).depends_on_prompt


def test_without_a_template_the_turn_is_what_is_generated() -> None:
    assert turns(tokenizer("<think>\n"), PromptFormat(template="none")).beginning() == ""


def test_tags_of_thinking_are_part_of_the_text_though_they_are_special_tokens() -> None:
    of = chat_tokenizer(FAMILIES["qwen"])
    ids = of("What is one</think> and<think> two<|im_end|>", add_special_tokens=False)["input_ids"]
    assert "think" not in of.decode(ids, skip_special_tokens=True)
    assert turns(of).generated(ids) == "What is one</think> and<think> two"
    assert turns(of, strings=("</think>",)).generated(ids) == "What is one"
    plain = of("What is one<|im_end|>", add_special_tokens=False)["input_ids"]
    assert turns(of).generated(plain) == "What is one"
    assert turns(of).generated([]) == ""
