"""LeNet-5, ResNet-18 and the decoder with eyes: sizes, seeds, and what exact match means."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from atoll.errors import ConfigError
from atoll.tasks.vision import VISION_MODELS
from atoll.tensors.layout import build_layout
from atoll.workload.data.images import Scale
from atoll.workload.data.questions import IGNORED_TARGET, Encoded, Questions, digits_grid, prompt
from atoll.workload.evaluation.evaluate import heldout_classes
from atoll.workload.models.decoder import build_model
from atoll.workload.models.vision import LeNet5, ResNet, classification_loss
from atoll.workload.models.vlm import answer, answer_loss, heldout_answers, patchify, vision_language

EYES = {"channels": 1, "size": 16, "width": 32, "layers": 2, "heads": 2, "mlp": 64}


def size_of(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def test_sizes_are_those_of_the_papers_with_a_stem_for_small_images() -> None:
    assert size_of(LeNet5(0)) == 61_706
    assert size_of(ResNet(0)) == 11_173_962
    assert len(ResNet(0, width=4).blocks) == 8


@pytest.mark.parametrize(("name", "numbers"), [("lenet5", {}), ("resnet18", {"width": 4}), ("vlm", EYES)])
def test_weights_come_from_the_seed_alone_and_leave_the_global_generator_alone(name: str, numbers: dict[str, int]) -> None:
    torch.manual_seed(1)
    one = build_model(name, numbers, 7, VISION_MODELS)
    drawn = torch.rand(3)
    torch.manual_seed(1)
    assert torch.equal(torch.rand(3), drawn)
    torch.manual_seed(2)
    again, other = (build_model(name, numbers, seed, VISION_MODELS) for seed in (7, 8))
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), again.parameters(), strict=True))
    assert any(not torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize("size", [4, 8, 14, 28, 32])
def test_lenet_takes_images_of_any_usual_size(size: int) -> None:
    assert LeNet5(0, size=size, channels=3)(torch.zeros(2, 3, size, size)).shape == (2, 10)
    with pytest.raises(ConfigError, match=r"images are 3 x 3: .* at least 4 x 4"):
        LeNet5(0, size=3)


def test_resnet_halves_three_times_and_its_blocks_are_layers() -> None:
    model = ResNet(0, width=4)
    assert model(torch.zeros(2, 3, 8, 8)).shape == (2, 10)
    layout = build_layout(model, "layer", layers_per_fragment=2)
    assert len(layout.fragments) == 5  # eight blocks in pairs, and the rest
    assert all(fragment.buffers for fragment in layout.fragments)


def test_resnet_trains_on_one_image_that_is_one_value_a_channel_at_last() -> None:
    """So far lost slices may shrink a batch of small images."""
    model, pair = ResNet(0, width=4), torch.rand(2, 3, 8, 8)
    model(pair)
    last, first = model.blocks[-1].norm2, model.stem_norm
    before, seen = last.running_mean.clone(), first.running_mean.clone()
    classification_loss(model, (pair[:1], torch.tensor([3]))).backward()
    assert torch.equal(last.running_mean, before), "one value has no deviation to remember"
    assert not torch.equal(first.running_mean, seen), "8 x 8 values have"
    assert model.head.weight.grad is not None and model.head.weight.grad.isfinite().all() and model.head.weight.grad.any()
    plain = nn.BatchNorm2d(4)
    plain.load_state_dict(first.state_dict())
    x = torch.rand(3, 4, 2, 2)
    assert torch.equal(first(x), plain(x))


def test_bfloat16_classifiers_take_float_images() -> None:
    model = ResNet(0, width=4).to(torch.bfloat16)
    batch = (torch.randn(4, 3, 8, 8), torch.tensor([0, 1, 2, 3]))
    classification_loss(model, batch).backward()
    assert model.stem.weight.grad is not None


def test_accuracy_counts_images_and_not_batches() -> None:
    """The last batch may be smaller."""
    model = nn.Identity()
    batches = [(torch.eye(4), torch.tensor([0, 1, 2, 0])), (torch.eye(4)[:1], torch.tensor([1]))]
    loss, accuracy = heldout_classes(model, batches)
    assert accuracy == 3 / 5
    expected = torch.nn.functional.cross_entropy(torch.cat([b[0] for b in batches]), torch.cat([b[1] for b in batches]))
    assert loss == pytest.approx(float(expected), rel=1e-6)


# ---------------------------------------------------------------- the decoder with eyes


def test_patches_are_cut_row_by_row() -> None:
    images = torch.arange(16.0).reshape(1, 1, 4, 4)
    assert patchify(images, 2).tolist() == [[[0, 1, 4, 5], [2, 3, 6, 7], [8, 9, 12, 13], [10, 11, 14, 15]]]


def test_every_byte_sees_the_whole_image_and_no_later_byte() -> None:
    model = vision_language(0, **EYES)
    images, tokens = torch.randn(1, 1, 16, 16), torch.randint(0, 256, (1, 9))
    before = model(images, tokens)
    assert before.shape == (1, 9, 257)
    changed = tokens.clone()
    changed[0, 5] += 1
    after = model(images, changed)
    assert torch.equal(after[:, :5], before[:, :5]) and not torch.equal(after[:, 5:], before[:, 5:])
    for corner in ((0, 0), (15, 15)):
        other = images.clone()
        other[0, 0, corner[0], corner[1]] += 1.0
        assert (model(other, tokens) != before).any(dim=2).all()


def test_sizes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"model.numbers.patch = 5: images are 16 x 16"):
        vision_language(0, **EYES, patch=5)
    with pytest.raises(ConfigError, match=r"16 patches and 9 tokens need model.numbers.context of at least 25"):
        vision_language(0, **EYES, context=24)(torch.zeros(1, 1, 16, 16), torch.zeros(1, 9, dtype=torch.int64))
    with pytest.raises(ConfigError, match="has no number depth"):
        build_model("vlm", EYES | {"depth": 2}, 0, VISION_MODELS)


def memorised() -> tuple[nn.Module, Questions, Scale]:
    """A model that has learnt twelve samples by heart, nearly."""
    data = digits_grid(grids=(3, 1)).train
    scale = Scale(data.pixels)
    model = vision_language(0, **EYES, context=80)
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-3)
    batch = Encoded(data, scale, 64).batch(range(12))
    for _ in range(40):
        answer_loss(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, data, scale


def test_exact_match_is_what_greedy_decoding_byte_by_byte_gets_right() -> None:
    model, data, scale = memorised()
    said = [answer(model, scale(data.pixels[at]), q) for at, (q, _) in zip(data.image_index.tolist(), data.texts, strict=True)]
    right = sum(said[n] == data.texts[n][1] for n in range(12))
    batches = [Encoded(data, scale, 64).batch(part) for part in (range(8), range(8, 12))]
    loss, accuracy = heldout_answers(model, batches)
    assert accuracy == right / 12 and right > 0, said
    assert 0 < loss < 2
    assert model.training


def test_answer_ends_with_the_context_and_a_question_too_long_for_it_is_refused() -> None:
    model = vision_language(0, **EYES, context=16 + 12)
    model.decoder.head.weight.data.zero_()  # every byte is as likely: the first, 0, is said for ever
    question = "how many?"
    assert (before := len(prompt(question))) == 10
    assert answer(model, torch.zeros(1, 16, 16), question) == "\0" * (12 - before + 1), "one for the last place too"
    assert answer(model, torch.zeros(1, 16, 16), question, longest=2) == "\0" * 2
    with pytest.raises(ConfigError, match=r"16 patches and 13 tokens need model.numbers.context of at least 29"):
        answer(model, torch.zeros(1, 16, 16), "how many? so")


def test_loss_is_of_the_answers_alone() -> None:
    data = digits_grid(grids=(3, 1)).train
    batch = Encoded(data, Scale(data.pixels), 64).batch(range(12))
    model = vision_language(0, **EYES, context=80)
    logits = model(batch.images, batch.tokens)
    in_answer = batch.targets != IGNORED_TARGET
    expected = torch.nn.functional.cross_entropy(logits[in_answer], batch.targets[in_answer])
    z = 1e-4 * torch.logsumexp(logits[in_answer], -1).square().mean()
    torch.testing.assert_close(answer_loss(model, batch), expected + z)
    torch.testing.assert_close(heldout_answers(model, [batch])[0], float(expected.detach()), rtol=1e-5, atol=1e-6)
