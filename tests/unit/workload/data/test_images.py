"""Labelled images: what the loaders read, what they refuse, and batches that follow from (seed, stream, position) alone."""

from __future__ import annotations

import gzip
import json
import struct
import zlib
from pathlib import Path

import pytest
import torch
from torch import Tensor

from atoll.errors import ConfigError, DataError
from atoll.workload.data import images
from atoll.workload.data.images import (
    ImageStream,
    Scale,
    cifar10,
    crop,
    digits,
    flip,
    heldout_images,
    load_images,
    mnist,
    read_idx,
    read_png,
)
from atoll.workload.data.seeds import generator


def idx(values: Tensor) -> bytes:
    lengths = b"".join(length.to_bytes(4, "big") for length in values.shape)
    return bytes((0, 0, 8, values.dim())) + lengths + values.to(torch.uint8).numpy().tobytes()


def some_images(count: int, size: int, channels: int = 1) -> Tensor:
    return (torch.arange(count * channels * size * size) * 7919 % 251).to(torch.uint8).reshape(count, channels, size, size)


def write_mnist(folder: Path, packed: bool = False) -> None:
    for side, count in (("train", 12), ("t10k", 5)):
        for rest, values in (("images-idx3-ubyte", some_images(count, 6)[:, 0]), ("labels-idx1-ubyte", torch.arange(count) % 10)):
            if packed:
                (folder / f"{side}-{rest}.gz").write_bytes(gzip.compress(idx(values)))
            else:
                (folder / f"{side}-{rest}").write_bytes(idx(values))


@pytest.mark.parametrize("packed", [False, True])
def test_mnist_files_are_read_plain_or_packed(tmp_path: Path, packed: bool) -> None:
    write_mnist(tmp_path, packed)
    data = load_images(f"mnist:{tmp_path}")
    assert torch.equal(data.train.pixels, some_images(12, 6)) and torch.equal(data.heldout.pixels, some_images(5, 6))
    assert data.train.labels.tolist() == [*range(10), 0, 1] and data.classes == 10


def test_fingerprint_is_of_the_images_and_labels(tmp_path: Path) -> None:
    write_mnist(tmp_path)
    before = mnist(tmp_path).fingerprint
    assert mnist(tmp_path).fingerprint == before
    (tmp_path / "t10k-labels-idx1-ubyte").write_bytes(idx(torch.tensor([0, 1, 2, 3, 5])))
    assert mnist(tmp_path).fingerprint != before


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("train-images-idx3-ubyte", b"\x00\x00\x08\x01" + bytes(40), "begins with 00000801.*000008 ?03"),
        ("train-images-idx3-ubyte", b"PK", "begins with 504b"),
        ("train-images-idx3-ubyte", idx(some_images(12, 6)[:, 0])[:-1], "12 x 6 x 6 bytes and it holds 431: it is truncated"),
        ("train-images-idx3-ubyte", idx(some_images(11, 6)[:, 0]), "11 images and 12 labels"),
        ("train-images-idx3-ubyte", idx(some_images(12, 6)[:, 0, :, :5]), "6 x 5, and must be square"),
        ("t10k-images-idx3-ubyte", idx(some_images(5, 4)[:, 0]), "differ in size"),
        ("train-images-idx3-ubyte", idx(torch.zeros(12, 0, 0)), "ubyte: its header has 12 x 0 x 0 bytes"),
        ("t10k-labels-idx1-ubyte", None, "holds no t10k-labels-idx1-ubyte"),
    ],
)  # fmt: skip
def test_damaged_mnist_is_refused_in_one_sentence(tmp_path: Path, name: str, content: bytes | None, says: str) -> None:
    write_mnist(tmp_path)
    if content is None:
        (tmp_path / name).unlink()
    else:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=says) as caught:
        mnist(tmp_path)
    assert "\n" not in str(caught.value)


def test_cut_gzip_is_refused_in_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "train-images-idx3-ubyte.gz"
    for content in (gzip.compress(idx(some_images(12, 6)[:, 0]))[:40], b"no gzip at all"):
        path.write_bytes(content)
        with pytest.raises(DataError, match="cannot be read"):
            read_idx(path, 3)


