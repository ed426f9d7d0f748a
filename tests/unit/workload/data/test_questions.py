"""Images with questions: what is asked is true of the image, and only answers are learnt."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path

import pytest
import torch

from atoll.errors import ConfigError, DataError
from atoll.workload.data.images import Scale, digits
from atoll.workload.data.questions import (
    IGNORED_TARGET,
    PLACES,
    Encoded,
    QuestionData,
    QuestionStream,
    digits_grid,
    load_questions,
)
from atoll.workload.data.tokenizer import END_OF_DOCUMENT


@lru_cache
def small() -> QuestionData:
    return digits_grid(grids=(300, 100))


def digits_of(pixels: torch.Tensor, known: dict[bytes, int]) -> list[int]:
    tiles = [pixels[0, y : y + 8, x : x + 8] for y in (0, 8) for x in (0, 8)]
    return [known[tile.contiguous().numpy().tobytes()] for tile in tiles]


def right_answer(question: str, shown: list[int]) -> str:
    """Read again from the words, by other code than asked."""
    if question == "describe.":
        return "{} {}, {} {}".format(*shown)
    if question.startswith("which digit is "):
        return str(shown[PLACES.index(question[15:-1])])
    if question.startswith("how many "):
        return str(shown.count(int(question[9])))
    if question.startswith("is there a "):
        return "yes" if int(question[11]) in shown else "no"
    one, other = (shown[PLACES.index(place)] for place in question[17:-1].split(" or "))
    return "neither" if one == other else question[17:-1].split(" or ")[one < other]


@pytest.mark.parametrize("side", ["train", "heldout"])
def test_every_answer_is_true_of_digits_of_its_own_side(side: str) -> None:
    """Held-out grids are made of held-out digits alone."""
    source = digits()[("train", "heldout").index(side)]
    known = {p.contiguous().numpy().tobytes(): int(label) for p, label in zip(source.pixels[:, 0], source.labels, strict=True)}
    part = getattr(small(), side)
    shown = [digits_of(pixels, known) for pixels in part.pixels]
    for at, (question, answer) in zip(part.image_index.tolist(), part.texts, strict=True):
        assert answer == right_answer(question, shown[at]), question
    kinds = {question.split()[1 if question.startswith("which") else 0] for question, _ in part.texts}
    assert kinds == {"describe.", "digit", "is", "how"}  # "which is larger", "is there"
    assert any("larger" in question for question, _ in part.texts)
    said = [answer for question, answer in part.texts if question.startswith("is there")]
    assert 0.35 < said.count("yes") / len(said) < 0.65


def test_grids_follow_from_their_seed() -> None:
    assert digits_grid(grids=(300, 100)).fingerprint == small().fingerprint
    assert digits_grid(1, grids=(300, 100)).fingerprint != small().fingerprint


def test_targets_are_the_answer_and_its_end_and_nothing_else() -> None:
    held = small().heldout
    batch = Encoded(held, Scale(small().train.pixels), 58).batch(range(40))
    assert batch.images.shape == (40, 1, 16, 16) and batch.tokens.shape == batch.targets.shape == (40, 58)
    for row, (question, answer) in enumerate(held.texts[:40]):
        asked = batch.targets[row] != IGNORED_TARGET
        assert batch.targets[row][asked].tolist() == [*answer.encode(), END_OF_DOCUMENT]
        first = int(asked.nonzero()[0])
        assert bytes(batch.tokens[row, : first + 1].tolist()) == question.encode() + b"\n"
        assert batch.targets[row][asked][:-1].tolist() == batch.tokens[row, first + 1 : first + 1 + len(answer)].tolist()


def test_text_longer_than_a_sequence_is_refused_with_the_length_it_needs() -> None:
    with pytest.raises(ConfigError, match=r"key data.seq_len = 20: .* needs at least 58"):
        QuestionStream(small(), 0, 2, 4, 20)


def test_batch_is_a_function_of_seed_stream_and_position() -> None:
    one, again, other = (QuestionStream(small(), seed, 3, 8, 64) for seed in (1, 1, 2))
    for position in (60, 0, 5):
        assert all(torch.equal(a, b) for a, b in zip(one.batch(1, position), again.batch(1, position), strict=True))
        assert not torch.equal(one.batch(1, position).tokens, other.batch(1, position).tokens)
        assert not torch.equal(one.batch(1, position).tokens, one.batch(2, position).tokens)


# ---------------------------------------------------------------- easy-VQA


def write_easy(folder: Path, size: tuple[int, int] = (8, 8)) -> None:
    from PIL import Image

    rows = {"train": [["what shape is in the image?", "circle", 3], ["what color is the shape?", "teal", 3],
                      ["is there a red shape?", "no", 7]],
            "test": [["is there a circle?", "yes", 0]]}  # fmt: skip
    for side, questions in rows.items():
        (folder / side / "images").mkdir(parents=True, exist_ok=True)
        (folder / side / "questions.json").write_text(json.dumps(questions))
        for number in {row[2] for row in questions}:
            Image.new("RGB", size, (number, 100, 200)).save(folder / side / "images" / f"{number}.png")


def test_easy_vqa_is_read_with_captions_of_what_its_answers_say(tmp_path: Path) -> None:
    write_easy(tmp_path)
    train = load_questions(f"easy_vqa:{tmp_path}").train
    assert train.pixels.shape == (2, 3, 8, 8) and train.pixels[:, 0, 0, 0].tolist() == [3, 7]
    assert train.image_index.tolist() == [0, 0, 1, 0]
    assert train.texts[-1] == ("describe.", "teal circle")


def test_missing_easy_vqa_says_what_belongs_there() -> None:
    with pytest.raises(DataError, match=r"no folder no/such \(a relative path .*\); it must hold the easy-vqa package, unzipped"):
        load_questions("easy_vqa:no/such")


def test_damaged_easy_vqa_is_refused_in_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no folders train and test"):
        load_questions(f"easy_vqa:{tmp_path}")
    write_easy(tmp_path, (8, 6))
    with pytest.raises(DataError, match=r"3.png: is 8 x 6; all must be square"):
        load_questions(f"easy_vqa:{tmp_path}")
    write_easy(tmp_path)
    (tmp_path / "train" / "images" / "7.png").unlink()
    with pytest.raises(DataError, match=r"7.png: is missing"):
        load_questions(f"easy_vqa:{tmp_path}")
    (tmp_path / "train" / "questions.json").write_text('[["what?", "yes"]]')
    with pytest.raises(DataError, match=r"not a list of \[question, answer, image\]"):
        load_questions(f"easy_vqa:{tmp_path}")


def test_easy_vqa_sides_of_different_sizes_are_refused(tmp_path: Path) -> None:
    for side, size in (("train", 8), ("test", 6)):
        write_easy(tmp_path / side, (size, size))
    (tmp_path / "data").mkdir()
    for side in ("train", "test"):
        (tmp_path / side / side).rename(tmp_path / "data" / side)
    with pytest.raises(DataError, match=r"data: its train images are 8 x 8 and its test images 6 x 6; they must"):
        load_questions(f"easy_vqa:{tmp_path}/data")


@pytest.mark.parametrize(
    "row", ['["what?", "a\\ud800b", 3]', '["\\udc00", "yes", 3]', f'["what?", "yes", {10**400}]', '["what?", "yes", -1]']
)
def test_easy_vqa_entry_that_is_no_question_is_refused_by_its_number(tmp_path: Path, row: str) -> None:
    write_easy(tmp_path)
    (tmp_path / "train" / "questions.json").write_text(f'[["what?", "yes", 3], {row}]')
    with pytest.raises(DataError, match=r"questions.json: is not a list of \[question, answer, image\]; entry 2 is \[") as caught:
        load_questions(f"easy_vqa:{tmp_path}")
    assert str(caught.value).isascii() and len(str(caught.value)) < 300


def test_source_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match="needs digits_grid or easy_vqa:DIR"):
        load_questions("digits")
    with pytest.raises(ConfigError, match="as in easy_vqa:DIR"):
        load_questions("easy_vqa")
