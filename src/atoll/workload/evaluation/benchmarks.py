"""Benchmarks from local JSON lines: the prompts of each, and its scores.

Multiple choice is `{ctx, choices, gold}`, some with `passage`, `question` or `label`; LAMBADA is `{ctx, target}`. Every choice is
scored by its summed log-likelihood after the prompt. Prompts are those of lm-evaluation-harness without examples (zero-shot).
Only CommonsenseQA differs: by the text of its choices instead of their letters, which small models cannot use.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias

import msgspec

from atoll.errors import DataError
from atoll.workload.data.documents import lone_surrogate
from atoll.workload.evaluation.likelihood import Likelihood, Query

QuestionRecord: TypeAlias = Mapping[str, Any]


@dataclass(frozen=True)
class Item:
    """One query per choice; without choices (LAMBADA) one query with the right continuation."""

    queries: tuple[Query, ...]
    gold: int = 0
    lengths: tuple[tuple[int, int], ...] = ()
    """Characters and bytes of each choice."""


class Result(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Standard errors are those of the mean over examples; a perplexity's follows from that of its logarithm to first order. One
    NaN likelihood makes all figures of its task NaN."""

    task: str
    examples: int
    file: str = ""
    loss: float | None = None
    acc: float | None = None
    acc_stderr: float | None = None
    acc_norm: float | None = None
    acc_norm_stderr: float | None = None
    """Normalised by the characters of the choice, as lm-evaluation-harness does under this name."""
    acc_bytes: float | None = None
    acc_bytes_stderr: float | None = None
    perplexity: float | None = None
    perplexity_stderr: float | None = None


# ---------------------------------------------------------------- fields of a record


_KINDS: Final[dict[type, str]] = {
    str: "a text", list: "a list", dict: "an object", bool: "true or false", type(None): "null",
    int: "a number", float: "a number",
}  # fmt: skip
"""Types of JSON values, for error messages."""


def _text(record: QuestionRecord, key: str) -> str:
    """Checked, because any other value would end up in the prompt: null as the word None, an object as its keys."""
    value = record[key]
    if not isinstance(value, str):
        raise ValueError(f"{key} must be a text, not {_KINDS[type(value)]}")
    return value


def _choices(record: QuestionRecord) -> list[str]:
    found, right = record["choices"], "choices must be a list of at least 2 texts"
    if not isinstance(found, list):
        raise ValueError(f"{right}, and is {_KINDS[type(found)]}")
    if len(found) < 2:
        raise ValueError(f"{right}, and has {len(found)}")
    for number, choice in enumerate(found, 1):
        if not isinstance(choice, str) or not choice:
            raise ValueError(f"{right}, and number {number} of them is {'empty' if choice == '' else _KINDS[type(choice)]}")
    return found


# ---------------------------------------------------------------- prompts


def _choose(context: str, choices: Sequence[str], gold: int) -> Item:
    queries = tuple(Query(context, f" {choice}") for choice in choices)
    return Item(queries, gold, tuple((len(choice), len(choice.encode())) for choice in choices))


def _answer(record: QuestionRecord) -> Item:
    return _choose(f"Question: {_text(record, 'ctx')}\nAnswer:", _choices(record), record["gold"])


def _continue(record: QuestionRecord) -> Item:
    return _choose(_text(record, "ctx"), _choices(record), record["gold"])


def _hellaswag(record: QuestionRecord) -> Item:
    context = f"{_text(record, 'label')}: {_text(record, 'ctx_a')} {_text(record, 'ctx_b').capitalize()}"
    return _choose(_without_brackets(context), [_without_brackets(choice) for choice in _choices(record)], record["gold"])


def _without_brackets(text: str) -> str:
    """Removes markup of WikiHow."""
    return re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". ")).replace("  ", " ")


def _boolq(record: QuestionRecord) -> Item:
    context = f"{_text(record, 'passage')}\nQuestion: {_text(record, 'ctx')}?\nAnswer:"
    return _choose(context, _choices(record), record["gold"])


def _siqa(record: QuestionRecord) -> Item:
    return _choose(f"Q: {_text(record, 'passage')} {_text(record, 'ctx')}\nA:", _choices(record), record["gold"])


def _copa(record: QuestionRecord) -> Item:
    question, joints = _text(record, "question"), {"cause": "because", "effect": "therefore"}
    if question not in joints:
        raise ValueError(f"question = {question!r}: must be cause or effect")
    choices = [choice[:1].lower() + choice[1:] for choice in _choices(record)]
    return _choose(f"{_text(record, 'ctx').strip()[:-1]} {joints[question]}", choices, record["gold"])


def _winogrande(record: QuestionRecord) -> Item:
    """Each choice fills the gap, and the rest of the sentence is scored, which is the same text for both."""
    before, gap, after = _text(record, "ctx").partition("_")
    if not gap:
        raise ValueError("ctx has no gap _")
    queries = tuple(Query(before + choice, f" {after.strip()}") for choice in _choices(record))
    return Item(queries, record["gold"])


def _lambada(record: QuestionRecord) -> Item:
    context, target = ("context", "continuation") if "context" in record else ("ctx", "target")
    if not _text(record, target):
        raise ValueError(f"{target} is empty")
    return Item((Query(_text(record, context), f" {record[target]}"),))


