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
from flowrt.recipes.config import DataConfig
from flowrt.recipes.tasks.problems import open_sets

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
    found = []
    parts = product(HISTORIES.items(), CALLS.items(), *[(False, True)] * 4)
    for (history, messages), (calls, called), late, with_tools, thinks, prefill in parts:
        whole = [*messages, *called]
        whole += [{"role": "system", "content": LATE}, {"role": "user", "content": "And now?"}] if late else []
        whole += [{"role": "assistant", "content": REPLY}] if prefill else []
        name = f"{history} {calls} late={late} tools={with_tools} thinks={thinks} prefill={prefill}"
        found.append(Case(name, whole, TOOLS if with_tools else None, thinks, prefill))
    return found


@dataclass(frozen=True)
class ChatFamily:
    """A family of chat models.

    Attributes:
        template: Jinja text, or several by name.
        tokens: tokens of the template.
        start: the start token, which the tokenizer also puts before each text; empty: none.
        end: the token at which the tokenizer ends a text.
        on: variables that turn thinking on.
        off: variables that turn it off.
    """

    template: str | dict[str, str]
    tokens: tuple[str, ...]
    start: str = ""
    end: str = "<|endoftext|>"
    on: Mapping[str, object] = field(default_factory=dict)
    off: Mapping[str, object] = field(default_factory=dict)


CHATML = ("<|im_start|>", "<|im_end|>")
THINK = ("<think>", "</think>")
_CHATML_TURN = "{{- '<|im_start|>' + m.role + '\\n' + (m.content or '') + '<|im_end|>\\n' }}"
_CHATML_GENERATE = "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
_TOOL_LIST = "{%- for t in tools %}{{- '\\n' }}{{- t | tojson }}{%- endfor %}"

