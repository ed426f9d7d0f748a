"""Exports without transformers: every name and shape it will look for, nothing else; and the tokenizers, against the package."""

from __future__ import annotations

import json

import pytest
import torch
from tokenizers import Tokenizer
from torch import nn

from atoll.config.models import DecoderShape
from atoll.errors import ConfigError
from atoll.tensors.access import named_tensors
from atoll.workload.data.corpus import stdlib_corpus
from atoll.workload.data.tokenizer import ByteTokenizer, train_bpe
from atoll.workload.evaluation.export import byte_characters, hf_config, hf_tensors, hf_tokenizer
from atoll.workload.models.decoder import Decoder, build_decoder

DENSE = DecoderShape(vocab=40, width=16, layers=2, heads=2, mlp=24, context=12)
TIED = DecoderShape(vocab=40, width=16, layers=2, heads=4, mlp=24, context=12, tied=True)
EXPERTS = DecoderShape(vocab=40, width=16, layers=2, heads=2, mlp=24, context=12, experts=3, top_k=2)


def qwen3_shapes(config: dict[str, object]) -> dict[str, tuple[int, ...]]:
    """What Qwen3ForCausalLM and Qwen3MoeForCausalLM hold for a config: written from their model files."""
    c = {key: value for key, value in config.items() if isinstance(value, int)}
    width, head = c["hidden_size"], c["head_dim"]
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (c["vocab_size"], width), "model.norm.weight": (width,)}
    if not config["tie_word_embeddings"]:
        found["lm_head.weight"] = (c["vocab_size"], width)
    for layer in range(c["num_hidden_layers"]):
        home = f"model.layers.{layer}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            found[f"{home}.{norm}.weight"] = (width,)
        attention = f"{home}.self_attn"
        found |= {f"{attention}.{n}.weight": (head,) for n in ("q_norm", "k_norm")}
        found[f"{attention}.q_proj.weight"] = (c["num_attention_heads"] * head, width)
        found |= {f"{attention}.{n}.weight": (c["num_key_value_heads"] * head, width) for n in ("k_proj", "v_proj")}
        found[f"{attention}.o_proj.weight"] = (width, c["num_attention_heads"] * head)
        hidden, places = c["intermediate_size"], [f"{home}.mlp"]
        if config["model_type"] == "qwen3_moe":
            found[f"{home}.mlp.gate.weight"] = (c["num_experts"], width)
            hidden, places = c["moe_intermediate_size"], [f"{home}.mlp.experts.{e}" for e in range(c["num_experts"])]
        for place in places:
            found |= {f"{place}.{n}.weight": (hidden, width) for n in ("gate_proj", "up_proj")}
            found[f"{place}.down_proj.weight"] = (width, hidden)
    return found


@pytest.mark.parametrize("shape", [DENSE, TIED, EXPERTS], ids=["dense", "tied", "experts"])
def test_export_has_the_names_and_shapes_of_qwen3_and_the_models_own_numbers(shape: DecoderShape) -> None:
    model = build_decoder(shape, 0)
    config = hf_config(shape, torch.float32, 39)
    tensors = hf_tensors(shape, named_tensors(model))
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == qwen3_shapes(config)
    assert sum(t.numel() for t in tensors.values()) == sum(p.numel() for p in model.parameters())
    assert torch.equal(tensors["model.layers.1.self_attn.k_proj.weight"], model.get_parameter("blocks.1.attention.k.weight"))
    if shape.experts:
        down = model.get_parameter("blocks.1.mlp.down")
        assert torch.equal(tensors["model.layers.1.mlp.experts.2.down_proj.weight"], down[2])
        router = model.get_parameter("blocks.0.mlp.router.weight")
        assert torch.equal(tensors["model.layers.0.mlp.gate.weight"], router)
        assert config["norm_topk_prob"] is True
        assert config["router_aux_loss_coef"] == pytest.approx(0.005)


