"""Task of `compare_trl.py`: from random weights, learn to write the kind of characters that the prompt names."""

import json
import random
import string
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

KINDS = {"digits": string.digits, "vowels": "aeiou", "early": string.ascii_lowercase[:10]}
CHARACTERS = string.ascii_lowercase + string.digits + ":"
PROBLEMS = 4096


def make_model(folder: Path, seed: int) -> None:
    """A Qwen2 of a million parameters with a token for each character, and an end token."""
    tokens = ["<pad>", *CHARACTERS, "<eos>"]
    tokenizer = Tokenizer(models.WordLevel({token: index for index, token in enumerate(tokens)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=len(tokens),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=len(tokens) - 1,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>").save_pretrained(folder)


def make_data(path: Path, seed: int) -> None:
    """Rows of a prompt such as ``kx2:vowels:`` and the characters that count."""
    dice = random.Random(f"peer task {seed}")
    with path.open("w") as file:
        for _ in range(PROBLEMS):
            kind = dice.choice(list(KINDS))
            noise = "".join(dice.choices(string.ascii_lowercase + string.digits, k=3))
            file.write(json.dumps({"prompt": f"{noise}:{kind}:", "answer": KINDS[kind]}) + "\n")
