"""bench/quality/tried.py: what was tried for the gap does what its name says."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch


@pytest.fixture
def tried(bench_script: Callable[[str], ModuleType]) -> Any:
    return bench_script("quality/tried")


def rand(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_spectral_merges_even_out_a_matrix_and_leave_vectors_to_the_mean(tried: Any) -> None:
    deltas, weights = [rand(16, 40, seed=m) for m in range(3)], [1.0, 2.0, 1.0]
    mean = (deltas[0] + 2 * deltas[1] + deltas[2]) / 4
    values = torch.linalg.svdvals(mean)
    usual = (deltas[0].norm() + 2 * deltas[1].norm() + deltas[2].norm()) / 4
    for name, length in (("spectral", mean.norm()), ("spectral_long", usual)):
        found = getattr(tried, name)(deltas, weights)
        strengths = torch.linalg.svdvals(found)
        assert float(strengths.max() / strengths.min()) < 2.0 < float(values.max() / values.min())
        torch.testing.assert_close(found.norm(), length)
        torch.testing.assert_close(getattr(tried, name)([d[0] for d in deltas], weights), mean[0])


def test_halved_is_half_of_the_weighted_mean(tried: Any) -> None:
    deltas = [rand(5, 4, seed=m) for m in range(2)]
    torch.testing.assert_close(tried.halved(deltas, [3.0, 1.0]), (3 * deltas[0] + deltas[1]) / 8)


def test_learner_that_shares_moments_takes_the_mean_of_all_where_it_adopts(
    bench_script: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    train: Any = bench_script("quality/train")
    words = (
        "--name x --preset decoupled --learners 3 --tokens 4e3 --step-tokens 96 --seq-len 16 --corpus stdlib --tokenizer bytes "
        "--size width=16,layers=2,heads=2,mlp=32,tied=1 --device cpu --heldout-batches 1 --share-moments --out x "
        "--set inner.optimizer=Muon --set protocol.local_steps_per_round=2 --set protocol.fragments=2 --set protocol.overlap=1 "
        "--set protocol.quorum=3 --set data.max_bytes=200000 --heldout="
    )
    chosen = train.options().parse_args(words.split())
    config = train.settings(chosen, 12)
    sharing, seen = train.tried.SharingLearner, []
    as_usual = sharing._adopt

    def adopting(learner: Any, adopt: Any) -> None:
        moments = learner._fleet._moments._moments
        at = next(at for at, own in enumerate(moments) if "momentum_buffer" in own)
        mean = moments[at]["momentum_buffer"].mean(dim=0)
        as_usual(learner, adopt)
        whole = [slot.name for slot in learner._fragments[adopt.fragment].params]
        if adopt.merged and list(learner._fleet._weights)[at] in whole:
            seen.append(torch.equal(moments[at]["momentum_buffer"][learner._learner], mean))

    monkeypatch.setattr(sharing, "_adopt", adopting)
    going = train.begun(chosen, config, train.evaluated_on(train.language_task(config), torch.device("cpu")))
    train.run(going.cluster)
    assert len(seen) > 5 and all(seen)