CHAT_FAMILIES: dict[str, ChatFamily] = {
    "chatml": ChatFamily("{%- for m in messages %}" + _CHATML_TURN + "{%- endfor %}" + _CHATML_GENERATE, CHATML),
    "qwen2": ChatFamily(
        "{%- set first = messages[0].content if messages[0].role == 'system' else 'You are a helpful assistant.' %}"
        "{{- '<|im_start|>system\\n' + first }}{%- if tools %}{{- '\\n\\n# Tools\\n<tools>' }}"
        + _TOOL_LIST
        + "{{- '\\n</tools>' }}{%- endif %}{{- '<|im_end|>\\n' }}"
        "{%- for m in messages %}{%- if m.role == 'tool' %}"
        "{%- if loop.index0 == 0 or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}"
        "{{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}"
        "{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}"
        "{%- elif m.role == 'assistant' and m.tool_calls %}{{- '<|im_start|>assistant' }}"
        "{%- if m.content %}{{- '\\n' + m.content }}{%- endif %}"
        "{%- for c in m.tool_calls %}{%- if c.function is defined %}{%- set c = c.function %}{%- endif %}"
        '{{- \'\\n<tool_call>\\n{"name": "\' + c.name + \'", "arguments": \' }}{{- c.arguments | tojson }}'
        "{{- '}\\n</tool_call>' }}{%- endfor %}{{- '<|im_end|>\\n' }}"
        "{%- elif m.role != 'system' or not loop.first %}"
        + _CHATML_TURN
        + "{%- endif %}{%- endfor %}"
        + _CHATML_GENERATE,
        CHATML,
    ),
    "qwen3": ChatFamily(
        "{%- if tools %}{{- '<|im_start|>system\\n' }}"
        "{%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}{{- '# Tools' }}"
        + _TOOL_LIST
        + "{{- '<|im_end|>\\n' }}{%- elif messages[0].role == 'system' %}"
        "{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}{%- endif %}"
        "{%- set ns = namespace(last=messages | length - 1, searching=true) %}"
        "{%- for m in messages[::-1] %}{%- if ns.searching and m.role == 'user' %}"
        "{%- set ns.searching = false %}{%- set ns.last = messages | length - 1 - loop.index0 %}{%- endif %}"
        "{%- endfor %}"
        "{%- for m in messages %}{%- if m.content is string %}{%- set content = m.content %}{%- else %}"
        "{%- set content = '' %}{%- endif %}"
        "{%- if m.role == 'assistant' %}{%- set reasoning = '' %}{%- if m.reasoning_content is string %}"
        "{%- set reasoning = m.reasoning_content %}{%- elif '</think>' in content %}"
        "{%- set reasoning = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}"
        "{%- set content = content.split('</think>')[-1].lstrip('\\n') %}{%- endif %}"
        "{{- '<|im_start|>assistant\\n' }}{%- if loop.index0 > ns.last and (loop.last or reasoning) %}"
        "{{- '<think>\\n' + reasoning.strip('\\n') + '\\n</think>\\n\\n' }}{%- endif %}{{- content }}"
        "{%- for c in m.tool_calls or [] %}{{- '\\n<tool_call>\\n' }}{{- c.function | tojson }}"
        "{{- '\\n</tool_call>' }}{%- endfor %}{{- '<|im_end|>\\n' }}"
        "{%- elif m.role == 'tool' %}{{- '<|im_start|>user\\n<tool_response>\\n' + content }}"
        "{{- '\\n</tool_response><|im_end|>\\n' }}"
        "{%- elif not (m.role == 'system' and loop.first) %}"
        "{{- '<|im_start|>' + m.role + '\\n' + content + '<|im_end|>\\n' }}{%- endif %}{%- endfor %}"
        "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}"
        "{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}"
        "{%- endif %}{%- endif %}",
        (*CHATML, *THINK, "<tool_call>", "</tool_call>"),
        on={"enable_thinking": True},
        off={"enable_thinking": False},
    ),
    "qwen3 coder": ChatFamily(
        "{%- macro shown(value) %}{%- if value is mapping %}{%- for k, v in value | items %}"
        "{{- '\\n<' + k + '>' }}{{- v | string }}{{- '</' + k + '>' }}{%- endfor %}{%- endif %}{%- endmacro %}"
        "{%- if tools is iterable and tools | length > 0 %}{{- '<|im_start|>system\\n<tools>' }}"
        "{%- for t in tools %}{%- set f = t.function if t.function is defined else t %}"
        "{{- '\\n<function>\\n<name>' ~ f.name ~ '</name>' }}{{- shown(f.parameters) }}{{- '\\n</function>' }}"
        "{%- endfor %}{{- '</tools><|im_end|>\\n' }}{%- endif %}"
        "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' }}{{- m.content | default('', true) | trim }}"
        "{%- if m.tool_calls is defined and m.tool_calls is iterable %}{%- for c in m.tool_calls %}"
        "{{- '\\n<function=' + c.function.name + '>' }}{%- for k, v in c.function.arguments | items %}"
        "{{- '\\n<parameter=' + k + '>\\n' }}{{- v | tojson | safe if v is mapping or v is sequence else v | string }}"
        "{{- '\\n</parameter>' }}{%- endfor %}{{- '\\n</function>' }}{%- endfor %}{%- endif %}"
        "{{- '<|im_end|>\\n' }}{%- endfor %}" + _CHATML_GENERATE,
        CHATML,
    ),
    "llama 2": ChatFamily(
        "{%- if messages[0]['role'] == 'system' %}{%- set rest = messages[1:] %}"
        "{%- set system = '<<SYS>>\\n' + messages[0]['content'] + '\\n<</SYS>>\\n\\n' %}{%- else %}"
        "{%- set rest = messages %}{%- set system = '' %}{%- endif %}"
        "{%- for m in rest %}{%- if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
        "{{- raise_exception('Roles must alternate user/assistant') }}{%- endif %}"
        "{%- if m['role'] == 'user' %}"
        "{{- bos_token + '[INST] ' + (system if loop.first else '') + m['content'].strip() + ' [/INST]' }}"
        "{%- elif m['role'] == 'assistant' %}{{- ' ' + m['content'].strip() + ' ' + eos_token }}{%- endif %}"
        "{%- endfor %}",
        (),
        start="<s>",
        end="</s>",
    ),
    "llama 3": ChatFamily(
        "{%- for m in messages %}{%- set text = '<|start_header_id|>' + m['role'] + '<|end_header_id|>\\n\\n' "
        "+ m['content'] | trim + '<|eot_id|>' %}{%- if loop.first %}{%- set text = bos_token + text %}{%- endif %}"
        "{{- text }}{%- endfor %}"
        "{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}",
        ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        start="<|begin_of_text|>",
        end="<|end_of_text|>",
    ),
    "llama 3.1": ChatFamily(
        "{{- bos_token }}{%- if not tools is defined %}{%- set tools = none %}{%- endif %}"
        "{%- if messages[0]['role'] == 'system' %}{%- set system = messages[0]['content'] | trim %}"
        "{%- set messages = messages[1:] %}{%- else %}{%- set system = '' %}{%- endif %}"
        "{{- '<|start_header_id|>system<|end_header_id|>\\n\\n' }}"
        "{%- if tools is not none %}{{- 'Environment: ipython\\n' }}{%- endif %}{{- system + '<|eot_id|>' }}"
        "{%- if tools is not none %}{%- if messages | length == 0 %}"
        "{{- raise_exception('no first user message') }}{%- endif %}"
        "{%- set first = messages[0]['content'] | trim %}{%- set messages = messages[1:] %}"
        "{{- '<|start_header_id|>user<|end_header_id|>\\n\\n' }}{%- for t in tools %}"
        "{{- t | tojson(indent=4) }}{{- '\\n\\n' }}{%- endfor %}{{- first + '<|eot_id|>' }}{%- endif %}"
        "{%- for m in messages %}{%- if not (m.role == 'ipython' or m.role == 'tool' or 'tool_calls' in m) %}"
        "{{- '<|start_header_id|>' + m['role'] + '<|end_header_id|>\\n\\n' + m['content'] | trim + '<|eot_id|>' }}"
        "{%- elif 'tool_calls' in m %}{%- if not m.tool_calls | length == 1 %}"
        "{{- raise_exception('This model only supports single tool-calls at once!') }}{%- endif %}"
        "{%- set c = m.tool_calls[0].function %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}"
        "{{- '{\"name\": \"' + c.name + '\", \"parameters\": ' }}{{- c.arguments | tojson }}{{- '}<|eot_id|>' }}"
        "{%- else %}{{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' }}"
        "{%- if m.content is mapping or m.content is iterable and m.content is not string %}"
        "{{- m.content | tojson }}{%- else %}{{- m.content }}{%- endif %}{{- '<|eot_id|>' }}{%- endif %}{%- endfor %}"
        "{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}",
        ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        start="<|begin_of_text|>",
        end="<|end_of_text|>",
    ),
    "mistral": ChatFamily(
        "{%- if messages[0]['role'] == 'system' %}{%- set system = messages[0]['content'] %}"
        "{%- set rest = messages[1:] %}{%- else %}{%- set rest = messages %}{%- endif %}{{- bos_token }}"
        "{%- for m in rest %}{%- if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
        "{{- raise_exception('roles must alternate') }}{%- endif %}"
        "{%- if m['role'] == 'user' %}{%- if loop.first and system is defined %}"
        "{{- ' [INST] ' + system + '\\n\\n' + m['content'] + ' [/INST]' }}{%- else %}"
        "{{- ' [INST] ' + m['content'] + ' [/INST]' }}{%- endif %}"
        "{%- else %}{{- ' ' + m['content'] + eos_token }}{%- endif %}{%- endfor %}",
        (),
        start="<s>",
        end="</s>",
    ),
    "mistral tools": ChatFamily(
        "{%- if messages[0]['role'] == 'system' %}{%- set system = messages[0]['content'] %}"
        "{%- set rest = messages[1:] %}{%- else %}{%- set rest = messages %}{%- endif %}"
        "{%- set user_messages = rest | selectattr('role', 'equalto', 'user') | list %}{{- bos_token }}"
        "{%- for m in rest %}{%- if m['role'] == 'user' %}"
        "{%- if tools is not none and m == user_messages[-1] %}{{- '[AVAILABLE_TOOLS] [' }}{%- for t in tools %}"
        '{{- \'{"type": "function", "function": {\' }}{%- for k, v in t.function.items() if k != \'return\' %}'
        "{{- '\"' + k + '\": ' }}{{- v | tojson }}{%- if not loop.last %}{{- ', ' }}{%- endif %}{%- endfor %}"
        "{{- '}}' }}{%- if not loop.last %}{{- ', ' }}{%- else %}{{- ']' }}{%- endif %}{%- endfor %}"
        "{{- '[/AVAILABLE_TOOLS]' }}{%- endif %}"
        "{%- if loop.last and system is defined %}{{- '[INST] ' + system + '\\n\\n' + m['content'] + '[/INST]' }}"
        "{%- else %}{{- '[INST] ' + m['content'] + '[/INST]' }}{%- endif %}"
        "{%- elif m.tool_calls is defined and m.tool_calls is not none %}{{- '[TOOL_CALLS] [' }}"
        "{%- for c in m.tool_calls %}{%- set out = c.function | tojson %}{{- out[:-1] }}"
        "{%- if not c.id is defined or c.id | length != 9 %}{{- raise_exception('ids have nine characters') }}"
        "{%- endif %}{{- ', \"id\": \"' + c.id + '\"}' }}{%- if not loop.last %}{{- ', ' }}{%- else %}"
        "{{- ']' + eos_token }}{%- endif %}{%- endfor %}"
        "{%- elif m['role'] == 'assistant' %}{{- ' ' + m['content'] | trim + eos_token }}"
        "{%- elif m['role'] == 'tool' %}{{- '[TOOL_RESULTS] {\"content\": ' + m.content | string + ', ' }}"
        "{{- '\"call_id\": \"' + m.tool_call_id + '\"}[/TOOL_RESULTS]' }}"
        "{%- else %}{{- raise_exception('Only user, assistant and tool roles') }}{%- endif %}{%- endfor %}",
        ("[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_CALLS]", "[TOOL_RESULTS]"),
        start="<s>",
        end="</s>",
    ),
    "gemma 2": ChatFamily(
        "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}"
        "{% endif %}{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('roles must alternate') }}{% endif %}"
        "{% set role = 'model' if m['role'] == 'assistant' else m['role'] %}"
        "{{ '<start_of_turn>' + role + '\\n' + m['content'] | trim + '<end_of_turn>\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}",
        ("<start_of_turn>", "<end_of_turn>"),
        start="<bos>",
        end="<eos>",
    ),
    "gemma 3": ChatFamily(
        "{{ bos_token }}{%- if messages[0]['role'] == 'system' -%}"
        "{%- if messages[0]['content'] is string -%}{%- set prefix = messages[0]['content'] + '\\n\\n' -%}"
        "{%- else -%}{%- set prefix = messages[0]['content'][0]['text'] + '\\n\\n' -%}{%- endif -%}"
        "{%- set rest = messages[1:] -%}{%- else -%}{%- set prefix = '' -%}{%- set rest = messages -%}{%- endif -%}"
        "{%- for m in rest -%}{%- if (m['role'] == 'user') != (loop.index0 % 2 == 0) -%}"
        "{{ raise_exception('roles must alternate') }}{%- endif -%}"
        "{%- set role = 'model' if m['role'] == 'assistant' else m['role'] -%}"
        "{{ '<start_of_turn>' + role + '\\n' + (prefix if loop.first else '') }}"
        "{%- if m['content'] is string -%}{{ m['content'] | trim }}{%- elif m['content'] is iterable -%}"
        "{%- for item in m['content'] -%}{{ item['text'] | trim }}{%- endfor -%}{%- else -%}"
        "{{ raise_exception('Invalid content type') }}{%- endif -%}{{ '<end_of_turn>\\n' }}{%- endfor -%}"
        "{%- if add_generation_prompt -%}{{ '<start_of_turn>model\\n' }}{%- endif -%}",
        ("<start_of_turn>", "<end_of_turn>"),
        start="<bos>",
        end="<eos>",
    ),
    "phi 3": ChatFamily(
        "{% for m in messages %}{% if m['role'] == 'system' and m['content'] %}"
        "{{ '<|system|>\\n' + m['content'] + '<|end|>\\n' }}{% elif m['role'] == 'user' %}"
        "{{ '<|user|>\\n' + m['content'] + '<|end|>\\n' }}{% elif m['role'] == 'assistant' %}"
        "{{ '<|assistant|>\\n' + m['content'] + '<|end|>\\n' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% else %}{{ eos_token }}{% endif %}",
        ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>"),
    ),
    "phi 4": ChatFamily(
        "{% for m in messages %}{% if m['role'] == 'system' and 'tools' in m and m['tools'] is not none %}"
        "{{ '<|' + m['role'] + '|>' + m['content'] + '<|tool|>' + m['tools'] + '<|/tool|><|end|>' }}"
        "{% else %}{{ '<|' + m['role'] + '|>' + m['content'] + '<|end|>' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% else %}{{ eos_token }}{% endif %}",
        ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>", "<|tool|>", "<|/tool|>"),
    ),
    "deepseek v3": ChatFamily(
        "{% if not thinking is defined %}{% set thinking = false %}{% endif %}"
        "{% set ns = namespace(is_first=false, is_tool=false, system='', is_last_user=false) %}"
        "{%- for m in messages %}{%- if m['role'] == 'system' %}{%- if ns.system %}"
        "{%- set ns.system = ns.system + '\\n\\n' + m['content'] %}{%- else %}{%- set ns.system = m['content'] %}"
        "{%- endif %}{%- endif %}{%- endfor %}{{ bos_token }}{{ ns.system }}"
        "{%- for m in messages %}{%- if m['role'] == 'user' %}{%- set ns.is_last_user = true %}"
        "{{ '<｜User｜>' + m['content'] }}{%- endif %}"
        "{%- if m['role'] == 'assistant' and m['tool_calls'] is defined and m['tool_calls'] is not none %}"
        "{%- for c in m['tool_calls'] %}{{ '<｜Assistant｜></think>' + (m['content'] or '') + '<｜tool▁call▁begin｜>' "
        "+ c['function']['name'] }}{{ c['function']['arguments'] | tojson }}{{ '<｜tool▁call▁end｜>' }}{%- endfor %}"
        "{{ '<｜end▁of▁sentence｜>' }}{%- set ns.is_last_user = false %}"
        "{%- elif m['role'] == 'assistant' %}{%- if ns.is_last_user %}{{ '<｜Assistant｜>' }}{%- if m['prefix'] is "
        "defined and m['prefix'] and thinking %}{{ '<think>' }}{%- else %}{{ '</think>' }}{%- endif %}{%- endif %}"
        "{%- set ns.is_last_user = false %}{%- set content = m['content'] %}{%- if '</think>' in content %}"
        "{%- set content = content.split('</think>', 1)[1] %}{%- endif %}{{ content + '<｜end▁of▁sentence｜>' }}"
        "{%- endif %}{%- if m['role'] == 'tool' %}{{ '<｜tool▁output▁begin｜>' + m['content'] + "
        "'<｜tool▁output▁end｜>' }}{%- endif %}{%- endfor %}"
        "{%- if add_generation_prompt and ns.is_last_user %}{{ '<｜Assistant｜>' }}{%- if not thinking %}"
        "{{ '</think>' }}{%- else %}{{ '<think>' }}{%- endif %}{%- endif %}",
        ("<｜User｜>", "<｜Assistant｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", *THINK),
        start="<｜begin▁of▁sentence｜>",
        end="<｜end▁of▁sentence｜>",
        on={"thinking": True},
        off={"thinking": False},
    ),
    "deepseek r1": ChatFamily(
        "{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif %}"
        "{{ bos_token }}{%- for m in messages if m['role'] == 'system' %}{{ m['content'] }}{%- endfor %}"
        "{%- for m in messages %}{%- if m['role'] == 'user' %}{{ '<｜User｜>' + m['content'] }}"
        "{%- elif m['role'] == 'assistant' and m['content'] is not none and m['content'] is defined %}"
        "{% set content = m['content'] %}{% if '</think>' in content %}"
        "{% set content = content.split('</think>')[-1] %}{% endif %}"
        "{{ '<｜Assistant｜>' + content + '<｜end▁of▁sentence｜>' }}{%- endif %}{%- endfor %}"
        "{% if add_generation_prompt %}{{ '<｜Assistant｜><think>\\n' }}{% endif %}",
        ("<｜User｜>", "<｜Assistant｜>", *THINK),
        start="<｜begin▁of▁sentence｜>",
        end="<｜end▁of▁sentence｜>",
    ),
    "glm 4": ChatFamily(
        "[gMASK]<sop>{%- if tools -%}{{ '<|system|>\\n# Tools\\n' }}{% for t in tools %}{{ t | "
        "tojson(ensure_ascii=False) }}"
        "{{ '\\n' }}{% endfor %}{%- endif -%}"
        "{%- for m in messages %}{%- if m.role == 'user' -%}{{ '<|user|>\\n' + m.content }}"
        "{{- '/nothink' if (enable_thinking is defined and not enable_thinking) else '' -}}"
        "{%- elif m.role == 'assistant' -%}{{ '<|assistant|>' }}{%- if m.reasoning_content -%}"
        "{{ '\\n<think>' + m.reasoning_content.strip() + '</think>' }}{%- else -%}{{ '\\n<think></think>' }}{%- "
        "endif -%}"
        "{%- if m.content and m.content.strip() -%}{{ '\\n' + m.content.strip() }}{%- endif -%}"
        "{% for c in m.tool_calls or [] %}{{ '\\n<tool_call>' + c.function.name }}"
        "{% for k, v in c.function.arguments.items() %}{{ '\\n<arg_key>' + k + '</arg_key>\\n<arg_value>' }}"
        "{{ v if v is string else v | tojson(ensure_ascii=False) }}{{ '</arg_value>' }}{% endfor %}"
        "{{ '\\n</tool_call>' }}{% endfor %}"
        "{%- elif m.role == 'tool' -%}{%- if loop.first or messages[loop.index0 - 1].role != 'tool' -%}"
        "{{ '<|observation|>' }}{%- endif -%}{{ '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}"
        "{%- elif m.role == 'system' -%}{{ '<|system|>\\n' + m.content }}{%- endif -%}{%- endfor -%}"
        "{%- if add_generation_prompt -%}{{ '<|assistant|>' }}"
        "{{- '\\n<think></think>' if (enable_thinking is defined and not enable_thinking) else '' -}}{%- endif -%}",
        ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>", *THINK),
        on={"enable_thinking": True},
        off={"enable_thinking": False},
    ),
    "granite": ChatFamily(
        "{%- if messages[0]['role'] == 'system' %}{%- set system = messages[0]['content'] %}"
        "{%- set rest = messages[1:] %}{%- else %}{%- set system = 'You are Granite.' %}"
        "{%- if thinking %}{%- set system = system + ' Respond in two sections.' %}{%- endif %}"
        "{%- set rest = messages %}{%- endif %}"
        "{{- '<|start_of_role|>system<|end_of_role|>' + system + '<|end_of_text|>\\n' }}"
        "{%- if tools %}{{- '<|start_of_role|>tools<|end_of_role|>' }}{{- tools | tojson(indent=4) }}"
        "{{- '<|end_of_text|>\\n' }}{%- endif %}"
        "{%- if documents %}{{- '<|start_of_role|>documents<|end_of_role|>' }}{{- documents | tojson }}{%- endif %}"
        "{%- for m in rest %}{{- '<|start_of_role|>' + m['role'] + '<|end_of_role|>' }}"
        "{{- m['content'] if m['content'] else '' }}{%- if m.tool_calls %}{{- '<|tool_call|>' }}"
        "{{- m.tool_calls | map(attribute='function') | list | tojson }}{%- endif %}{{- '<|end_of_text|>\\n' }}"
        "{%- if loop.last and add_generation_prompt %}{{- '<|start_of_role|>assistant' }}"
        "{%- if controls %}{{- ' ' + controls | tojson }}{%- endif %}{{- '<|end_of_role|>' }}{%- endif %}{%- endfor %}",
        ("<|start_of_role|>", "<|end_of_role|>", "<|tool_call|>"),
        end="<|end_of_text|>",
        on={"thinking": True, "controls": {"length": "long"}},
        off={"thinking": False},
    ),
    "command r": ChatFamily(
        {
            "default": "{{ bos_token }}{% for m in messages %}{% set content = m['content'] %}"
            "{% if m['role'] == 'system' %}"
            "{{ '<|START_OF_TURN|><|SYSTEM|>' + content + '<|END_OF_TURN|>' }}{% elif m['role'] == 'user' %}"
            "{{ '<|START_OF_TURN|><|USER|>' + content.strip() + '<|END_OF_TURN|>' }}{% elif m['role'] == 'assistant' %}"
            "{{ '<|START_OF_TURN|><|CHATBOT|>' + content.strip() + '<|END_OF_TURN|>' }}{% endif %}{% endfor %}"
            "{% if add_generation_prompt %}{{ '<|START_OF_TURN|><|CHATBOT|>' }}{% endif %}",
            "tool_use": "{{ bos_token }}{%- macro doc(t) %}{{ 'def ' + t.function.name + '('}}"
            "{% for k, v in t.function.parameters.properties.items() %}{{ k + ': ' + v.type }}"
            "{% if not loop.last %}, {% endif %}{% endfor %}{{ '): pass' }}{%- endmacro %}"
            "{{ '<|START_OF_TURN|><|SYSTEM|>' }}{% for t in tools if t.function.parameters %}{{ doc(t) }}\\n{% "
            "endfor %}"
            "{{ '<|END_OF_TURN|>' }}{% for m in messages %}{% if m.role == 'tool' %}"
            "{{ '<|START_OF_TURN|><|SYSTEM|><results>' + m.content + '</results><|END_OF_TURN|>' }}{% else %}"
            "{{ '<|START_OF_TURN|><|' + m.role | upper + '|>' + (m.content or '') }}{% if m.tool_calls %}"
            "{{ '\\nAction: ' }}{% for c in m.tool_calls %}{{ c.function.name }}{{ c.function.arguments | tojson }}"
            "{% endfor %}{% endif %}{{ '<|END_OF_TURN|>' }}{% endif %}{% endfor %}"
            "{% if add_generation_prompt %}{{ '<|START_OF_TURN|><|CHATBOT|>' }}{% endif %}",
        },
        ("<|START_OF_TURN|>", "<|END_OF_TURN|>", "<|SYSTEM|>", "<|USER|>", "<|CHATBOT|>"),
        start="<BOS_TOKEN>",
        end="<EOS_TOKEN>",
    ),
    "olmo 2": ChatFamily(
        "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'system' %}{{ '<|system|>\\n' + m['content'] "
        "+ '\\n' }}"
        "{% elif m['role'] == 'user' %}{{ '<|user|>\\n' + m['content'] + '\\n' }}{% elif m['role'] == 'assistant' %}"
        "{% if not loop.last %}{{ '<|assistant|>\\n' + m['content'] + eos_token + '\\n' }}{% else %}"
        "{{ '<|assistant|>\\n' + m['content'] + eos_token }}{% endif %}{% endif %}"
        "{% if loop.last and add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}{% endfor %}",
        ("<|system|>", "<|user|>", "<|assistant|>"),
        start="<|startoftext|>",
    ),
    "smollm 3": ChatFamily(
        "{%- if enable_thinking is not defined %}{%- set enable_thinking = true %}{%- endif %}"
        "{%- set mode = '/think' if enable_thinking else '/no_think' %}"
        "{%- if messages[0].role == 'system' %}{%- set system = messages[0].content %}"
        "{%- if '/no_think' in system %}{%- set mode = '/no_think' %}{%- endif %}"
        "{%- set system = system.replace('/no_think', '').rstrip() %}{%- endif %}"
        "{{- '<|im_start|>system\\n## Metadata\\n' }}{%- set today = strftime_now('%Y') %}"
        "{{- 'Year: ' ~ today ~ '\\nReasoning Mode: ' + mode + '\\n' }}{%- if system %}{{- system + '\\n' }}{%- "
        "endif %}"
        "{%- if xml_tools %}{{- xml_tools | string }}{%- endif %}{%- if tools %}{{- '### Tools' }}"
        + _TOOL_LIST
        + "{%- endif %}{{- '<|im_end|>\\n' }}"
        "{%- for m in messages %}{%- set content = m.content if m.content is string else '' %}"
        "{%- if m.role == 'user' %}{{- '<|im_start|>user\\n' + content + '<|im_end|>\\n' }}"
        "{%- elif m.role == 'assistant' %}{% generation %}{%- if mode == '/think' %}"
        "{{- '<|im_start|>assistant\\n' + content.lstrip('\\n') + '<|im_end|>\\n' }}{%- else %}"
        "{{- '<|im_start|>assistant\\n<think>\\n\\n</think>\\n' + content.lstrip('\\n') + '<|im_end|>\\n' }}{%- "
        "endif %}"
        "{%- for c in m.tool_calls or [] %}{{- c.function | tojson }}{%- endfor %}{% endgeneration %}"
        "{%- elif m.role == 'tool' %}{{- '<|im_start|>user\\n' + content + '<|im_end|>\\n' }}{%- endif %}{%- endfor %}"
        "{%- if add_generation_prompt %}{%- if mode == '/think' %}{{- '<|im_start|>assistant\\n' }}{%- else %}"
        "{{- '<|im_start|>assistant\\n<think>\\n\\n</think>\\n' }}{%- endif %}{%- endif %}",
        (*CHATML, *THINK),
        on={"enable_thinking": True},
        off={"enable_thinking": False},
    ),
    "hermes": ChatFamily(
        {
            "default": "{{bos_token}}{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] "
            "+ '<|im_end|>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}",
            "tool_use": "{{ bos_token }}{{ '<|im_start|>system\\nYou are a function calling AI. <tools> ' }}"
            "{%- for t in tools %}{{- t | tojson }}{%- if not loop.last %}{{- '\\n' }}{%- endif %}{%- endfor %}"
            "{{- ' </tools><|im_end|>\\n' }}{%- for m in messages %}"
            "{%- if m.role == 'user' or m.role == 'system' or (m.role == 'assistant' and m.tool_calls is not "
            "defined) %}"
            "{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}"
            "{%- elif m.role == 'assistant' %}{{- '<|im_start|>' + m.role }}{%- for c in m.tool_calls %}"
            '{{- \'\\n<tool_call>\\n{"name": "\' }}{{- c.function.name }}{{- \'", "arguments": \' }}'
            "{{- c.function.arguments | tojson }}{{- '}\\n</tool_call>' }}{%- endfor %}{{- '<|im_end|>\\n' }}"
            "{%- elif m.role == 'tool' %}{%- if loop.previtem and loop.previtem.role != 'tool' %}"
            "{{- '<|im_start|>tool\\n' }}{%- endif %}{{- '<tool_response>\\n' + m.content }}"
            "{%- if not loop.last %}{{- '\\n</tool_response>\\n' }}{%- else %}{{- '\\n</tool_response>' }}{%- endif %}"
            "{%- if not loop.last and loop.nextitem.role != 'tool' %}{{- '<|im_end|>' }}"
            "{%- elif loop.last %}{{- '<|im_end|>' }}{%- endif %}{%- endif %}{%- endfor %}"
            "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{%- endif %}",
        },
        CHATML,
        start="<|begin_of_text|>",
        end="<|end_of_text|>",
    ),
    "gpt-oss": ChatFamily(
        "{%- macro types(parameters) %}{%- for k, v in (parameters.properties or {}).items() %}"
        "{{- k + ('' if k in (parameters.required or []) else '?') + ': ' + v.type + ',\\n' }}{%- endfor %}{%- "
        "endmacro %}"
        "{{- '<|start|>system<|message|>Reasoning: ' + (reasoning_effort if reasoning_effort is defined else "
        "'medium') }}"
        "{{- '\\n# Valid channels: analysis, commentary, final.<|end|>' }}"
        "{%- if messages[0].role in ('developer', 'system') %}{%- set developer = messages[0].content %}"
        "{%- set rest = messages[1:] %}{%- else %}{%- set developer = '' %}{%- set rest = messages %}{%- endif %}"
        "{%- if developer or tools %}{{- '<|start|>developer<|message|>' }}{%- if developer %}"
        "{{- '# Instructions\\n\\n' + developer }}{%- endif %}{%- if tools %}{{- '# Tools\\nnamespace functions "
        "{\\n' }}"
        "{%- for t in tools %}{{- '// ' + t.function.description + '\\ntype ' + t.function.name + ' = (_: {\\n' }}"
        "{{- types(t.function.parameters) }}{{- '}) => any;\\n' }}{%- endfor %}{{- '}' }}{%- endif %}{{- '<|end|>' }}"
        "{%- endif %}{%- set last = namespace(name=none) %}{%- for m in rest %}{%- if m.role == 'assistant' %}"
        "{%- if 'tool_calls' in m %}{%- if m.content and m.thinking %}"
        "{{- raise_exception('Cannot pass both content and thinking') }}{%- elif m.content or m.thinking %}"
        "{{- '<|start|>assistant<|channel|>analysis<|message|>' + (m.content or m.thinking) + '<|end|>' }}{%- endif %}"
        "{%- set c = m.tool_calls[0].function %}{%- set last.name = c.name %}"
        "{{- '<|start|>assistant to=functions.' + c.name + '<|channel|>commentary json<|message|>' }}"
        "{{- c.arguments | tojson }}{{- '<|call|>' }}{%- else %}"
        "{%- if m.thinking and loop.last and not add_generation_prompt %}"
        "{{- '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}{%- endif %}"
        "{{- '<|start|>assistant<|channel|>final<|message|>' + m.content }}"
        "{{- '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}{%- endif %}"
        "{%- elif m.role == 'tool' %}{%- if last.name is none %}"
        "{{- raise_exception('Message has tool role, but there was no previous assistant message with a tool call!') }}"
        "{%- endif %}{{- '<|start|>functions.' + last.name }}"
        "{{- ' to=assistant<|channel|>commentary<|message|>' + m.content | tojson + '<|end|>' }}"
        "{%- elif m.role == 'user' %}{{- '<|start|>user<|message|>' + m.content + '<|end|>' }}{%- endif %}{%- endfor %}"
        "{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}",
        ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|call|>", "<|return|>"),
        on={"reasoning_effort": "high"},
        off={"reasoning_effort": "low"},
    ),
    "kimi k2": ChatFamily(
        "{% macro content_of(m) %}{% set c = m.get('content') %}{% if c is string %}{{ c }}{% elif c is not "
        "none and c %}"
        "{% for one in c %}{{ one['text'] }}{% endfor %}{% endif %}{% endmacro %}"
        "{%- if tools -%}<|im_system|>tool_declare<|im_middle|>{{ tools | tojson(separators=(',', ':')) }}<|im_end|>"
        "{%- endif -%}{%- for m in messages -%}{%- if loop.first and m['role'] != 'system' -%}"
        "<|im_system|>system<|im_middle|>You are Kimi.<|im_end|>{%- endif -%}"
        "{%- if m['role'] == 'user' -%}<|im_user|>user<|im_middle|>{%- elif m['role'] == 'assistant' -%}"
        "<|im_assistant|>assistant<|im_middle|>{%- else -%}<|im_system|>{{ m['role'] }}<|im_middle|>{%- endif -%}"
        "{%- if m['role'] == 'assistant' and m.get('tool_calls') -%}{{ content_of(m) }}<|tool_calls_section_begin|>"
        "{%- for c in m['tool_calls'] -%}<|tool_call_begin|>{{ c['id'] }}<|tool_call_argument_begin|>"
        "{% if c['function']['arguments'] is string %}{{ c['function']['arguments'] }}{% else %}"
        "{{ c['function']['arguments'] | tojson }}{% endif %}<|tool_call_end|>{%- endfor -%}"
        "{%- elif m['role'] == 'tool' -%}## Return of {{ m.get('tool_call_id') }}\n{{ content_of(m) }}"
        "{%- else -%}{{ content_of(m) }}{%- endif -%}<|im_end|>{%- endfor -%}"
        "{%- if add_generation_prompt -%}<|im_assistant|>assistant<|im_middle|>{%- endif -%}",
        ("<|im_system|>", "<|im_user|>", "<|im_assistant|>", "<|im_middle|>", "<|im_end|>", "<|tool_call_begin|>"),
        start="[BOS]",
        end="[EOS]",
    ),
    "nemotron": ChatFamily(
        "{%- set ns = namespace(thinks=true, has_system=false) %}{%- for m in messages %}"
        "{%- if m.role == 'system' %}{%- set ns.has_system = true %}{%- if '/no_think' in m.content %}"
        "{%- set ns.thinks = false %}{%- break %}{%- endif %}{%- endif %}{%- endfor %}"
        "{%- if enable_thinking is defined %}{%- set ns.thinks = enable_thinking %}{%- endif %}{{- bos_token }}"
        "{{- '<SPECIAL_10>System\\n' }}{%- if ns.has_system %}{%- for m in messages if m.role == 'system' %}"
        "{{- m.content.replace('/no_think', '').strip() }}{%- if not loop.last %}{{- '\\n' }}{%- endif %}{%- endfor %}"
        "{%- endif %}{%- if tools %}{{- '\\n<AVAILABLE_TOOLS>[' }}{%- for t in tools %}"
        "{{- (t.function if t.function is defined else t) | tojson }}{{- ', ' if not loop.last else '' }}{%- endfor %}"
        "{{- ']</AVAILABLE_TOOLS>' }}{%- endif %}{{- '\\n' }}"
        "{%- for m in messages if m.role != 'system' %}{%- if m.role == 'user' %}"
        "{{- '<SPECIAL_11>User\\n' + m.content.strip() + '\\n' }}{%- elif m.role == 'tool' %}"
        "{%- if loop.first or loop.previtem.role != 'tool' %}{{- '<SPECIAL_11>User\\n<TOOL_RESPONSE>[' }}{%- endif %}"
        "{{- m.content }}{{- ', ' if not loop.last and loop.nextitem.role == 'tool' else ']</TOOL_RESPONSE>\\n' }}"
        "{%- else %}{%- set content = (m.content or '').split('</think>')[-1].strip() %}"
        "{{- '<SPECIAL_11>Assistant\\n' + content }}{%- if m.tool_calls %}{{- '<TOOLCALL>[' }}{%- for c in "
        "m.tool_calls %}"
        '{{- \'{"name": "\' + c.function.name + \'", "arguments": \' + (c.function.arguments if '
        "c.function.arguments is "
        "string else c.function.arguments | tojson) + '}' }}{{- ', ' if not loop.last else '' }}{%- endfor %}"
        "{{- ']</TOOLCALL>' }}{%- endif %}{{- '\\n<SPECIAL_12>\\n' }}{%- endif %}{%- endfor %}"
        "{%- if add_generation_prompt %}{{- '<SPECIAL_11>Assistant\\n' }}{%- if ns.thinks %}{{- '<think>\\n' }}"
        "{%- else %}{{- '<think></think>' }}{%- endif %}{%- endif %}",
        ("<SPECIAL_10>", "<SPECIAL_11>", "<SPECIAL_12>", *THINK),
        start="<s>",
        end="</s>",
        on={"enable_thinking": True},
        off={"enable_thinking": False},
    ),
}