@pytest.mark.parametrize(
    ("corpus", "kind", "says"),
    [
        ("mnist", ConfigError, "name its folder, as in mnist:DIR"),
        ("cifar10:", ConfigError, "as in cifar10:DIR"),
        ("mnist:/no/such/folder", DataError, "there is no folder /no/such/folder; it must hold the four idx files of MNIST"),
        ("cifar10:no/such", DataError, r"folder no/such \(a relative path counts from the current folder\); it must hold data_b"),
        ("digits:/tmp", ConfigError, "takes no folder"),
        ("stdlib", ConfigError, "needs digits, mnist:DIR or cifar10:DIR"),
        ("mnist:~nobody-here/x", DataError, "data.corpus = 'mnist:~nobody-here/x': there is no home folder ~nobody-here; write"),
        ("foo:~nobody-of-this-name", ConfigError, "needs digits, mnist:DIR or cifar10:DIR"),
        ("cifar10:/", DataError, "neither data_batch_1.bin nor data_batch_1.png"),
    ],
)  # fmt: skip
def test_sources_that_are_none_are_refused(corpus: str, kind: type[Exception], says: str) -> None:
    with pytest.raises(kind, match=says) as caught:
        load_images(corpus)
    assert "\n" not in str(caught.value)


ROWS = 3


def cifar_parts() -> tuple[Tensor, Tensor]:
    return some_images(6 * ROWS, 32, 3), torch.arange(6 * ROWS) % 10


def write_binary(folder: Path) -> None:
    pixels, labels = cifar_parts()
    for part, name in enumerate([*(f"data_batch_{n}" for n in range(1, 6)), "test_batch"]):
        rows = range(ROWS * part, ROWS * part + ROWS)
        (folder / f"{name}.bin").write_bytes(b"".join(bytes([int(labels[r])]) + pixels[r].numpy().tobytes() for r in rows))


def write_png(folder: Path) -> None:
    from PIL import Image

    pixels, labels = cifar_parts()
    for part, name in enumerate([*(f"data_batch_{n}" for n in range(1, 6)), "test_batch"]):
        rows = pixels[ROWS * part : ROWS * part + ROWS].permute(0, 2, 3, 1).reshape(ROWS, 1024, 3)
        Image.fromarray(rows.contiguous().numpy()).save(folder / f"{name}.png")
    (folder / "train_lables.json").write_text(json.dumps(labels[: 5 * ROWS].tolist()))
    (folder / "test_lables.json").write_text(json.dumps(labels[5 * ROWS :].tolist()))


def test_both_forms_of_cifar10_are_the_same_images(tmp_path: Path) -> None:
    for name, write in (("binary", write_binary), ("png", write_png)):
        (tmp_path / name).mkdir()
        write(tmp_path / name)
    binary, png = cifar10(tmp_path / "binary", ROWS), cifar10(tmp_path / "png", ROWS)
    pixels, labels = cifar_parts()
    assert torch.equal(binary.train.pixels, pixels[: 5 * ROWS]) and torch.equal(binary.heldout.labels, labels[5 * ROWS :])
    assert binary.fingerprint == png.fingerprint


def test_damaged_cifar10_is_refused_in_one_sentence(tmp_path: Path) -> None:
    write_binary(tmp_path)
    whole = (tmp_path / "data_batch_4.bin").read_bytes()
    for content, says in ((whole[:-1], "data_batch_4.bin: has 9,218 bytes, not 3 records of 3073"),
                          (bytes([10]) + whole[1:], "label outside 0 to 9")):  # fmt: skip
        (tmp_path / "data_batch_4.bin").write_bytes(content)
        with pytest.raises(DataError, match=says):
            cifar10(tmp_path, ROWS)
    (tmp_path / "data_batch_4.bin").unlink()
    with pytest.raises(DataError, match=r"data_batch_4.bin: is missing"):
        cifar10(tmp_path, ROWS)


