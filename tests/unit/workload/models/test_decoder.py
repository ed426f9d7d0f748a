from __future__ import annotations

import math
from collections.abc import Mapping

import pytest
import torch
from torch import nn

from atoll.config.models import SIZES, DecoderShape
from atoll.errors import ConfigError
from atoll.workload.data.corpus import stdlib_corpus
from atoll.workload.data.stream import Stream, heldout_batches, token_data
from atoll.workload.data.tokenizer import ByteTokenizer
from atoll.workload.evaluation.evaluate import heldout_loss
from atoll.workload.models.decoder import (
    MODELS,
    Decoder,
    build_decoder,
    build_model,
    language_model_loss,
    rotary_tables,
    rotate,
)
from atoll.workload.models.mlp import Mlp

NANO = DecoderShape(vocab=257, width=32, layers=4, heads=2, mlp=64)


def some_tokens(samples: int, time: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 257, (samples, time), generator=torch.Generator().manual_seed(seed))


def same_weights(one: nn.Module, two: nn.Module) -> bool:
    left, right = one.state_dict(), two.state_dict()
    return left.keys() == right.keys() and all(torch.equal(left[key], right[key]) for key in left)


def test_decoder_has_eleven_tensors_a_block_and_no_persistent_buffers() -> None:
    model = build_decoder(NANO, 0)
    names = [name for name, _ in model.named_parameters()]
    assert len([name for name in names if name.startswith("blocks.")]) == 11 * 4
    assert {name for name in names if not name.startswith("blocks.")} == {
        "embedding.weight",
        "norm.weight",
        "head.weight",
    }
    assert list(model.state_dict()) == names
    assert isinstance(model.embedding, nn.Embedding)
    assert isinstance(model.blocks, nn.ModuleList)


def test_decoder_with_tied_weights_has_one_tensor_for_embedding_and_head() -> None:
    tied = build_decoder(DecoderShape(257, 32, 2, 2, 64, tied=True), 0)
    assert tied.head.weight is tied.embedding.weight
    assert "head.weight" not in dict(tied.named_parameters())
    language_model_loss(tied, some_tokens(2, 9)).backward()
    assert tied.embedding.weight.grad is not None


def test_decoder_logits_before_a_changed_token_do_not_change() -> None:
    model = build_decoder(NANO, 1)
    tokens = some_tokens(2, 24)
    changed = tokens.clone()
    changed[:, 15] = (changed[:, 15] + 1) % 257
    with torch.no_grad():
        before, after = model(tokens), model(changed)
    assert before.shape == (2, 24, 257)
    torch.testing.assert_close(before[:, :15], after[:, :15], rtol=0, atol=1e-6)
    assert (before[:, 15:] - after[:, 15:]).abs().amax(dim=(0, 2)).min() > 1e-5


def test_decoder_reads_the_order_of_tokens() -> None:
    model = build_decoder(NANO, 1)
    with torch.no_grad():
        ab, ba = model(torch.tensor([[1, 2, 3]])), model(torch.tensor([[2, 1, 3]]))
    assert not torch.allclose(ab[:, -1], ba[:, -1], atol=1e-7)


def test_rotary_attention_depends_on_distance_only() -> None:
    """Shifting q and k by the same number of positions leaves their products alone."""
    cos, sin = rotary_tables(NANO)
    q, k = torch.randn(2, 16, generator=torch.Generator().manual_seed(0))

    def product(q_at: int, k_at: int) -> float:
        return float((rotate(q, cos[q_at, 0], sin[q_at, 0]) * rotate(k, cos[k_at, 0], sin[k_at, 0])).sum())

    assert product(9, 4) == pytest.approx(product(105, 100), abs=1e-4)
    assert abs(product(9, 4) - product(9, 5)) > 1e-3


def test_decoder_built_twice_is_the_same_and_other_seeds_differ() -> None:
    assert same_weights(build_decoder(NANO, 5), build_decoder(NANO, 5))
    assert not same_weights(build_decoder(NANO, 5), build_decoder(NANO, 6))


@pytest.mark.parametrize("name", sorted(MODELS))
def test_models_neither_read_nor_move_the_global_generator(name: str) -> None:
    numbers = dict(SIZES["nano"], vocab=257) if name == "decoder" else {"inputs": 4, "hidden": 8, "outputs": 3}
    torch.manual_seed(1)
    before = torch.get_rng_state()
    one = build_model(name, numbers, 0)
    assert torch.equal(before, torch.get_rng_state())
    torch.manual_seed(2)
    assert same_weights(one, build_model(name, numbers, 0))
    assert not same_weights(one, build_model(name, numbers, 1))
    assert all(torch.isfinite(tensor).all() for tensor in one.state_dict().values())


