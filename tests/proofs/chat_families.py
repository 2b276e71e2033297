"""Chat templates in the form of 24 families of models, each reduced to what is particular in it: how tools are
shown, how calls and their results are written, what thinking opens or removes, where a system message goes.
"""

import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from flowrt.engines.prompts import DataPrompt, PromptEncoder, PromptFormat
from flowrt.errors import ConfigError
from flowrt.recipes.data_config import DataConfig
from flowrt.recipes.tasks.problems import open_sets

TEMPLATES = Path(__file__).with_name("chat_templates")
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds two numbers: a + b < \u00fc",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer"}, "b": {"type": "integer", "default": 0}},
                "required": ["a"],
            },
        },
    },
    {"type": "function", "function": {"name": "now", "description": "The time", "parameters": {}}},
]
SYSTEM, LATE, QUESTION, REPLY = "Be terse.", "Answer in German.", "  What is 1 + 1?\n", "It is 2."


def call(name: str, arguments: Any, number: int) -> dict[str, Any]:
    """A call of a tool, in a message of the assistant."""
    return {"id": f"call{number:05}", "type": "function", "function": {"name": name, "arguments": arguments}}


HISTORIES: dict[str, list[dict[str, Any]]] = {
    "question": [{"role": "user", "content": QUESTION}],
    "system": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": QUESTION}],
    "turns": [
        {"role": "user", "content": "R\u00e4ume \u6570 {{ x }}"},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nyes"},
        {"role": "user", "content": QUESTION},
    ],
    "reasoning": [
        {"role": "user", "content": "first"},
        {"role": "assistant", "content": "2", "reasoning_content": "one and one"},
        {"role": "user", "content": QUESTION},
    ],
}
CALLS: dict[str, list[dict[str, Any]]] = {
    "": [],
    "call": [
        {"role": "assistant", "content": None, "tool_calls": [call("add", {"a": 1, "b": None}, 1)]},
        {"role": "tool", "content": "2", "tool_call_id": "call00001", "name": "add"},
    ],
    "calls": [
        {
            "role": "assistant",
            "content": "Let me see.",
            "tool_calls": [call("add", {"a": 1, "b": [2, "\u00e4"]}, 1), call("now", {}, 2)],
        },
        {"role": "tool", "content": '{"sum": 3}', "tool_call_id": "call00001", "name": "add"},
        {"role": "tool", "content": "12:00", "tool_call_id": "call00002", "name": "now"},
    ],
}


@dataclass(frozen=True, slots=True)
class Case:
    """A prompt for each family."""

    name: str
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    thinks: bool
    """Whether it is rendered with the variables of the family that turn thinking on, or with those that turn it off."""
    prefill: bool


def cases() -> list[Case]:
    """All combinations of a history, calls of tools, a late system message, tools, thinking and prefill."""
    conversations = []
    parts = product(HISTORIES.items(), CALLS.items(), *[(False, True)] * 4)
    for (history, messages), (calls, called), late, with_tools, thinks, prefill in parts:
        whole = [*messages, *called]
        whole += [{"role": "system", "content": LATE}, {"role": "user", "content": "And now?"}] if late else []
        whole += [{"role": "assistant", "content": REPLY}] if prefill else []
        name = f"{history} {calls} late={late} tools={with_tools} thinks={thinks} prefill={prefill}"
        conversations.append(Case(name, whole, TOOLS if with_tools else None, thinks, prefill))
    return conversations


@dataclass(frozen=True)
class ChatFamily:
    """A family of chat models, whose templates are the files `chat_templates/NAME.jinja`.

    Attributes:
        name: of the family and, with underscores, of its files.
        tokens: tokens of the template, with spaces between them.
        start: the start token, which the tokenizer also puts before each text; empty: none.
        end: the token at which the tokenizer ends a text.
        on: variables that turn thinking on.
        off: variables that turn it off.
    """

    name: str
    tokens: str = ""
    start: str = ""
    end: str = "<|endoftext|>"
    on: Mapping[str, object] = field(default_factory=dict)
    off: Mapping[str, object] = field(default_factory=dict)

    @property
    def templates(self) -> dict[str, str]:
        """Jinja texts: "default", and that with tools if it is another one."""
        file = TEMPLATES / f"{self.name.replace(' ', '_')}.jinja"
        paths = {"default": file, "tool_use": file.with_suffix(".tool_use.jinja")}
        return {name: path.read_text() for name, path in paths.items() if path.is_file()}


