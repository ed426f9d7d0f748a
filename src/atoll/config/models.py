"""The models that a recipe may name, the numbers of each, and sizes by name. It imports no torch: `atoll config` and the builders
both use it, so both refuse the same values with the same sentences."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeAlias

from atoll.config.sections import CUSTOM, IMAGE_MODELS, Config, Model
from atoll.errors import ConfigError

Number: TypeAlias = int | float | bool
DECODER: Final = "decoder"
"""The language model of this project; any other name is user code."""
BYTE_VOCAB: Final = 257
"""Entries of the byte-level tokenizer: 256 bytes and the end of a document."""
ALIGNED: Final = 8
"""Widths of an expert's matrices are multiples of this: grouped products need rows of 16 bytes, 8 numbers in bf16."""
IMAGE_SOURCES: Final = ("digits", "mnist", "cifar10")
QUESTION_SOURCES: Final = ("digits_grid", "easy_vqa")
"""What `data.corpus` may name for a model on images: labelled images, and questions about images."""


# ---------------------------------------------------------------- the decoder


@dataclass(frozen=True)
class DecoderShape:
    vocab: int
    width: int
    layers: int
    heads: int
    mlp: int
    tied: bool = False
    context: int = 1024
    """The longest sequence that the rotary tables cover. No weight depends on it."""
    experts: int = 0
    """0: a dense model. Otherwise `mlp` is the hidden width of one expert."""
    top_k: int = 2
    """Experts that a token goes through."""
    shared: int = 0
    """Further experts that every token goes through; a Hugging Face export cannot hold them."""
    balance: float = 0.01
    """Weight of the load-balancing loss (mean over the blocks) in training."""

    def __post_init__(self) -> None:
        for name in ("vocab", "width", "layers", "heads", "mlp", "context"):
            if getattr(self, name) < 1:
                raise ConfigError(f"key model.numbers.{name} = {getattr(self, name)}: must be at least 1")
        if self.width % (2 * self.heads):
            raise ConfigError(
                f"key model.numbers.width = {self.width} with model.numbers.heads = {self.heads}: "
                f"the width must be a multiple of 2 x heads = {2 * self.heads} (rotary positions turn pairs)"
            )
        if self.experts:
            self._check_experts()
        else:
            self._check_dense()

    def _check_dense(self) -> None:
        """A number without effect is a mistake: most often `experts` itself was forgotten."""
        for name in ("top_k", "shared", "balance"):
            if getattr(self, name) != getattr(DecoderShape, name):
                why = "is for a model with experts, and model.numbers.experts is 0; leave it out, or give experts"
                raise ConfigError(f"key model.numbers.{name} = {getattr(self, name)}: {why}")

    def _check_experts(self) -> None:
        if not 2 <= self.top_k <= self.experts:
            raise ConfigError(
                f"key model.numbers.top_k = {self.top_k} of model.numbers.experts = {self.experts}: must be 2 to the number of "
                f"experts (one expert's normalised probability is always 1, and its router would learn nothing)"
            )
        for name, value in (("width", self.width), ("mlp", self.mlp)):
            if value % ALIGNED:
                raise ConfigError(f"key model.numbers.{name} = {value}: must be a multiple of {ALIGNED} in a model with experts")


SIZES: Final[dict[str, dict[str, Number]]] = {
    "nano": {"width": 32, "layers": 4, "heads": 2, "mlp": 64},
    "tiny": {"width": 64, "layers": 4, "heads": 4, "mlp": 128},
    "small": {"width": 256, "layers": 8, "heads": 4, "mlp": 768},
    "moe_nano": {"width": 32, "layers": 4, "heads": 2, "mlp": 32, "experts": 4, "top_k": 2},
    "moe_35M": {"width": 512, "layers": 6, "heads": 8, "mlp": 688, "tied": True, "experts": 8, "top_k": 2},
    "35M": {"width": 512, "layers": 6, "heads": 8, "mlp": 1368, "tied": True},
    "100M": {"width": 768, "layers": 9, "heads": 12, "mlp": 2048, "tied": True},
    "200M": {"width": 1024, "layers": 12, "heads": 16, "mlp": 2736, "tied": True},
    "300M": {"width": 1280, "layers": 15, "heads": 20, "mlp": 3416, "tied": True},
    "500M": {"width": 1536, "layers": 18, "heads": 24, "mlp": 4096, "tied": True},
    "1B": {"width": 2048, "layers": 24, "heads": 32, "mlp": 5464, "tied": True},
    "4B": {"width": 3072, "layers": 36, "heads": 48, "mlp": 8192, "tied": True},
}
"""Decoder sizes by name, without the vocabulary, which the tokenizer determines. Those from 35M on are Streaming DiLoCo's (arXiv
2501.18512, Table 2): a gated MLP has three matrices and theirs two, so its hidden width is two thirds of the listed one, rounded
up to a multiple of 8, and the sizes match. A moe size is named after the dense size with as many parameters per token: two of
eight experts of half the hidden width."""
USUAL_SIZE: Final = "nano"
"""For a decoder whose recipe gives neither a size nor numbers."""
SIZED: Final = (DECODER, "vlm")
"""Models that have sizes."""
_IN_SIZES: Final = frozenset(key for numbers in SIZES.values() for key in numbers)


def with_size(numbers: Mapping[str, Number], size: object) -> dict[str, Number]:
    """The numbers of lower layers of a config after a layer that names a size: the size replaces the whole shape of the lower
    layers. An unknown size is refused when the config is checked."""
    kept = {key: value for key, value in numbers.items() if key not in _IN_SIZES}
    return kept | SIZES[size] if isinstance(size, str) and size in SIZES else dict(numbers)