def test_decoder_init_has_small_weights_and_smaller_ones_onto_the_residual() -> None:
    model = build_decoder(DecoderShape(**SIZES["tiny"], vocab=257), 0)  # type: ignore[arg-type]
    weights = dict(model.named_parameters())
    assert weights["blocks.0.attention.q.weight"].std().item() == pytest.approx(0.02, rel=0.05)
    for name in ("blocks.3.attention.o.weight", "blocks.3.mlp.down.weight"):
        assert weights[name].std().item() == pytest.approx(0.02 / math.sqrt(8), rel=0.05)
    assert torch.equal(weights["norm.weight"], torch.ones(64))


def test_loss_of_a_fresh_decoder_is_that_of_guessing() -> None:
    loss = language_model_loss(build_decoder(NANO, 0), some_tokens(8, 33))
    assert loss.item() == pytest.approx(math.log(257), abs=0.05)


def test_decoder_after_sixty_steps_on_real_text_has_learnt_something() -> None:
    data = token_data(stdlib_corpus(300_000), ByteTokenizer())
    stream = Stream(data, seed=0, streams=2, batch_size=8, seq_len=32)
    heldout = heldout_batches(data, 8, 32, 4)
    model = build_decoder(NANO, 0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    before = heldout_loss(model, heldout)
    for local_step in range(60):
        loss = language_model_loss(model, stream.batch(0, local_step))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    after = heldout_loss(model, heldout)
    assert before == pytest.approx(math.log(257), abs=0.05)
    assert after < before - 1.5


def test_sequence_longer_than_the_context_is_refused() -> None:
    model = build_decoder(DecoderShape(257, 32, 1, 2, 64, context=16), 0)
    model(some_tokens(1, 16))
    with pytest.raises(ConfigError, match=r"17 tokens is longer than model\.numbers\.context = 16: set model\.numbers\.con"):
        model(some_tokens(1, 17))


def test_width_that_does_not_divide_into_heads_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"model\.numbers\.width = 32 with model\.numbers\.heads = 3: .* of 2 x heads = 6"):
        DecoderShape(257, 32, 1, 3, 64)
    with pytest.raises(ConfigError, match=r"model\.numbers\.layers = 0: must be at least 1"):
        DecoderShape(257, 32, 0, 2, 64)


def test_batch_norm_model_has_float_and_integer_buffers_that_training_moves() -> None:
    model = build_model("batchnorm_mlp", {"inputs": 4, "hidden": 8, "outputs": 3}, 0)
    buffers = dict(model.named_buffers())
    assert {name: buffer.dtype for name, buffer in buffers.items()} == {
        "norm.running_mean": torch.float32,
        "norm.running_var": torch.float32,
        "norm.num_batches_tracked": torch.int64,
    }
    assert model(torch.ones(5, 4) * torch.arange(5)[:, None]).shape == (5, 3)
    assert int(buffers["norm.num_batches_tracked"]) == 1
    assert buffers["norm.running_mean"].abs().sum() > 0


def test_mlp_maps_inputs_to_outputs() -> None:
    assert Mlp(0, inputs=4, hidden=8, outputs=3)(torch.ones(5, 4)).shape == (5, 3)


def test_build_model_by_name_is_the_decoder_of_that_shape() -> None:
    model = build_model("decoder", dict(SIZES["nano"], vocab=257), 3)
    assert isinstance(model, Decoder)
    assert model.shape == NANO
    assert same_weights(model, build_decoder(NANO, 3))


@pytest.mark.parametrize(
    ("name", "numbers", "sentence"),
    [
        ("gpt9", {}, "model.name = 'gpt9': there is no such model; there are batchnorm_mlp, decoder, mlp"),
        (
            "mlp", {"inputs": 1, "depth": 2},
            "key model.numbers.depth = 2: model 'mlp' has no number depth; it takes inputs, hidden, outputs",
        ),
        ("mlp", {"inputs": 1}, "model 'mlp' also needs hidden, outputs; it takes inputs, hidden, outputs"),
        ("mlp", {"inputs": 1.5, "hidden": 1, "outputs": 1}, "key model.numbers.inputs = 1.5: must be a whole number"),
        ("mlp", {"inputs": True, "hidden": 1, "outputs": 1}, "key model.numbers.inputs = True: must be a whole number"),
        ("mlp", {"inputs": 0, "hidden": 1, "outputs": 1}, "key model.numbers.inputs = 0: must be at least 1"),
        ("decoder", dict(SIZES["nano"], vocab=9, tied=1), "key model.numbers.tied = 1: must be true or false"),
    ],
)  # fmt: skip
def test_build_model_from_wrong_numbers_says_what_is_allowed(
    name: str, numbers: Mapping[str, int | float | bool], sentence: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        build_model(name, numbers, 0)
    assert str(caught.value) == sentence