def family_tokenizer(family: ChatFamily) -> Any:
    """A byte-level tokenizer with the family's tokens and its template."""
    own = [token for token in dict.fromkeys((family.start, family.end, *family.tokens)) if token]
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
        chat_template=family.template,
    )


def templates_of_families(quick: bool) -> dict[str, int]:
    """Number of prompts checked, of prompts that differ from transformers' own, and of those that both refuse.

    Each is a row of a file, and is rendered alone and in a batch.
    """
    some = [one for one in cases() if not quick or one.name.startswith("system")]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.jsonl"
        rows = [{"prompt": one.messages, "tools": one.tools, "answer": "1"} for one in some]
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
            taken = [(one, prompt) for one, prompt in zip(some, prompts, strict=True) if one.thinks == thinks]
            expected = [transformers_ids(tokenizer, family, one, variables) for one, _ in taken]
            found = [flowrt_ids(encoder, prompt) for _, prompt in taken]
            accepted = [place for place, ids in enumerate(found) if ids is not None]
            batch = encoder.encode_all([taken[place][1] for place in accepted])
            wrong += sum(ids != other for ids, other in zip(found, expected, strict=True))
            wrong += sum(found[place] != ids for place, ids in zip(accepted, batch, strict=True))
            refused += expected.count(None)
            checked += len(taken)
    return {"checked": checked, "wrong": wrong, "refused": refused}


def transformers_ids(
    tokenizer: Any, family: ChatFamily, case: Case, variables: Mapping[str, object]
) -> list[int] | None:
    """The token ids of transformers' own rendering; None where it fails, or leaves out tools or calls of them."""
    texts = family.template if isinstance(family.template, dict) else {"default": family.template}
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
        is_shown = not case.tools or isinstance(family.template, dict) or ids != rendered(None, text)
    except Exception:  # noqa: BLE001 (the template's own errors are of many kinds)
        return None
    return ids if is_shown else None


def flowrt_ids(encoder: PromptEncoder, prompt: DataPrompt) -> list[int] | None:
    """The token ids of a prompt; None if it is refused."""
    try:
        return encoder(*prompt)
    except ConfigError:
        return None
