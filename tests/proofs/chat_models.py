"""Small tokenizers with chat templates in the form of six families of models."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

CORPUS = (
    "What is one and one? You are a helpful, terse assistant. The answer is two. user assistant system model\n",
) * 3


@dataclass(frozen=True)
class Family:
    """A family of chat models.

    Attributes:
        template: Jinja text.
        rendered: a question with a system message, as the template must render it; {s}, {u} are the contents.
        start: the start token; empty: none.
        end: the token at which the tokenizer ends a text.
        turn: the token with which the template ends a response.
        special: further tokens of the template.
        adds_start: whether the tokenizer puts the start token before each text.
        takes_system: whether the template takes a system message; otherwise it raises.
        variables: variables of the template with which ``rendered`` was made.
    """

    template: str
    rendered: str
    end: str
    turn: str
    start: str = ""
    special: tuple[str, ...] = ()
    adds_start: bool = False
    takes_system: bool = True
    variables: Mapping[str, object] = field(default_factory=dict)


FAMILIES = {
    "qwen": Family(
        template=(
            "{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{%- endfor %}"
            "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}"
            "{%- if enable_thinking is defined and not enable_thinking %}"
            "{{ '<think>\\n\\n</think>\\n\\n' }}{%- endif %}"
            "{%- endif %}"
        ),
        rendered=(
            "<|im_start|>system\n{s}<|im_end|>\n<|im_start|>user\n{u}<|im_end|>\n<|im_start|>assistant\n"
            "<think>\n\n</think>\n\n"
        ),
        end="<|endoftext|>",
        turn="<|im_end|>",
        special=("<|im_start|>", "<think>", "</think>"),
        variables={"enable_thinking": False},
    ),
    "llama": Family(
        template=(
            "{{- bos_token }}{%- for m in messages %}"
            "{{- '<|start_header_id|>' + m['role'] + '<|end_header_id|>\\n\\n' + m['content'] | trim + '<|eot_id|>' }}"
            "{%- endfor %}"
            "{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"
        ),
        rendered=(
            "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\n{s}<|eot_id|>"
            "<|start_header_id|>user<|end_header_id|>\n\n{u}<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
        ),
        start="<|begin_of_text|>",
        end="<|end_of_text|>",
        turn="<|eot_id|>",
        special=("<|start_header_id|>", "<|end_header_id|>"),
        adds_start=True,
    ),
    "mistral": Family(
        template=(
            "{%- if messages[0].role == 'system' %}{%- set system = messages[0].content %}"
            "{%- set rest = messages[1:] %}"
            "{%- else %}{%- set system = '' %}{%- set rest = messages %}{%- endif %}{{- bos_token }}"
            "{%- for m in rest %}{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
            "{{- raise_exception('roles must alternate user and assistant') }}{%- endif %}"
            "{%- if m.role == 'user' %}{{- '[INST] ' + (system + '\\n\\n' if system and loop.last else '') + m.content "
            "+ '[/INST]' }}{%- else %}{{- ' ' + m.content + eos_token }}{%- endif %}{%- endfor %}"
        ),
        rendered="<s>[INST] {s}\n\n{u}[/INST]",
        start="<s>",
        end="</s>",
        turn="</s>",
        special=("[INST]", "[/INST]"),
        adds_start=True,
    ),
    "gemma": Family(
        template=(
            "{{ bos_token }}{% if messages[0]['role'] == 'system' %}"
            "{{ raise_exception('no role system here') }}{% endif %}"
            "{% for m in messages %}{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\\n' "
            "+ m.content | trim + '<end_of_turn>\\n' }}{% endfor %}"
            "{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"
        ),
        rendered="<bos><start_of_turn>user\n{u}<end_of_turn>\n<start_of_turn>model\n",
        start="<bos>",
        end="<eos>",
        turn="<end_of_turn>",
        special=("<start_of_turn>",),
        adds_start=True,
        takes_system=False,
    ),
    "phi": Family(
        template=(
            "{% for m in messages %}{{ '<|' + m.role + '|>\\n' + m.content + '<|end|>\\n' }}{% endfor %}"
            "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"
        ),
        rendered="<|system|>\n{s}<|end|>\n<|user|>\n{u}<|end|>\n<|assistant|>\n",
        end="<|endoftext|>",
        turn="<|end|>",
        special=("<|system|>", "<|user|>", "<|assistant|>"),
    ),
    "deepseek": Family(
        template=(
            "{% set ns = namespace(system='') %}{%- for m in messages if m.role == 'system' %}"
            "{%- set ns.system = ns.system + m.content %}{%- endfor %}{{ bos_token }}{{ ns.system }}"
            "{%- for m in messages %}{%- if m.role == 'user' %}{{ '<｜User｜>' + m.content }}"
            "{%- elif m.role == 'assistant' %}{{ '<｜Assistant｜>' + m.content + '<｜end▁of▁sentence｜>' }}{%- endif %}"
            "{%- endfor %}{% if add_generation_prompt %}{{ '<｜Assistant｜>' }}{% endif %}"
        ),
        rendered="<｜begin▁of▁sentence｜>{s}<｜User｜>{u}<｜Assistant｜>",
        start="<｜begin▁of▁sentence｜>",
        end="<｜end▁of▁sentence｜>",
        turn="<｜end▁of▁sentence｜>",
        special=("<｜User｜>", "<｜Assistant｜>"),
        adds_start=True,
    ),
}


def chat_tokenizer(family: Family) -> Any:
    """A byte-level tokenizer with the family's special tokens and its template."""
    own = [token for token in dict.fromkeys((family.start, family.end, family.turn, *family.special)) if token]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<pad>", *own],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    if family.adds_start:
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