THINKING: dict[str, Any] = {"on": {"enable_thinking": True}, "off": {"enable_thinking": False}}
CHAT_FAMILIES = {
    family.name: family
    for family in (
        ChatFamily("chatml", "<|im_start|> <|im_end|>"),
        ChatFamily("qwen2", "<|im_start|> <|im_end|>"),
        ChatFamily("qwen3", "<|im_start|> <|im_end|> <think> </think> <tool_call> </tool_call>", **THINKING),
        ChatFamily("qwen3 coder", "<|im_start|> <|im_end|>"),
        ChatFamily("llama 2", "", start="<s>", end="</s>"),
        ChatFamily(
            "llama 3",
            "<|start_header_id|> <|end_header_id|> <|eot_id|>",
            start="<|begin_of_text|>",
            end="<|end_of_text|>",
        ),
        ChatFamily(
            "llama 3.1",
            "<|start_header_id|> <|end_header_id|> <|eot_id|>",
            start="<|begin_of_text|>",
            end="<|end_of_text|>",
        ),
        ChatFamily("mistral", "", start="<s>", end="</s>"),
        ChatFamily(
            "mistral tools",
            "[INST] [/INST] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_CALLS] [TOOL_RESULTS]",
            start="<s>",
            end="</s>",
        ),
        ChatFamily("gemma 2", "<start_of_turn> <end_of_turn>", start="<bos>", end="<eos>"),
        ChatFamily("gemma 3", "<start_of_turn> <end_of_turn>", start="<bos>", end="<eos>"),
        ChatFamily("phi 3", "<|system|> <|user|> <|assistant|> <|end|>"),
        ChatFamily("phi 4", "<|system|> <|user|> <|assistant|> <|end|> <|tool|> <|/tool|>"),
        ChatFamily(
            "deepseek v3",
            "<｜User｜> <｜Assistant｜> <｜tool▁call▁begin｜> <｜tool▁call▁end｜> <think> </think>",
            start="<｜begin▁of▁sentence｜>",
            end="<｜end▁of▁sentence｜>",
            on={"thinking": True},
            off={"thinking": False},
        ),
        ChatFamily(
            "deepseek r1",
            "<｜User｜> <｜Assistant｜> <think> </think>",
            start="<｜begin▁of▁sentence｜>",
            end="<｜end▁of▁sentence｜>",
        ),
        ChatFamily(
            "glm 4", "[gMASK] <sop> <|system|> <|user|> <|assistant|> <|observation|> <think> </think>", **THINKING
        ),
        ChatFamily(
            "granite",
            "<|start_of_role|> <|end_of_role|> <|tool_call|>",
            end="<|end_of_text|>",
            on={"thinking": True, "controls": {"length": "long"}},
            off={"thinking": False},
        ),
        ChatFamily(
            "command r",
            "<|START_OF_TURN|> <|END_OF_TURN|> <|SYSTEM|> <|USER|> <|CHATBOT|>",
            start="<BOS_TOKEN>",
            end="<EOS_TOKEN>",
        ),
        ChatFamily("olmo 2", "<|system|> <|user|> <|assistant|>", start="<|startoftext|>"),
        ChatFamily("smollm 3", "<|im_start|> <|im_end|> <think> </think>", **THINKING),
        ChatFamily("hermes", "<|im_start|> <|im_end|>", start="<|begin_of_text|>", end="<|end_of_text|>"),
        ChatFamily(
            "gpt-oss",
            "<|start|> <|end|> <|message|> <|channel|> <|call|> <|return|>",
            on={"reasoning_effort": "high"},
            off={"reasoning_effort": "low"},
        ),
        ChatFamily(
            "kimi k2",
            "<|im_system|> <|im_user|> <|im_assistant|> <|im_middle|> <|im_end|> <|tool_call_begin|>",
            start="[BOS]",
            end="[EOS]",
        ),
        ChatFamily(
            "nemotron", "<SPECIAL_10> <SPECIAL_11> <SPECIAL_12> <think> </think>", start="<s>", end="</s>", **THINKING
        ),
    )
}