class Theirs(nn.Module):
    """Qwen3's arithmetic, written plainly from its paper and its names: another pair of eyes on rotation, norms and routing."""

    def __init__(self, config: dict[str, object], tensors: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self.c, self.t = config, tensors

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + float(str(self.c["rms_norm_eps"]))) * self.t[name]

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.t["model.embed_tokens.weight"][tokens]
        for layer in range(int(str(self.c["num_hidden_layers"]))):
            home = f"model.layers.{layer}"
            x = x + self.attention(self.norm(x, f"{home}.input_layernorm.weight"), f"{home}.self_attn")
            x = x + self.mlp(self.norm(x, f"{home}.post_attention_layernorm.weight"), f"{home}.mlp")
        head = self.t.get("lm_head.weight", self.t["model.embed_tokens.weight"])
        return self.norm(x, "model.norm.weight") @ head.T

    def attention(self, x: torch.Tensor, home: str) -> torch.Tensor:
        heads, size, time = int(str(self.c["num_attention_heads"])), int(str(self.c["head_dim"])), x.shape[1]
        q, k, v = ((x @ self.t[f"{home}.{n}_proj.weight"].T).unflatten(-1, (heads, size)) for n in "qkv")
        q, k = self.norm(q, f"{home}.q_norm.weight"), self.norm(k, f"{home}.k_norm.weight")
        angles = torch.arange(time)[:, None] / float(str(self.c["rope_theta"])) ** (torch.arange(0, size, 2) / size)
        cos, sin = (torch.cat((f(angles), f(angles)), -1)[:, None] for f in (torch.cos, torch.sin))
        q, k = (t * cos + torch.cat((-t[..., size // 2 :], t[..., : size // 2]), -1) * sin for t in (q, k))
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / size**0.5
        scores = scores.masked_fill(torch.ones(time, time).triu(1).bool(), float("-inf")).softmax(-1)
        return torch.einsum("bhqk,bkhd->bqhd", scores, v).flatten(2) @ self.t[f"{home}.o_proj.weight"].T

    def gated(self, x: torch.Tensor, home: str) -> torch.Tensor:
        gate, up, down = (self.t[f"{home}.{n}_proj.weight"] for n in ("gate", "up", "down"))
        return (nn.functional.silu(x @ gate.T) * (x @ up.T)) @ down.T

    def mlp(self, x: torch.Tensor, home: str) -> torch.Tensor:
        if self.c["model_type"] == "qwen3":
            return self.gated(x, home)
        probabilities = (x @ self.t[f"{home}.gate.weight"].T).softmax(-1)
        best = probabilities.topk(int(str(self.c["num_experts_per_tok"])), dim=-1)
        weights = torch.zeros_like(probabilities).scatter(-1, best.indices, best.values / best.values.sum(-1, keepdim=True))
        experts = range(int(str(self.c["num_experts"])))
        return torch.stack([weights[..., e : e + 1] * self.gated(x, f"{home}.experts.{e}") for e in experts]).sum(0)


@pytest.mark.parametrize("shape", [DENSE, TIED, EXPERTS], ids=["dense", "tied", "experts"])
def test_qwen3s_arithmetic_on_the_exported_tensors_gives_our_logits(shape: DecoderShape) -> None:
    model: Decoder = build_decoder(shape, 0)
    chance = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():  # far from the initial weights, whose norms are all ones
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=chance))
        tokens = torch.randint(0, 40, (2, 12), generator=chance)
        theirs = Theirs(hf_config(shape, torch.float32, 39), hf_tensors(shape, named_tensors(model)))
        torch.testing.assert_close(theirs(tokens), model(tokens), rtol=0, atol=1e-4)


def test_shared_experts_are_refused_with_what_would_be_right() -> None:
    shape = DecoderShape(vocab=40, width=16, layers=2, heads=2, mlp=24, experts=3, shared=1)
    with pytest.raises(ConfigError, match=r"model\.numbers\.shared = 1: Qwen3-MoE has no .* model\.numbers\.shared = 0"):
        hf_config(shape, torch.float32, 39)


ODD = [
    "", " ", "\n\n  \t x", "naïve  Füße…", "日本語のテキスト " * 30, "a" * 200, "1234567 " * 20, "\x00\x1f\x7f\xa0\xad",
    "don't_stop!! ",
]  # fmt: skip


@pytest.mark.parametrize("merges", [0, 300])
def test_tokenizers_gives_our_ids_on_any_text(merges: int) -> None:
    documents = [document for document in stdlib_corpus(300_000).documents if len(document) < 20_000][:15]
    ours = train_bpe(b"".join(documents[:5]), 257 + merges) if merges else ByteTokenizer()
    theirs = Tokenizer.from_str(json.dumps(hf_tokenizer(ours)))
    assert theirs.get_vocab_size() == ours.vocab_size
    for text in [*ODD, *(document.decode() for document in documents)]:
        ids = theirs.encode(text).ids
        assert ids == ours.encode(text.encode()), text[:80]
        assert theirs.decode(ids) == text
    assert theirs.encode("<|endoftext|>").ids == [256]


def test_bytes_have_a_character_each_and_the_ends_name_is_found() -> None:
    assert len(set(byte_characters())) == 256
    assert byte_characters()[ord(" ")] == "Ġ"
    vocab = hf_tokenizer(ByteTokenizer())["model"]["vocab"]
    assert (vocab["<|endoftext|>"], vocab["A"]) == (256, 65)
