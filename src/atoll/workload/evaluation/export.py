"""A trained decoder as Hugging Face's Qwen3, or Qwen3-MoE with experts, which `transformers` loads without Atoll's code.

Only names change: both models normalise queries and keys per head, rotate the halves of a head by position and gate by silu, and
choose and weight experts alike. Tokenizers become a `tokenizer.json` that gives the same ids. As in GPT-2 each byte is first
written as one printable character, so that a regular expression over characters there equals one over bytes here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec
import torch
from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from torch import Tensor

from atoll.config.models import DecoderShape
from atoll.errors import ConfigError
from atoll.workload.data.tokenizer import END_TEXT, BpeTokenizer, ByteTokenizer
from atoll.workload.models.decoder import INIT_STD, NORM_EPS, ROPE_BASE

_TOP: Final = {
    "embedding.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
}
_BLOCK: Final = {
    "norm1.weight": "input_layernorm.weight",
    "attention.q.weight": "self_attn.q_proj.weight",
    "attention.k.weight": "self_attn.k_proj.weight",
    "attention.v.weight": "self_attn.v_proj.weight",
    "attention.o.weight": "self_attn.o_proj.weight",
    "attention.q_norm.weight": "self_attn.q_norm.weight",
    "attention.k_norm.weight": "self_attn.k_norm.weight",
    "norm2.weight": "post_attention_layernorm.weight",
    "mlp.gate.weight": "mlp.gate_proj.weight",
    "mlp.up.weight": "mlp.up_proj.weight",
    "mlp.down.weight": "mlp.down_proj.weight",
    "mlp.router.weight": "mlp.gate.weight",
}
_EXPERTS: Final = {"mlp.gate": "gate_proj", "mlp.up": "up_proj", "mlp.down": "down_proj"}


def refuse_unexportable(shape: DecoderShape) -> None:
    if shape.shared and shape.experts:
        raise ConfigError(
            f"model.numbers.shared = {shape.shared}: Qwen3-MoE has no shared experts, and no other architecture of transformers "
            f"has them with this routing and norms on queries and keys; a model with model.numbers.shared = 0 can be exported"
        )


def hf_config(shape: DecoderShape, dtype: torch.dtype, end_of_document: int) -> dict[str, Any]:
    refuse_unexportable(shape)
    head = shape.width // shape.heads
    config: dict[str, Any] = {
        "architectures": ["Qwen3MoeForCausalLM" if shape.experts else "Qwen3ForCausalLM"],
        "model_type": "qwen3_moe" if shape.experts else "qwen3",
        "attention_bias": False, "attention_dropout": 0.0, "head_dim": head, "hidden_act": "silu", "hidden_size": shape.width,
        "initializer_range": INIT_STD, "intermediate_size": shape.mlp, "max_position_embeddings": shape.context,
        "max_window_layers": shape.layers, "num_attention_heads": shape.heads, "num_hidden_layers": shape.layers,
        "num_key_value_heads": shape.heads, "rms_norm_eps": NORM_EPS, "rope_scaling": None, "rope_theta": ROPE_BASE,
        "sliding_window": None, "tie_word_embeddings": shape.tied, "torch_dtype": str(dtype).removeprefix("torch."),
        "use_cache": True, "use_sliding_window": False, "vocab_size": shape.vocab,
        "bos_token_id": end_of_document, "eos_token_id": end_of_document,
    }  # fmt: skip
    if shape.experts:
        # Their loss sums over the chosen experts, ours takes the mean.
        config |= {
            "decoder_sparse_step": 1, "mlp_only_layers": [], "moe_intermediate_size": shape.mlp, "norm_topk_prob": True,
            "num_experts": shape.experts, "num_experts_per_tok": shape.top_k, "output_router_logits": False,
            "router_aux_loss_coef": shape.balance / shape.top_k,
        }  # fmt: skip
    return config


def hf_generation_config(end_of_document: int) -> dict[str, Any]:
    return {"bos_token_id": end_of_document, "eos_token_id": end_of_document, "pad_token_id": end_of_document, "do_sample": False}


def hf_tensors(shape: DecoderShape, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """By Hugging Face's names. A tied head is left out: their model ties it itself."""
    refuse_unexportable(shape)
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if name in _TOP:
            if not (shape.tied and name == "head.weight"):
                found[_TOP[name]] = tensor
            continue
        _, layer, rest = name.split(".", 2)
        home = f"model.layers.{layer}"
        if rest in _EXPERTS:
            for expert, matrix in enumerate(tensor):
                found[f"{home}.mlp.experts.{expert}.{_EXPERTS[rest]}.weight"] = matrix
        else:
            found[f"{home}.{_BLOCK[rest]}"] = tensor
    return {name: tensor.detach().clone().contiguous() for name, tensor in found.items()}


# ---------------------------------------------------------------- tokenizers


def byte_characters() -> list[str]:
    """GPT-2's character for each byte: a printable byte is itself, the others are characters from 256 on."""
    plain = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in plain else chr(next(others)) for byte in range(256)]


def hf_tokenizer(tokenizer: ByteTokenizer | BpeTokenizer) -> dict[str, Any]:
    """tokenizer.json of one of our own tokenizers."""
    characters = byte_characters()
    pieces = [*characters, END_TEXT]
    merges = tokenizer.merges if isinstance(tokenizer, BpeTokenizer) else ()
    for left, right in merges:
        pieces.append(pieces[left] + pieces[right])
    vocab = {piece: token for token, piece in enumerate(pieces)}
    engine = Tokenizer(BPE(vocab, [(pieces[left], pieces[right]) for left, right in merges]))
    written = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    words = pre_tokenizers.Split(Regex(_word_expression(characters)), "isolated")
    engine.pre_tokenizer = pre_tokenizers.Sequence([written, words]) if merges else written
    engine.decoder = decoders.ByteLevel()
    engine.add_special_tokens([END_TEXT])
    found: dict[str, Any] = msgspec.json.decode(engine.to_str())
    return found


def _word_expression(characters: list[str]) -> str:
    """`tokenizer.WORD` over the characters that stand for bytes."""

    def of(*ranges: tuple[int, int]) -> str:
        return "".join(f"\\x{{{ord(characters[byte]):04X}}}" for first, last in ranges for byte in range(first, last + 1))

    blank = of((0x09, 0x0D), (0x20, 0x20))
    space, letter, digit = of((0x20, 0x20)), of((0x41, 0x5A), (0x61, 0x7A), (0x5F, 0x5F), (0x80, 0xFF)), of((0x30, 0x39))
    return (
        f"{space}?[{letter}]{{1,64}}|{space}?[{digit}]{{1,64}}|{space}?[^{blank}{letter}{digit}]{{1,64}}"
        f"|[{blank}]{{1,64}}(?![^{blank}])|[{blank}]{{1,64}}"
    )


def hf_tokenizer_config(context: int, end: str) -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": context, "clean_up_tokenization_spaces": False,
        "bos_token": end, "eos_token": end, "pad_token": end,
    }  # fmt: skip
