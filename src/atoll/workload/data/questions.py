"""Images with questions and captions: grids of scikit-learn's digits, and easy-VQA.

`data.corpus` names a source: `digits_grid`, `easy_vqa:DIR`. A sample is one image and bytes: a question, a newline, an answer,
the end. Only the answer has a loss; the question is given. A caption is the answer to one more question.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from atoll.errors import ConfigError, DataError
from atoll.workload.data.deal import Deal
from atoll.workload.data.images import Images, Scale, digits, read_json, read_png, source_folder, split_source
from atoll.workload.data.seeds import generator
from atoll.workload.data.tokenizer import END_OF_DOCUMENT

IGNORED_TARGET: Final = -100
"""Target of positions without a loss: the question's bytes and the padding."""
SEPARATOR: Final = 10  # the newline between question and answer
GRIDS: Final = (8192, 512)
"""Train and held-out images of `digits_grid`."""
QUESTIONS_EACH: Final = 4
PLACES: Final = ("top left", "top right", "bottom left", "bottom right")
DESCRIBE: Final = "describe."
IMAGES_MAX: Final = 1 << 32
QUOTED_LETTERS: Final = 60
"""Letters of an entry that an error message quotes."""
SHAPES: Final = frozenset(("circle", "rectangle", "triangle"))


class QuestionBatch(NamedTuple):
    """`targets` are the tokens shifted by one where they belong to an answer, and `IGNORED_TARGET` elsewhere."""

    images: Tensor
    tokens: Tensor
    targets: Tensor


@dataclass(frozen=True, eq=False)
class Questions:
    pixels: Tensor
    """uint8, [images, channels, size, size]."""
    image_index: Tensor
    """int64, [samples]: the image of each sample."""
    texts: tuple[tuple[str, str], ...]
    """Question and answer of each sample."""


@dataclass(frozen=True, eq=False)
class QuestionData:
    train: Questions
    heldout: Questions
    fingerprint: str


class Encoded:
    """Samples as rows of equal length."""

    def __init__(self, questions: Questions, scale: Scale, seq_len: int) -> None:
        self._scale, self._pixels, self._image_index = scale, questions.pixels, questions.image_index
        lines = [[*prompt(question), *answer.encode(), END_OF_DOCUMENT] for question, answer in questions.texts]
        longest = max(len(line) for line in lines) - 1
        if longest > seq_len:
            raise ConfigError(f"key data.seq_len = {seq_len}: the longest question with its answer needs at least {longest}")
        padded = array("h")
        for line in lines:
            padded.extend(line + [END_OF_DOCUMENT] * (seq_len + 1 - len(line)))
        self._tokens = torch.frombuffer(padded, dtype=torch.int16).reshape(len(lines), seq_len + 1)
        starts = [len(prompt(question)) - 1 for question, _ in questions.texts]
        self._answer = torch.tensor([(start, len(line) - 1) for start, line in zip(starts, lines, strict=True)])
        """First position of the targets, and the position after their last."""

    def __len__(self) -> int:
        return self._tokens.shape[0]

    def batch(self, chosen: Sequence[int] | Tensor) -> QuestionBatch:
        tokens = self._tokens[chosen].long()
        at, bounds = torch.arange(tokens.shape[1] - 1), self._answer[chosen]
        in_answer = (at >= bounds[:, :1]) & (at < bounds[:, 1:])
        targets = torch.where(in_answer, tokens[:, 1:], IGNORED_TARGET)
        return QuestionBatch(self._scale(self._pixels[self._image_index[chosen]]), tokens[:, :-1].contiguous(), targets)


def prompt(question: str) -> list[int]:
    return [*question.encode(), SEPARATOR]


class QuestionStream:
    """`streams` many disjoint sequences of batches; see `Deal` for the order."""

    def __init__(self, data: QuestionData, seed: int, streams: int, batch_size: int, seq_len: int) -> None:
        self._samples = Encoded(data.train, Scale(data.train.pixels), seq_len)
        self._deal = Deal(len(self._samples), seed, streams)
        self._batch_size = batch_size

    def batch(self, stream: int, position: int) -> QuestionBatch:
        return self._samples.batch(self._deal.batch(stream, position, self._batch_size))


# ---------------------------------------------------------------- sources


EASY_VQA: Final = "the easy-vqa package, unzipped, or its folder data (pip download --no-deps easy-vqa==1.0)"


def load_questions(corpus: str) -> QuestionData:
    name, folder = split_source(corpus)
    if name == "digits_grid":
        source_folder(corpus, folder, None)
        return digits_grid()
    if name == "easy_vqa":
        return easy_vqa(source_folder(corpus, folder, EASY_VQA))
    raise ConfigError(f"key data.corpus = {corpus!r}: a vision-language model needs digits_grid or easy_vqa:DIR")


def question_data(train: Questions, heldout: Questions) -> QuestionData:
    digest = hashlib.sha256()
    for part in (train, heldout):
        digest.update(part.pixels.contiguous().numpy().data)
        digest.update(part.image_index.numpy().data)
        digest.update(repr(part.texts).encode())
    return QuestionData(train, heldout, digest.hexdigest())


@lru_cache(maxsize=1)
def digits_grid(seed: int = 0, grids: tuple[int, int] = GRIDS) -> QuestionData:
    """Four digits in a square, and questions about them. Held-out grids have held-out digits only.

    The seed belongs to the data and not to the run: runs with different seeds answer the same questions, so that their losses
    can be compared.
    """
    sides = [_grids(part, count, seed, side) for side, (part, count) in enumerate(zip(digits(), grids, strict=True))]
    return question_data(*sides)


