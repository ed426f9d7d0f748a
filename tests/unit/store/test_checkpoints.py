"""Weights to and from torch.distributed.checkpoint, and the weights that a run begins with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from atoll.config import load
from atoll.errors import ConfigError, DataError
from atoll.store.checkpoints import load_initial, read_dcp, write_dcp
from atoll.store.weights import save_weights
from atoll.tasks.registry import task_for
from atoll.tasks.task import initial_model, initial_versions
from atoll.tensors.access import named_tensors

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def weights(seed: int = 1) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    return {"layer.weight": torch.randn(5, 3), "layer.bias": torch.randn(5), "seen": torch.tensor(7)}


def empty() -> dict[str, torch.Tensor]:
    return {name: torch.zeros_like(tensor) for name, tensor in weights().items()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_checkpoint_is_what_torch_reads_and_comes_back(tmp_path: Path) -> None:
    write_dcp(tmp_path / "c", weights())
    by_torch = empty()
    dcp.load(by_torch, checkpoint_id=tmp_path / "c", no_dist=True)
    assert same(by_torch, weights())
    assert same(read_dcp(tmp_path / "c", empty()), weights())


@pytest.mark.parametrize("nested", [lambda found: {"model": found, "step": 4}, lambda found: {"state": {"model": found}}])
def test_model_is_found_in_a_trainers_checkpoint(tmp_path: Path, nested: Any) -> None:
    dcp.save(nested(weights()), checkpoint_id=tmp_path / "c", no_dist=True)
    assert same(read_dcp(tmp_path / "c", empty()), weights())


@pytest.mark.parametrize("kind", ["dcp", "file"])
def test_what_does_not_fit_is_one_sentence(tmp_path: Path, kind: str) -> None:
    def stored(name: str, tensors: dict[str, torch.Tensor]) -> str:
        if kind == "dcp":
            write_dcp(tmp_path / name, tensors)
            return f"dcp:{tmp_path / name}"
        save_weights(tmp_path / f"{name}.safetensors", tensors)
        return str(tmp_path / f"{name}.safetensors")

    with pytest.raises(DataError, match=r"1 of the model's 3 tensors are not in it, the first is seen; it has 2 tensors"):
        load_initial(empty(), stored("less", {name: t for name, t in weights().items() if name != "seen"}))
    with pytest.raises(DataError, match=r"layer\.bias has the shape \(4,\), and the model's is \(5,\)"):
        load_initial(empty(), stored("other", weights() | {"layer.bias": torch.zeros(4)}))
    with pytest.raises(DataError, match=r"layer\.bias holds NaN or Inf"):
        load_initial(empty(), stored("nan", weights() | {"layer.bias": torch.full((5,), torch.nan)}))
    target = empty()
    load_initial(target, stored("whole", weights()))
    assert same(target, weights())


def test_damaged_or_missing_checkpoints_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"is no checkpoint of torch\.distributed"):
        load_initial(empty(), f"dcp:{tmp_path}")
    with pytest.raises(DataError, match=r"none\.safetensors cannot be read: No such file"):
        load_initial(empty(), str(tmp_path / "none.safetensors"))
    write_dcp(tmp_path / "c", weights())
    with pytest.raises(ConfigError, match="exists and is not an empty folder"):
        write_dcp(tmp_path / "c", weights())
    (data,) = (tmp_path / "c").glob("*.distcp")
    data.write_bytes(data.read_bytes()[:40])
    with pytest.raises(DataError, match="the checkpoint cannot be read"):
        read_dcp(tmp_path / "c", empty())
    (tmp_path / "c" / ".metadata").write_bytes(b"no pickle")
    with pytest.raises(DataError, match=r"\.metadata cannot be read"):
        read_dcp(tmp_path / "c", empty())


def test_run_begins_with_the_weights_that_its_config_names(tmp_path: Path) -> None:
    small = {
        "model": {"numbers": {"width": 16, "layers": 1, "heads": 2, "mlp": 16}}, "data": {"max_bytes": 60_000},
        "protocol": {"fragments": 2},
    }  # fmt: skip
    other = initial_model(task_for(load(overrides=small | {"seed": 9})))
    write_dcp(tmp_path / "c", named_tensors(other))
    model = small["model"] | {"init": f"dcp:{tmp_path / 'c'}"}
    task = task_for(load(overrides=small | {"model": model}))
    assert same(named_tensors(initial_model(task)), named_tensors(other))
    begun, drawn = initial_versions(task), initial_versions(task_for(load(overrides=small)))
    assert not any(torch.equal(a.theta, b.theta) for a, b in zip(begun, drawn, strict=True))


@pytest.mark.parametrize(
    ("model", "sentence"),
    [({"init": "weights.pt"}, "must be dcp:FOLDER or a .safetensors file"),
     ({"name": "custom", "init": "dcp:x"}, "begins with the weights of the first learner")],
)  # fmt: skip
def test_config_refuses_what_it_cannot_begin_with(model: dict[str, str], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        load(overrides={"model": model})
