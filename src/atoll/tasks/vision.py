"""Tasks on images: classification, and questions that a vision-language model answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from torch import Tensor, nn

from atoll.config import Config
from atoll.config.models import SIZES, USUAL_SIZE, Number
from atoll.errors import ConfigError
from atoll.ids import LearnerId
from atoll.rules import samples_max, samples_of
from atoll.tasks.task import Task, checkpointed, layout_for
from atoll.workload.data.images import ImageStream, Scale, heldout_images, load_images, spread
from atoll.workload.data.questions import IGNORED_TARGET, Encoded, QuestionBatch, QuestionStream, load_questions
from atoll.workload.evaluation.evaluate import heldout_classes
from atoll.workload.models.decoder import build_model
from atoll.workload.models.vision import LeNet5, ResNet, classification_loss
from atoll.workload.models.vlm import answer_loss, heldout_answers, patches_of, vision_language

VISION_MODELS: Final[Mapping[str, Callable[..., nn.Module]]] = {
    "lenet5": LeNet5,
    "resnet18": ResNet,
    "vlm": vision_language,
}
"""Builders by name, as `MODELS` of workload/models/decoder.py."""


def vision_task(config: Config) -> Task:
    return _questions(config) if config.model.name == "vlm" else _classes(config)


def _classes(config: Config) -> Task:
    """Image classification. An image is one sample and one token, so that weighting by either is the same."""
    d, name = config.data, config.model.name
    data = load_images(d.corpus)
    _, channels, size, _ = data.train.pixels.shape
    numbers: dict[str, Number] = {"channels": channels, "classes": data.classes}
    if name == "lenet5":
        numbers["size"] = size
    build = _builder(config, numbers)
    stream = ImageStream(data, config.seed, config.learners, samples_max(config), d.augment)

    def measured(model: nn.Module) -> tuple[float, float]:
        return heldout_classes(model, heldout_images(data, d.batch_size, d.heldout_batches))

    return Task(
        config, build, _by_learner(config, stream.batch), classification_loss, lambda b: (b[1].numel(), b[1].numel()),
        lambda model: measured(model)[0], layout_for(config, build()), data.fingerprint, lambda model: measured(model)[1],
    )  # fmt: skip


def _questions(config: Config) -> Task:
    """Questions about images. Only the answers' tokens count, because only they have a loss."""
    d = config.data
    data = load_questions(d.corpus)
    _, channels, size, _ = data.train.pixels.shape
    patch = int(config.model.numbers.get("patch", 4))
    context = patches_of(size, max(patch, 1)) + d.seq_len
    build = _builder(config, SIZES[USUAL_SIZE] | {"channels": channels, "size": size, "context": context})
    stream = QuestionStream(data, config.seed, config.learners, samples_max(config), d.seq_len)
    held = Encoded(data.heldout, Scale(data.train.pixels), d.seq_len)
    parts = spread(len(held), d.batch_size, d.heldout_batches)

    def measured(model: nn.Module) -> tuple[float, float]:
        return heldout_answers(model, map(held.batch, parts))

    def count(batch: QuestionBatch) -> tuple[int, int]:
        return int((batch.targets != IGNORED_TARGET).sum()), batch.targets.shape[0]

    return Task(
        config, build, _by_learner(config, stream.batch), answer_loss, count, lambda model: measured(model)[0],
        layout_for(config, build()), data.fingerprint, lambda model: measured(model)[1],
    )  # fmt: skip


def _builder(config: Config, derived: Mapping[str, Number]) -> Callable[[], nn.Module]:
    """`derived` are the numbers that the data fixes; the recipe sets the others."""
    for key in ("channels", "size", "classes"):
        if key in config.model.numbers and config.model.numbers[key] != derived.get(key):
            raise ConfigError(f"key model.numbers.{key} = {config.model.numbers[key]}: follows from the data; leave it out")
    numbers = dict(derived) | config.model.numbers
    return lambda: checkpointed(config, build_model(config.model.name, numbers, config.seed, VISION_MODELS))


def _by_learner(config: Config, draw: Callable[[int, int], Any]) -> Callable[[LearnerId, LearnerId, int], Any]:
    """A learner's first samples of a batch, where learners have batches of different sizes."""

    def batch(learner: LearnerId, stream: LearnerId, position: int) -> Any:
        return _first(draw(stream, position), samples_of(config, learner))

    return batch


def _first(batch: tuple[Tensor, ...], samples: int) -> tuple[Tensor, ...]:
    parts = [part[:samples] for part in batch]
    return QuestionBatch(*parts) if isinstance(batch, QuestionBatch) else tuple(parts)
