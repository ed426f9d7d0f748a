"""Benchmarks: how each is asked, what its answers come to, and what is said of files that are wrong."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from atoll.config.models import DecoderShape
from atoll.errors import DataError
from atoll.workload.data.tokenizer import BpeTokenizer, ByteTokenizer
from atoll.workload.evaluation.benchmarks import TASKS, Item, find_file, read_items, result
from atoll.workload.evaluation.likelihood import Likelihood, Query, encode, likelihoods
from atoll.workload.models.decoder import build_decoder

RECORDS: dict[str, dict[str, object]] = {
    "hellaswag": {
        "label": "Roof", "ctx_a": "A man sits.", "ctx_b": "he", "choices": ["rips [x] tiles.", "sings [title] On."], "gold": 1,
    },
    "piqa": {"ctx": "dresser", "choices": ["use pin ", "use glue"], "gold": 0},
    "boolq": {"passage": "Corn is grown.", "ctx": "is corn grown", "choices": ["no", "yes"], "gold": 1},
    "siqa": {"passage": "Tracy left.", "ctx": "Why?", "choices": ["tired", "glad", "late"], "gold": 2},
    "copa": {"ctx": "The man turned on the faucet.", "question": "effect", "choices": ["It filled.", "Water flowed."], "gold": 1},
    "openbookqa": {"ctx": "Gas can fill", "choices": ["any box", "no box"], "gold": 0},
    "winogrande": {"ctx": "Sarah beat Maria so _ won.", "choices": ["Sarah", "Maria"], "gold": 0},
    "lambada": {"ctx": "I don't care about", "target": "signs"},
    "lambada_newlines": {"context": "I don't\n\ncare about", "continuation": "signs"},
}  # fmt: skip
ASKED = {
    "hellaswag": [("Roof: A man sits. He", " rips tiles."), ("Roof: A man sits. He", " sings. On.")],
    "piqa": [("Question: dresser\nAnswer:", " use pin "), ("Question: dresser\nAnswer:", " use glue")],
    "boolq": [("Corn is grown.\nQuestion: is corn grown?\nAnswer:", f" {word}") for word in ("no", "yes")],
    "siqa": [("Q: Tracy left. Why?\nA:", f" {word}") for word in ("tired", "glad", "late")],
    "copa": [("The man turned on the faucet therefore", f" {text}") for text in ("it filled.", "water flowed.")],
    "openbookqa": [("Gas can fill", " any box"), ("Gas can fill", " no box")],
    "winogrande": [("Sarah beat Maria so Sarah", " won."), ("Sarah beat Maria so Maria", " won.")],
    "lambada": [("I don't care about", " signs")],
    "lambada_newlines": [("I don't\n\ncare about", " signs")],
}


@pytest.mark.parametrize("task", RECORDS)
def test_question_is_worded_as_the_harness_words_it(task: str, tmp_path: Path) -> None:
    path = tmp_path / f"{task}.jsonl"
    path.write_text(json.dumps(RECORDS[task]) + "\n")
    assert find_file(task, tmp_path) == path
    (item,) = read_items(task, path)
    assert [(query.context, query.continuation) for query in item.queries] == ASKED[task]
    assert item.gold == RECORDS[task].get("gold", 0)


def test_every_task_has_a_wording_that_is_tested_or_shared() -> None:
    assert {TASKS[name].ask for name in TASKS} == {TASKS[name].ask for name in RECORDS}


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("", "task piqa: FILE is empty"),
        ('{"ctx": "a", "gold": 0}\n', "task piqa: line 1 of FILE is not an example of it (key 'choices' is missing)"),
        ('{"a":' + "[" * 5000, "task piqa: line 1 of FILE is not an example of it "
         "(maximum recursion depth exceeded while deserializing an object)"),
        ("[1]\n", "task piqa: line 1 of FILE is not an example of it (Expected `object`, got `array`)"),
        ('{"ctx": "a", "choices": ["b", "c"], "gold": 2}\n', "task piqa: line 1 of FILE has gold = 2 and 2 choices"),
        ('{"ctx": "a", "choices": ["b", "c"], "gold": true}\n', "task piqa: line 1 of FILE has gold = True and 2 choices"),
        ('{"ctx": "a\\ud800", "choices": ["b", "c"], "gold": 0}\n',
         "task piqa: line 1 of FILE is not an example of it (it holds \\ud800, half of a surrogate pair and no character)"),
    ],
)  # fmt: skip
def test_file_that_is_no_benchmark_is_refused_in_one_sentence(content: str, sentence: str, tmp_path: Path) -> None:
    path = tmp_path / "piqa_val.jsonl"
    path.write_text(content)
    with pytest.raises(DataError) as caught:
        read_items("piqa", find_file("piqa", tmp_path))
    assert str(caught.value) == sentence.replace("FILE", str(path))


CHOICES = "choices must be a list of at least 2 texts"


@pytest.mark.parametrize(
    ("task", "changes", "what"),
    [
        ("lambada", {"ctx": 5}, "ctx must be a text, not a number"),
        ("lambada", {"target": None}, "target must be a text, not null"),
        ("lambada", {"target": ""}, "target is empty"),
        ("lambada_newlines", {"continuation": ["signs"]}, "continuation must be a text, not a list"),
        ("openbookqa", {"ctx": 5}, "ctx must be a text, not a number"),
        ("piqa", {"ctx": None}, "ctx must be a text, not null"),
        ("piqa", {"choices": "ab"}, f"{CHOICES}, and is a text"),
        ("piqa", {"choices": {"text": ["a", "b"], "label": ["A", "B"]}}, f"{CHOICES}, and is an object"),
        ("piqa", {"choices": ["a"]}, f"{CHOICES}, and has 1"),
        ("piqa", {"choices": ["a", 3]}, f"{CHOICES}, and number 2 of them is a number"),
        ("piqa", {"choices": ["", "b"]}, f"{CHOICES}, and number 1 of them is empty"),
        ("hellaswag", {"ctx_b": True}, "ctx_b must be a text, not true or false"),
        ("hellaswag", {"label": {}}, "label must be a text, not an object"),
        ("boolq", {"passage": None}, "passage must be a text, not null"),
        ("siqa", {"passage": 1.5}, "passage must be a text, not a number"),
        ("copa", {"question": "why"}, "question = 'why': must be cause or effect"),
        ("copa", {"question": ["cause"]}, "question must be a text, not a list"),
        ("winogrande", {"ctx": "no gap"}, "ctx has no gap _"),
    ],
)
def test_record_of_other_types_is_refused_with_its_line_and_never_scored(
    task: str, changes: dict[str, object], what: str, tmp_path: Path
) -> None:
    path = tmp_path / f"{task}.jsonl"
    path.write_text(json.dumps(RECORDS[task]) + "\n" + json.dumps(RECORDS[task] | changes) + "\n")
    with pytest.raises(DataError) as caught:
        read_items(task, path)
    assert str(caught.value) == f"task {task}: line 2 of {path} is not an example of it ({what})"


def test_missing_folder_or_file_says_what_was_looked_for(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"--data .*/nowhere: is not a folder"):
        find_file("piqa", tmp_path / "nowhere")
    with pytest.raises(DataError, match=r"has no file arc_easy.jsonl or arc_easy_test.jsonl or arc_easy_val.jsonl"):
        find_file("arc_easy", tmp_path)


# ---------------------------------------------------------------- likelihoods


def test_seam_of_context_and_continuation_is_the_harnesss() -> None:
    ours = ByteTokenizer()
    assert encode(Query("ab  ", "cd"), ours) == (list(b"ab"), list(b"  cd"))
    assert encode(Query("", " x"), ours) == ([256], list(b" x"))
    joined = BpeTokenizer([tuple(b"ab")])  # type: ignore[list-item]
    assert encode(Query("xa", "bc"), joined) == (list(b"xa"), list(b"c")), "tokens are counted, not letters"
    assert encode(Query("a", "b"), joined) == ([256], [257]), "a token that swallows the context leaves nothing before it"



def test_question_without_any_token_is_refused() -> None:
    class Deaf(ByteTokenizer):
        def encode(self, text: bytes) -> list[int]:
            return []

    with pytest.raises(DataError, match="the tokenizer has no entry for any of '日本', a question: use another tokenizer"):
        encode(Query("日", "本"), Deaf())


def alone(model: nn.Module, query: Query, longest: int) -> Likelihood:
    context, continuation = encode(query, ByteTokenizer())
    tokens = (context + continuation)[-(longest + 1) :]
    count = min(len(continuation), len(tokens) - 1)
    logits: Tensor = model(torch.tensor([tokens[:-1]]))[0, -count:]
    losses = F.cross_entropy(logits, torch.tensor(tokens[-count:]), reduction="sum")
    return Likelihood(-losses.item(), logits.argmax(-1).tolist() == tokens[-count:])


def test_batched_likelihoods_are_those_of_each_query_alone_in_order() -> None:
    model = build_decoder(DecoderShape(vocab=257, width=16, layers=2, heads=2, mlp=24, context=24), 0).eval()
    with torch.no_grad():
        model.head.weight.mul_(30)
        words = ["the", "quick", "brown", "fox", "jumps", "over", "the", "lazy", "dog", "and", "runs", "away"]
        queries = [Query(" ".join(words[:n]), f" {words[n] * (n % 3 + 1)}") for n in range(len(words))] * 3
        told: list[int] = []
        found = likelihoods(model, queries, ByteTokenizer(), longest=24, vocab=257, progress=told.append)
        wanted = [alone(model, query, 24) for query in queries]
    assert [score.greedy for score in found] == [score.greedy for score in wanted]
    assert [score.total for score in found] == pytest.approx([score.total for score in wanted], rel=1e-4)
    assert told[-1] == len(queries)
    assert found[: len(words)] != found[1 : len(words) + 1]


def test_greedy_says_whether_each_token_was_the_likeliest() -> None:
    class Next(nn.Module):
        """After any byte the next one in the alphabet."""

        def forward(self, tokens: Tensor) -> Tensor:
            return 9.0 * F.one_hot((tokens + 1) % 257, 257)

    found = likelihoods(Next(), [Query("a", "bcd"), Query("a", "bce")], ByteTokenizer(), longest=8, vocab=257)
    assert [score.greedy for score in found] == [True, False]
    right = -math.log(1 + 256 * math.exp(-9.0))
    assert [score.total for score in found] == pytest.approx([3 * right, 3 * right - 9.0], rel=1e-4)


# ---------------------------------------------------------------- what it comes to


def scored(*totals: float) -> list[Likelihood]:
    return [Likelihood(total, total > -1.0) for total in totals]


def test_accuracy_is_told_plain_by_characters_and_by_bytes_with_standard_errors(tmp_path: Path) -> None:
    path = tmp_path / "piqa.jsonl"
    records = [{"ctx": "q", "choices": ["aaaa", "b"], "gold": 0}, {"ctx": "q", "choices": ["ääää", "bbbbb"], "gold": 1}]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    items = read_items("piqa", path)
    # -4/4 beats -2/1; by characters -10/4 loses to -12/5, by bytes (8 of them) it wins
    found = result("piqa", path.name, items, scored(-4.0, -2.0, -10.0, -12.0))
    assert (found.acc, found.acc_norm, found.acc_bytes) == (0.0, 1.0, 0.5)
    assert (found.acc_stderr, found.acc_norm_stderr) == (0.0, 0.0)
    assert found.acc_bytes_stderr == pytest.approx(math.sqrt(0.5 / 2))
    assert (found.examples, found.perplexity, found.loss) == (2, None, None)


def test_lambada_is_told_as_greedy_accuracy_and_perplexity(tmp_path: Path) -> None:
    path = tmp_path / "lambada.jsonl"
    path.write_text((json.dumps(RECORDS["lambada"]) + "\n") * 2)
    found = result("lambada", path.name, read_items("lambada", path), scored(-0.5, -3.5))
    assert found.acc == 0.5
    assert found.perplexity == pytest.approx(math.exp(2.0))
    assert found.perplexity_stderr == pytest.approx(math.exp(2.0) * math.sqrt(4.5 / 2))
    assert read_items("lambada", path, limit=1) == read_items("lambada", path)[:1]


def test_likelihood_that_is_no_number_leaves_no_figure_of_its_task(tmp_path: Path) -> None:
    """Of NaNs none is the greatest, and the first choice would seem to be chosen: an accuracy like any other."""
    path = tmp_path / "x.jsonl"
    path.write_text((json.dumps({"ctx": "q", "choices": ["a", "b"], "gold": 0}) + "\n") * 2)
    found = result("piqa", path.name, read_items("piqa", path), scored(-1.0, -2.0, -1.0, math.nan))
    assert all(math.isnan(value) for value in (found.acc, found.acc_norm, found.acc_bytes, found.acc_stderr) if value is not None)
    assert (found.examples, found.perplexity) == (2, None)
    path.write_text((json.dumps(RECORDS["lambada"]) + "\n") * 2)
    items = read_items("lambada", path)
    found = result("lambada", path.name, items, [Likelihood(-0.1, True), Likelihood(math.nan, False)])
    assert found.acc is not None and found.perplexity is not None
    assert math.isnan(found.acc) and math.isnan(found.perplexity)


def test_lambada_is_known_by_its_name_and_not_by_how_many_queries_an_example_has() -> None:
    items = [Item((Query("q", " a"),)), Item((Query("q", " a"), Query("q", " b")))]
    found = result("winogrande", "file", items, scored(-1.0, -2.0, -1.0))
    assert (found.acc, found.perplexity) == (0.5, None)
