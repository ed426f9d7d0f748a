"""Log-likelihood of a text after a context: the score of multiple-choice benchmarks and of LAMBADA.

Contexts and continuations are joined and truncated as in lm-evaluation-harness, so that numbers agree. Blanks at the end of a
context move to the continuation. Both are encoded together, and the continuation begins after as many tokens as the context
alone has. A sequence that is too long loses its beginning.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from atoll.errors import DataError
from atoll.workload.data.tokenizer import Tokenizer
from atoll.workload.evaluation.evaluate import evaluating
from atoll.workload.models.decoder import logits_of

LOGITS_MAX: Final = 1 << 26
"""Elements of the logits of one batch: 256 MB in fp32."""
QUOTED_LETTERS: Final = 60
"""Letters of a text that an error message quotes."""


@dataclass(frozen=True)
class Query:
    context: str
    continuation: str


@dataclass(frozen=True)
class Likelihood:
    total: float
    """Summed log-probability of the continuation's tokens, natural logarithm."""
    greedy: bool
    """Whether greedy decoding gives exactly this continuation."""


def encode(query: Query, tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """Tokens of the context and of the continuation, neither of them empty."""
    text = query.context + query.continuation
    whole = tokenizer.encode(text.encode())
    if not whole:
        raise DataError(f"the tokenizer has no entry for any of {text[:QUOTED_LETTERS]!r}, a question: use another tokenizer")
    before = tokenizer.encode(query.context.rstrip().encode())
    if len(before) >= len(whole):  # one token spans both, and none would be left for the continuation
        before = whole[:-1]
    # An empty context becomes the end-of-document token, after which a text begins.
    return before or [tokenizer.end_of_document], whole[len(before) :]


@torch.no_grad()
def likelihoods(
    model: nn.Module, queries: Sequence[Query], tokenizer: Tokenizer, *, longest: int, vocab: int,
    progress: Callable[[int], None] | None = None,
) -> list[Likelihood]:  # fmt: skip
    """In the order of the queries. `longest`: the model's context in tokens; `vocab`: the width of its logits."""
    rows = []
    for query in queries:
        context, continuation = encode(query, tokenizer)
        tokens = (context + continuation)[-(longest + 1) :]
        rows.append((tokens, min(len(continuation), len(tokens) - 1)))
    found: list[Likelihood | None] = [None] * len(rows)
    done = 0
    with evaluating(model) as device:
        for batch in _batches([len(tokens) - 1 for tokens, _ in rows], vocab):
            time = max(len(rows[index][0]) for index in batch) - 1
            given = torch.zeros(len(batch), time, dtype=torch.int64)  # padding: a causal model ignores it
            for place, index in enumerate(batch):
                given[place, : len(rows[index][0]) - 1] = torch.tensor(rows[index][0][:-1])
            logits = logits_of(model, given.to(device))
            for place, index in enumerate(batch):
                tokens, count = rows[index]
                found[index] = _of_row(logits[place, len(tokens) - 1 - count : len(tokens) - 1], tokens[-count:])
            done += len(batch)
            if progress is not None:
                progress(done)
    return [each for each in found if each is not None]


def _of_row(logits: Tensor, targets: list[int]) -> Likelihood:
    wanted = torch.tensor(targets, device=logits.device)
    log_probabilities = F.log_softmax(logits.float(), dim=-1)
    total = log_probabilities.gather(1, wanted[:, None]).double().sum().item()
    return Likelihood(total, bool((logits.argmax(dim=-1) == wanted).all()))


def _batches(lengths: Sequence[int], vocab: int) -> list[list[int]]:
    """Indices, longest first, as many per batch as the limit on logits allows; rows of a batch have nearly equal lengths."""
    batches: list[list[int]] = []
    room = 0
    for index in sorted(range(len(lengths)), key=lambda each: (-lengths[each], each)):
        if room == 0:
            batches.append([])
            room = max(1, LOGITS_MAX // (lengths[index] * vocab))
        batches[-1].append(index)
        room -= 1
    return batches