@dataclass(frozen=True)
class BenchmarkTask:
    files: tuple[str, ...]
    """Tried in this order, after a file with the task's own name."""
    ask: Callable[[QuestionRecord], Item]
    multiple_choice: bool = True
    """False for LAMBADA, whose one query has the right continuation."""


TASKS: Final[dict[str, BenchmarkTask]] = {
    "hellaswag": BenchmarkTask(("hellaswag_val",), _hellaswag),
    "piqa": BenchmarkTask(("piqa_val",), _answer),
    "arc_easy": BenchmarkTask(("arc_easy_test", "arc_easy_val"), _answer),
    "arc_challenge": BenchmarkTask(("arc_challenge_test", "arc_challenge_val"), _answer),
    "boolq": BenchmarkTask(("boolq_val",), _boolq),
    "winogrande": BenchmarkTask(("winogrande_xl_val", "winogrande_val"), _winogrande),
    "siqa": BenchmarkTask(("siqa_val",), _siqa),
    "openbookqa": BenchmarkTask(("openbookqa_test", "openbookqa_val"), _continue),
    "commonsenseqa": BenchmarkTask(("commonsenseqa_val",), _answer),
    "copa": BenchmarkTask(("copa_val",), _copa),
    "lambada": BenchmarkTask(("lambada_openai_test", "lambada_test"), _lambada, multiple_choice=False),
    "lambada_newlines": BenchmarkTask(("lambada_openai_newlines",), _lambada, multiple_choice=False),
}


# ---------------------------------------------------------------- reading


def find_file(task: str, directory: Path) -> Path:
    if not directory.is_dir():
        raise DataError(f"--data {directory}: is not a folder; give the one into which benchmarks.tar.xz was unpacked")
    names = [f"{name}.jsonl" for name in (task, *TASKS[task].files)]
    for name in names:
        if (directory / name).is_file():
            return directory / name
    raise DataError(f"task {task}: {directory} has no file {' or '.join(names)}")


def read_items(task: str, path: Path, limit: int | None = None) -> list[Item]:
    """The first `limit` lines of the file with the task's prompts."""
    items: list[Item] = []
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise DataError(f"task {task}: {path} cannot be read ({error.strerror})") from None
    for number, line in enumerate(lines[:limit], 1):
        try:
            item = TASKS[task].ask(msgspec.json.decode(line, type=dict[str, Any]))
        except (msgspec.DecodeError, KeyError, ValueError, RecursionError) as error:
            raise DataError(f"task {task}: line {number} of {path} is not an example of it ({_flaw(line, error)})") from None
        if not (type(item.gold) is int and 0 <= item.gold < len(item.queries)):
            raise DataError(f"task {task}: line {number} of {path} has gold = {item.gold!r} and {len(item.queries)} choices")
        items.append(item)
    if not items:
        raise DataError(f"task {task}: {path} is empty")
    return items


def _flaw(line: bytes, error: Exception) -> str:
    if isinstance(error, KeyError):
        return f"key {error} is missing"
    half = lone_surrogate(line)
    return f"it holds {half}" if half else str(error)


# ---------------------------------------------------------------- scores


def result(task: str, file: str, items: Sequence[Item], scores: Sequence[Likelihood]) -> Result:
    """`scores` are those of all items' queries in order."""
    rest = iter(scores)
    by_item = [[next(rest) for _ in item.queries] for item in items]
    if not TASKS[task].multiple_choice:
        acc, acc_error = _mean([math.nan if math.isnan(score.total) else float(score.greedy) for (score,) in by_item])
        log, log_error = _mean([score.total for (score,) in by_item])
        perplexity = math.exp(min(-log, 700.0))
        return Result(
            task=task, file=file, examples=len(items), acc=acc, acc_stderr=acc_error, perplexity=perplexity,
            perplexity_stderr=perplexity * log_error if log_error is not None else None,
        )  # fmt: skip
    pairs = list(zip(items, by_item, strict=True))
    acc, acc_error = _mean([_right(item, [score.total for score in scores]) for item, scores in pairs])
    found = Result(task=task, file=file, examples=len(items), acc=acc, acc_stderr=acc_error)
    if not items[0].lengths:
        return found
    (norm, norm_error), (by_bytes, bytes_error) = (
        _mean([_right(item, _by_length(item, scores, unit)) for item, scores in pairs]) for unit in (0, 1)
    )
    return msgspec.structs.replace(
        found, acc_norm=norm, acc_norm_stderr=norm_error, acc_bytes=by_bytes, acc_bytes_stderr=bytes_error
    )


def _by_length(item: Item, scores: Sequence[Likelihood], unit: int) -> list[float]:
    return [score.total / max(1, lengths[unit]) for score, lengths in zip(scores, item.lengths, strict=True)]


def _right(item: Item, scores: Sequence[float]) -> float:
    """The first of equal scores is the answer. With a NaN there is no answer, because it cannot be compared."""
    if any(map(math.isnan, scores)):
        return math.nan
    return float(max(range(len(scores)), key=lambda choice: scores[choice]) == item.gold)


def _mean(values: Sequence[float]) -> tuple[float, float | None]:
    """The mean and its standard error from the sample variance; a single value has no standard error."""
    count = len(values)
    mean = math.fsum(values) / count
    if count == 1:
        return mean, None
    variance = math.fsum((value - mean) ** 2 for value in values) / (count - 1)
    return mean, math.sqrt(variance / count)