def resolved_model(model: Model) -> tuple[str, dict[str, Number]]:
    """(size, numbers) as a run records them: numbers only, so that its config does not depend on SIZES, and two ways to write one
    model compare equal."""
    if not model.size:
        return "", model.numbers
    if model.size not in SIZES:
        raise ConfigError(f"key model.size = {model.size!r}: no such size; choose one of {', '.join(SIZES)}")
    if model.name not in SIZED:
        right = f"sizes are for model.name = {' or '.join(map(repr, SIZED))}; give model.numbers"
        raise ConfigError(f"key model.size = {model.size!r}: {right}")
    return "", SIZES[model.size] | model.numbers


# ---------------------------------------------------------------- numbers by model


class Rule(NamedTuple):
    """The type and the lower limit of one number of a model."""

    kind: type
    least: int = 1


_SHAPE: Final = {key: Rule(int) for key in ("vocab", "width", "layers", "heads", "mlp")} | {
    "tied": Rule(bool, 0),
    "context": Rule(int),
}
_EXPERTS: Final = {"experts": Rule(int, 0), "top_k": Rule(int), "shared": Rule(int, 0), "balance": Rule(float, 0)}
NUMBERS: Final[dict[str, dict[str, Rule]]] = {
    DECODER: _SHAPE | _EXPERTS,
    "lenet5": {key: Rule(int) for key in ("channels", "size", "classes")},
    "resnet18": {key: Rule(int) for key in ("channels", "classes", "width", "depth")},
    "vlm": {key: Rule(int) for key in ("channels", "size", "patch")} | _SHAPE,
}
"""A test compares them with the builders' signatures."""


def check_numbers(name: str, numbers: Mapping[str, Number], rules: Mapping[str, Rule]) -> None:
    for key, value in numbers.items():
        if key not in rules:
            takes = f"model {name!r} has no number {key}; it takes {', '.join(rules)}"
            raise ConfigError(f"key model.numbers.{key} = {value}: {takes}")
        kind, least = rules[key]
        if type(value) is not kind and not (kind is float and type(value) is int):
            right = "true or false" if kind is bool else "a number" if kind is float else "a whole number"
            raise ConfigError(f"key model.numbers.{key} = {value!r}: must be {right}")
        if value < least:
            raise ConfigError(f"key model.numbers.{key} = {value}: must be at least {least}")


# ---------------------------------------------------------------- a config's model


def check_model(c: Config) -> None:
    """The checks of a model that need neither the model nor its data. A builder makes the others."""
    name, numbers = c.model.name, c.model.numbers
    _check_init(c.model)
    if name == CUSTOM:
        return
    if name not in NUMBERS and not is_code(name):
        known = ", ".join(map(repr, (*NUMBERS, CUSTOM)))
        raise ConfigError(f"key model.name = {name!r}: must be {known} or package.module:function")
    if name in NUMBERS:
        check_numbers(name, numbers, NUMBERS[name])
    if name in SIZED:
        usual: dict[str, Number] = SIZES[USUAL_SIZE] | {"vocab": 1, "context": c.data.seq_len}
        shape = {key: value for key, value in (usual | numbers).items() if key in NUMBERS[DECODER]}
        DecoderShape(**shape)  # type: ignore[arg-type]
    if (name == "vlm" or c.data.tokenizer == "bytes") and numbers.get("vocab", BYTE_VOCAB) < BYTE_VOCAB:
        raise ConfigError(f"key model.numbers.vocab = {numbers['vocab']}: the tokenizer has {BYTE_VOCAB} entries")
    _check_images(c)


def _check_init(model: Model) -> None:
    if not model.init:
        return
    if model.name == CUSTOM:
        raise ConfigError(
            f"key model.init = {model.init!r}: a custom model begins with the weights of the first learner; load them in your "
            f"own loop, before atoll.join"
        )
    if not model.init.startswith("dcp:") and not model.init.endswith(".safetensors"):
        raise ConfigError(f"key model.init = {model.init!r}: must be dcp:FOLDER or a .safetensors file")


def is_code(name: str) -> bool:
    """package.module:function, which `--allow-model` must name too."""
    module, _, function = name.partition(":")
    return all(part.isidentifier() for part in (*module.split("."), function))


def _check_images(c: Config) -> None:
    name, augment, corpus = c.model.name, c.data.augment, c.data.corpus
    source = corpus.partition(":")[0]
    if name == "vlm" and source not in QUESTION_SOURCES:
        raise ConfigError(f"key data.corpus = {corpus!r}: a vision-language model needs digits_grid or easy_vqa:DIR")
    if name in ("lenet5", "resnet18") and source not in IMAGE_SOURCES:
        raise ConfigError(f"key data.corpus = {corpus!r}: an image classifier needs digits, mnist:DIR or cifar10:DIR")
    if augment != "none" and name not in IMAGE_MODELS:
        raise ConfigError(f"key data.augment = {augment!r}: is for images; model.name must be {', '.join(IMAGE_MODELS)}")
    if augment != "none" and name == "vlm":
        raise ConfigError(f"key data.augment = {augment!r}: a mirrored image has other answers; it must be 'none'")
    if name == "resnet18" and min(c.data.samples_by_learner or (c.data.batch_size,)) < 2:
        raise ConfigError("key data.batch_size = 1: batch normalisation needs at least 2 images to compare")
