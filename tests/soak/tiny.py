"""Writes the model of the soak run: a tiny Llama with random weights and a byte tokenizer, as a folder SGLang loads.

It needs no download, is the same on every machine, and says nothing sensible.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

POSITIONS = 16384
BYTES = 256
"""Token ids below this are bytes; above are the special tokens, and then nothing."""
VOCABULARY = 320
SPECIAL = ("<s>", "</s>", "<|user|>", "<|assistant|>", "<|system|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def write(folder: Path) -> Path:
    """Write the model into `folder`, which is made if it is missing; returns it."""
    folder.mkdir(parents=True, exist_ok=True)
    _model().save_pretrained(folder)
    _tokenizer().save(str(folder / "tokenizer.json"))
    about = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": "</s>",
        "model_max_length": POSITIONS,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(about, indent=1))
    return folder


def _model() -> LlamaForCausalLM:
    """Two layers, grouped heads that two ranks can share; weights large enough that attention is sharp and depends on
    positions, and small enough that fp32 agrees with fp64 far within the oracle's tolerance."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=POSITIONS,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        initializer_range=0.25,
        tie_word_embeddings=True,
        bos_token_id=BYTES,
        eos_token_id=BYTES + 1,
        pad_token_id=BYTES + 1,
        dtype="float32",
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return LlamaForCausalLM(config).float().eval()


def _tokenizer() -> Tokenizer:
    """One token a byte; a token's id is the byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, BYTES)]  # stand for themselves in ByteLevel
    letters = {byte: chr(byte) for byte in printable}
    letters |= {byte: chr(BYTES + at) for at, byte in enumerate(sorted({*range(BYTES)} - {*printable}))}
    assert set(letters.values()) == set(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letters[byte]: byte for byte in range(BYTES)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in SPECIAL])
    return tokenizer