def test_damaged_cifar10_png_is_refused_in_one_sentence(tmp_path: Path) -> None:
    write_png(tmp_path)
    with pytest.raises(DataError, match="15 labels for 20 images"):
        cifar10(tmp_path, ROWS + 1)
    (tmp_path / "train_lables.json").write_text("[1, 2")
    with pytest.raises(DataError, match="is not JSON"):
        cifar10(tmp_path, ROWS)
    (tmp_path / "train_lables.json").write_text('{"a": 1}')
    with pytest.raises(DataError, match="not a list of whole numbers"):
        cifar10(tmp_path, ROWS)
    outside = [(str([label, *[1] * 14]), "label outside 0 to 9") for label in (10**30, -1, 10)]
    for labels, says in (*outside, ("[" * 100_000, "is not JSON")):
        (tmp_path / "train_lables.json").write_text(labels)
        with pytest.raises(DataError, match=says):
            cifar10(tmp_path, ROWS)
    write_png(tmp_path)
    png = (tmp_path / "data_batch_2.png").read_bytes()
    (tmp_path / "data_batch_2.png").write_bytes(png[: len(png) // 2])
    with pytest.raises(DataError, match=r"data_batch_2.png: cannot be read as an image"):
        cifar10(tmp_path, ROWS)
    (tmp_path / "data_batch_2.png").write_bytes((tmp_path / "data_batch_1.png").read_bytes())
    (tmp_path / "test_lables.json").unlink()
    with pytest.raises(DataError, match=r"holds no test_lables.json"):
        cifar10(tmp_path, ROWS)


def test_image_too_large_for_any_memory_is_refused_in_one_sentence(tmp_path: Path) -> None:
    """Of a few bytes, that say they are 30,000 x 30,000 pixels."""

    def part(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = part(b"IHDR", struct.pack(">IIBBBBB", 30_000, 30_000, 8, 2, 0, 0, 0))
    rest = part(b"IDAT", zlib.compress(b"")) + part(b"IEND", b"")
    (path := tmp_path / "a.png").write_bytes(b"\x89PNG\r\n\x1a\n" + header + rest)
    with pytest.raises(DataError, match=r"a.png: cannot be read as an image \(.*900000000 pixels.*\)$") as caught:
        read_png(path)
    assert "\n" not in str(caught.value)


def test_missing_package_is_named_with_the_extra_that_brings_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(images, "find_spec", lambda name: None)
    with pytest.raises(DataError, match=r"scikit-learn, which is not installed: pip install 'atoll\[vision\]'"):
        digits()
    monkeypatch.setitem(__import__("sys").modules, "PIL", None)
    with pytest.raises(DataError, match=r"need Pillow, which is not installed: pip install 'atoll\[vision\]'"):
        images.read_png(tmp_path / "any.png")


# ---------------------------------------------------------------- digits and batches


def test_digits_are_scikit_learns_and_no_held_out_one_is_trained_on() -> None:
    train, held = digits()
    assert (train.labels.numel(), held.labels.numel()) == (1438, 359)
    assert train.pixels.shape[1:] == (1, 8, 8) and int(train.pixels.max()) == 240
    seen = {bytes(p.numpy().tobytes()) for p in train.pixels}
    assert not seen & {bytes(p.numpy().tobytes()) for p in held.pixels}
    assert torch.bincount(held.labels).min() > 20  # all ten are there
    assert torch.equal(digits()[1].pixels, held.pixels)


def test_batch_is_a_function_of_seed_stream_and_position() -> None:
    data = load_images("digits")
    one, again, other = (ImageStream(data, seed, 4, 16, "crop_flip") for seed in (1, 1, 2))
    for position in (90, 0, 7):  # in any order; 90 is in the second epoch
        assert all(torch.equal(a, b) for a, b in zip(one.batch(2, position), again.batch(2, position), strict=True))
        assert not torch.equal(one.batch(2, position)[0], other.batch(2, position)[0])
        assert not torch.equal(one.batch(2, position)[0], one.batch(3, position)[0])


def test_scaled_images_have_mean_zero_and_variance_one_by_channel() -> None:
    pixels = torch.stack([some_images(20, 4)[:, 0], some_images(20, 4)[:, 0] // 2 + 100], dim=1)
    scaled = Scale(pixels)(pixels)
    torch.testing.assert_close(scaled.mean((0, 2, 3)), torch.zeros(2), atol=1e-5, rtol=0)
    torch.testing.assert_close(scaled.var((0, 2, 3), unbiased=False), torch.ones(2), atol=1e-4, rtol=0)
    assert torch.isfinite(Scale(torch.zeros(2, 1, 4, 4, dtype=torch.uint8))(pixels[:, :1])).all()


def test_crop_moves_each_image_by_at_most_an_eighth_and_flip_mirrors_some() -> None:
    marked = torch.zeros(64, 2, 16, 16)
    marked[:, :, 8, 8] = 1.0
    moved = crop(marked, generator("test", 0))
    places = {tuple(place) for place in moved[:, 0].nonzero()[:, 1:].tolist()}
    assert len(places) > 10 and all(6 <= y <= 10 and 6 <= x <= 10 for y, x in places)
    assert torch.equal(moved[:, 0], moved[:, 1]) and moved.shape == marked.shape
    flipped = flip(marked, generator("test", 1))
    columns = flipped[:, 0].nonzero()[:, 2]
    assert set(columns.tolist()) == {7, 8}


def test_held_out_batches_cover_all_images_or_are_spread_over_them() -> None:
    data = load_images("digits")
    assert sum(labels.numel() for _, labels in heldout_images(data, 16, 1000)) == 359
    few = [labels for _, labels in heldout_images(data, 4, 3)]
    assert [part.numel() for part in few] == [4, 4, 4]
    assert torch.equal(torch.cat(few), data.heldout.labels[torch.arange(12) * 359 // 12])