def _grids(source: Images, count: int, seed: int, side: int) -> Questions:
    rng = generator("digits grid", seed, side)
    chosen = torch.randint(0, source.labels.numel(), (count, 4), generator=rng)
    tiles = source.pixels[chosen, 0]  # [count, 4, 8, 8]
    pixels = torch.cat([torch.cat([tiles[:, 0], tiles[:, 1]], 2), torch.cat([tiles[:, 2], tiles[:, 3]], 2)], 1)[:, None]
    kinds = torch.rand(count, len(QUESTION_KINDS), generator=rng).argsort(1)[:, :QUESTIONS_EACH].tolist()
    draws = torch.randint(0, 1 << 30, (count, QUESTIONS_EACH, 2), generator=rng).tolist()
    texts = [
        QUESTION_KINDS[kind](shown, *drawn)
        for shown, asked, row in zip(source.labels[chosen].tolist(), kinds, draws, strict=True)
        for kind, drawn in zip(asked, row, strict=True)
    ]
    image_index = torch.arange(count).repeat_interleave(QUESTIONS_EACH)
    return Questions(pixels.contiguous(), image_index, tuple(texts))


# Each kind of question takes the four digits and two large random numbers.


def _which(shown: list[int], where: int, _: int) -> tuple[str, str]:
    return f"which digit is {PLACES[where % 4]}?", str(shown[where % 4])


def _some_digit(shown: list[int], coin: int, which: int) -> int:
    """Half of the time a digit that is shown; otherwise "no" would nearly always be right."""
    among = sorted(set(shown)) if coin % 2 else sorted(set(range(10)) - set(shown))
    return among[which % len(among)]


def _how_many(shown: list[int], coin: int, which: int) -> tuple[str, str]:
    digit = _some_digit(shown, coin, which)
    return f"how many {digit}s?", str(shown.count(digit))


def _is_there(shown: list[int], coin: int, which: int) -> tuple[str, str]:
    digit = _some_digit(shown, coin, which)
    return f"is there a {digit}?", "yes" if digit in shown else "no"


def _larger(shown: list[int], one: int, other: int) -> tuple[str, str]:
    one, other = one % 4, (one + 1 + other % 3) % 4
    question = f"which is larger, {PLACES[one]} or {PLACES[other]}?"
    if shown[one] == shown[other]:
        return question, "neither"
    return question, PLACES[one if shown[one] > shown[other] else other]


def _describe(shown: list[int], *_: int) -> tuple[str, str]:
    return DESCRIBE, f"{shown[0]} {shown[1]}, {shown[2]} {shown[3]}"


QUESTION_KINDS: Final[tuple[Callable[..., tuple[str, str]], ...]] = (_which, _how_many, _is_there, _larger, _describe)


def easy_vqa(folder: Path) -> QuestionData:
    """The folders `train` and `test` of the package's `data`, each with images/N.png and questions.json; MIT licence."""
    for found in (folder, folder / "data", folder / "easy_vqa" / "data"):
        if (found / "train").is_dir() and (found / "test").is_dir():
            train, test = _easy_side(found / "train"), _easy_side(found / "test")
            if train.pixels.shape[1:] != test.pixels.shape[1:]:
                sizes = [" x ".join(map(str, side.pixels.shape[2:])) for side in (train, test)]
                differ = f"its train images are {sizes[0]} and its test images {sizes[1]}"
                raise DataError(f"{found}: {differ}; they must have one size")
            return question_data(train, test)
    raise DataError(f"{folder}: holds no folders train and test; give the data folder of the easy-vqa package")


def _easy_side(folder: Path) -> Questions:
    rows = _easy_rows(folder / "questions.json")
    numbers = sorted({row[2] for row in rows})
    place = {number: at for at, number in enumerate(numbers)}
    images = [read_png(folder / "images" / f"{number}.png") for number in numbers]
    shape = images[0].shape
    for number, image in zip(numbers, images, strict=True):
        if image.shape != shape or shape[0] != shape[1]:
            size = f"{image.shape[1]} x {image.shape[0]}"
            raise DataError(f"{folder / 'images' / f'{number}.png'}: is {size}; all must be square and have one size")
    pixels = torch.stack(images).permute(0, 3, 1, 2).contiguous()
    texts = [(question, answer, place[number]) for question, answer, number in rows] + _captions(rows, place)
    return Questions(pixels, torch.tensor([at for _, _, at in texts]), tuple((q, a) for q, a, _ in texts))


def _easy_rows(path: Path) -> list[list[Any]]:
    rows, right = read_json(path), "is not a list of [question, answer, image]"
    if not isinstance(rows, list) or not rows:
        raise DataError(f"{path}: {right}")
    for number, row in enumerate(rows, 1):
        if not _is_row(row):
            raise DataError(f"{path}: {right}; entry {number} is {ascii(row)[:QUOTED_LETTERS]}")
    return rows


def _is_row(row: Any) -> bool:
    """Two texts and an image number. A lone surrogate is not text: it has no UTF-8 bytes."""
    if not isinstance(row, list) or [type(field) for field in row] != [str, str, int]:
        return False
    try:
        "".join(row[:2]).encode()
    except UnicodeEncodeError:
        return False
    return 0 <= int(row[2]) < IMAGES_MAX


def _captions(rows: list[list[Any]], place: dict[int, int]) -> list[tuple[str, str, int]]:
    """An image's colour and shape by the answers about it, where questions asked for both."""
    shapes: dict[int, str] = {}
    colours: dict[int, str] = {}
    for _, answer, number in rows:
        if answer not in ("yes", "no"):
            (shapes if answer in SHAPES else colours)[number] = answer
    return [(DESCRIBE, f"{colours[n]} {shapes[n]}", place[n]) for n in sorted(shapes.keys() & colours.keys())]
