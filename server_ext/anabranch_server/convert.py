"""Converts a GGUF file of the llama architecture into a Hugging Face folder of fp32 weights, and tries the result.

It fetches nothing; `pull.py` does. The heavy libraries are imported where they are used.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from anabranch_server.pull import MB, Progress, PullError, Source

_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_IN_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def convert_gguf(source: Source, gguf_file: Path, out: Path, progress: Progress) -> None:
    """Writes config, generation config, tokenizer and weights into `out`, then loads and tries the result.

    Written out by hand because the general GGUF reader of transformers needs a further package, takes its end-of-text
    token from the wrong field and drops the splitting of numbers into digits.
    """
    try:
        import gguf
        import safetensors.numpy
        import tokenizers  # noqa: F401
        import torch  # noqa: F401
        import transformers
    except ImportError as error:
        raise PullError("missing_extra", f"{error}", "Run: pip install 'anabranch[server]'") from error
    reader = gguf.GGUFReader(gguf_file)
    meta = {key: field.contents() for key, field in reader.fields.items()}
    config = _config(meta, tied=all(tensor.name != "output.weight" for tensor in reader.tensors))
    config.save_pretrained(out)
    ids = {key: getattr(config, key) for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    transformers.GenerationConfig(**ids).save_pretrained(out)
    _tokenizer(meta).save_pretrained(out)
    weights: dict[str, Any] = {}
    for done, tensor in enumerate(reader.tensors, 1):
        weights[_weight_name(tensor.name)] = _unpermuted(tensor, config, gguf.dequantize)
        progress.count("tensors", done, len(reader.tensors))
    progress.step(f"4/5 write: {sum(w.nbytes for w in weights.values()) // MB} MB")
    safetensors.numpy.save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    progress.step("5/5 check: load it, and continue one sentence")
    _check(source, out)


def _config(meta: dict[str, Any], tied: bool) -> Any:
    from transformers import LlamaConfig

    if meta["general.architecture"] != "llama":
        raise PullError(
            "conversion_failed", f"architecture {meta['general.architecture']!r}", "Only llama is converted"
        )
    heads = meta["llama.attention.head_count"]
    return LlamaConfig(
        architectures=["LlamaForCausalLM"],
        dtype="float32",
        vocab_size=len(meta["tokenizer.ggml.tokens"]),
        hidden_size=meta["llama.embedding_length"],
        intermediate_size=meta["llama.feed_forward_length"],
        num_hidden_layers=meta["llama.block_count"],
        num_attention_heads=heads,
        num_key_value_heads=meta["llama.attention.head_count_kv"],
        head_dim=meta["llama.embedding_length"] // heads,
        max_position_embeddings=meta["llama.context_length"],
        # The file holds it as fp32: 9.999999747378752e-06 was 1e-05.
        rms_norm_eps=float(f"{meta['llama.attention.layer_norm_rms_epsilon']:.6g}"),
        rope_parameters={"rope_type": "default", "rope_theta": float(meta["llama.rope.freq_base"])},
        tie_word_embeddings=tied,
        bos_token_id=meta["tokenizer.ggml.bos_token_id"],
        eos_token_id=meta["tokenizer.ggml.eos_token_id"],
        pad_token_id=meta["tokenizer.ggml.padding_token_id"],
    )


def _tokenizer(meta: dict[str, Any]) -> Any:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    if meta["tokenizer.ggml.pre"] != "smollm":
        raise PullError("conversion_failed", f"tokenizer {meta['tokenizer.ggml.pre']!r}", "Only smollm is converted")
    words = meta["tokenizer.ggml.tokens"]
    merges = [(left, right) for left, right in (merge.split(" ") for merge in meta["tokenizer.ggml.merges"])]
    core = Tokenizer(models.BPE(vocab={word: index for index, word in enumerate(words)}, merges=merges))
    digits = pre_tokenizers.Digits(individual_digits=True)
    core.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])  # type: ignore[assignment]
    core.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    control = [word for word, kind in zip(words, meta["tokenizer.ggml.token_type"], strict=True) if kind == 3]
    core.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in control])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token=words[meta["tokenizer.ggml.bos_token_id"]],
        eos_token=words[meta["tokenizer.ggml.eos_token_id"]],
        pad_token=words[meta["tokenizer.ggml.padding_token_id"]],
        unk_token=words[meta["tokenizer.ggml.unknown_token_id"]],
        model_max_length=meta["llama.context_length"],
        clean_up_tokenization_spaces=False,
        chat_template=meta["tokenizer.chat_template"],
    )


def _weight_name(name: str) -> str:
    if name in _TOP:
        return _TOP[name]
    _, layer, part, kind = name.split(".")
    return f"model.layers.{layer}.{_IN_BLOCK[part]}.{kind}"


def _unpermuted(tensor: Any, config: Any, dequantize: Callable[..., Any]) -> Any:
    """The tensor as fp32 `[rows, columns]`. GGUF interleaves the two halves of each rotary head; here they follow each
    other again."""
    import numpy

    weight = numpy.ascontiguousarray(dequantize(tensor.data, tensor.tensor_type), dtype=numpy.float32)
    part = tensor.name.split(".")[-2]
    if part not in ("attn_q", "attn_k"):
        return weight
    heads = config.num_attention_heads if part == "attn_q" else config.num_key_value_heads
    pairs = weight.reshape(heads, weight.shape[0] // heads // 2, 2, weight.shape[1])
    return numpy.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(weight.shape)


def _check(source: Source, folder: Path) -> None:
    """Loads the folder the way every program will, and asserts what they rely on."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, logging

    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        folder, local_files_only=True, dtype=torch.float32, output_loading_info=True
    )
    model, info = loaded
    prompt, expected = source.probe
    ids = tokenizer(prompt, return_tensors="pt")
    with torch.inference_mode():
        tokens = model.generate(**ids, max_new_tokens=4, do_sample=False)[0, ids["input_ids"].shape[1] :]
    text = tokenizer.decode(tokens)
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )
    faults = {
        "weights do not match the model": any(info[key] for key in ("missing_keys", "unexpected_keys")),
        f"the model continues {prompt!r} with {text!r}": not text.startswith(expected),
        "text does not survive the tokenizer": tokenizer.decode(ids["input_ids"][0]) != prompt,
        "the end-of-text token differs": tokenizer.eos_token_id != model.generation_config.eos_token_id,
        "a special token is not one id": len(tokenizer.encode(tokenizer.eos_token, add_special_tokens=False)) != 1,
        "the chat template does not render": "hi" not in chat or chat.count(tokenizer.eos_token) < 1,
    }
    for fault, present in faults.items():
        if present:
            raise PullError(
                "conversion_failed", fault, "Reinstall the pinned versions: pip install 'anabranch[server]'"
            )