def family_tokenizer(family: ChatFamily) -> Any:
    """A byte-level tokenizer with the family's tokens and its template."""
    own = [token for token in dict.fromkeys((family.start, family.end, *family.tokens.split())) if token]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300 + len(own),
        special_tokens=["<pad>", *own],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(
        ["You are a helpful assistant. user system tool function name arguments"] * 3, trainer
    )
    if family.start:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{family.start} $A",
            special_tokens=[(family.start, tokenizer.token_to_id(family.start))],
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token=family.end,
        bos_token=family.start or None,
        chat_template=family.templates if len(family.templates) > 1 else family.templates["default"],
    )


def templates_of_families(quick: bool) -> dict[str, int]:
    """Number of prompts checked, of prompts that differ from transformers' own, and of those that both refuse.

    Each is a row of a file, and is rendered alone and in a batch.
    """
    some = [case for case in cases() if not quick or case.name.startswith("system")]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.jsonl"
        rows = [{"prompt": case.messages, "tools": case.tools, "answer": "1"} for case in some]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        data = DataConfig(path=str(path), prompt_key="prompt", eval_prompts=0, prefill=True)
        [opened] = open_sets(data)
        prompts = [problem.as_prompt for problem in opened.training]
        if prompts != [prompt for block in opened.prompt_blocks() for prompt in block.prompts]:
            return {"checked": len(prompts), "wrong": len(prompts), "refused": 0}
    wrong = refused = checked = 0
    for family in CHAT_FAMILIES.values():
        tokenizer = family_tokenizer(family)
        for thinks in (False, True):
            variables = family.on if thinks else family.off
            encoder = PromptEncoder(tokenizer, PromptFormat(variables=variables, prefill=True))
            taken = [(case, prompt) for case, prompt in zip(some, prompts, strict=True) if case.thinks == thinks]
            expected = [transformers_ids(tokenizer, family, case, variables) for case, _ in taken]
            token_ids = [flowrt_ids(encoder, prompt) for _, prompt in taken]
            accepted = [place for place, ids in enumerate(token_ids) if ids is not None]
            batch = encoder.encode_all([taken[place][1] for place in accepted])
            wrong += sum(ids != other for ids, other in zip(token_ids, expected, strict=True))
            wrong += sum(token_ids[place] != ids for place, ids in zip(accepted, batch, strict=True))
            refused += expected.count(None)
            checked += len(taken)
    return {"checked": checked, "wrong": wrong, "refused": refused}


def transformers_ids(
    tokenizer: Any, family: ChatFamily, case: Case, variables: Mapping[str, object]
) -> list[int] | None:
    """The token ids of transformers' own rendering; None where it fails, or leaves out tools or calls of them."""
    texts = family.templates
    text = texts.get("tool_use", texts["default"]) if case.tools else texts["default"]
    if any("tool_calls" in message for message in case.messages) and "tool_calls" not in text:
        return None
    reasons = any("reasoning_content" in message for message in case.messages)
    if reasons and not any(name in text for name in ("reasoning_content", ".thinking")):
        return None

    def rendered(tools: list[dict[str, Any]] | None, template: str | None) -> list[int]:
        ids: list[int] = tokenizer.apply_chat_template(
            case.messages,
            tools=tools,
            chat_template=template,
            add_generation_prompt=not case.prefill,
            continue_final_message=case.prefill,
            tokenize=True,
            return_dict=False,
            **variables,
        )
        return ids

    try:
        ids = rendered(case.tools, None)
        is_shown = not case.tools or len(texts) > 1 or ids != rendered(None, text)
    except Exception:  # noqa: BLE001 (the template's own errors are of many kinds)
        return None
    return ids if is_shown else None


def flowrt_ids(encoder: PromptEncoder, prompt: DataPrompt) -> list[int] | None:
    """The token ids of a prompt; None if it is refused."""
    try:
        return encoder(*prompt)
    except ConfigError:
        return None
