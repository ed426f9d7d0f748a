"""A learner's state as bytes: exact round trips, and no byte pattern that does more than raise a DataError."""

from __future__ import annotations

import base64
import copy
import errno
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn

from atoll.errors import ConfigError, DataError
from atoll.store.tensor_files import (
    FORMAT,
    StorageFailed,
    flatten,
    pack_state,
    read_state,
    refuse_unserialisable,
    unpack_state,
    write_state,
)

OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True),
    "Adam with amsgrad and a tensor for a rate": lambda p: torch.optim.Adam(p, lr=torch.tensor(1e-3), amsgrad=True),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "plain SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "Adagrad": lambda p: torch.optim.Adagrad(p),
    "RMSprop": lambda p: torch.optim.RMSprop(p, centered=True, momentum=0.5),
    "NAdam": lambda p: torch.optim.NAdam(p),
    "Adafactor": lambda p: torch.optim.Adafactor(p),
    "LBFGS": lambda p: torch.optim.LBFGS(p, max_iter=4),
}


def same(a: Any, b: Any) -> bool:
    """Equal in value, type, key order and bits."""
    if type(a) is not type(b) and not (isinstance(a, Tensor) and isinstance(b, Tensor)):
        return False
    if isinstance(a, Tensor):
        bits = [x.detach().contiguous().reshape(-1).view(torch.uint8) for x in (a, b)]
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*bits)
    if isinstance(a, dict):
        return list(a) == list(b) and [type(k) for k in a] == [type(k) for k in b] and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return repr(a) == repr(b)


def joined(state: Any) -> bytes:
    return b"".join(pack_state(state))


def stepped(build: Callable[[list[nn.Parameter]], torch.optim.Optimizer]) -> torch.optim.Optimizer:
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(4, 3)), nn.Parameter(torch.randn(3))]
    optimizer = build(params)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (params[0].sin().sum(0) * params[1].exp()).sum()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    for _ in range(3):
        optimizer.step(closure)  # type: ignore[arg-type]
    return optimizer


def learner_state() -> dict[str, Any]:
    theta = torch.randn(15)
    return {
        "tensors": {"a.weight": torch.randn(4, 3).bfloat16(), "a.bias": torch.randn(3), "steps": torch.tensor(7)},
        "optimizer": copy.deepcopy(stepped(OPTIMIZERS["AdamW"]).state_dict()),
        "anchors": [theta, None],
        "round_start": [None, None],
        "kept": {0: (12, theta, torch.zeros(0))},
        "residuals": {1: torch.randn(3)},
    }


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer_state_comes_back_exactly_and_the_optimizer_takes_it(name: str) -> None:
    optimizer = stepped(OPTIMIZERS[name])
    refuse_unserialisable(optimizer)
    state = optimizer.state_dict()
    back = unpack_state(joined(state))
    assert same(state, back)
    optimizer.load_state_dict(back)


def test_learner_state_comes_back_exactly_and_a_shared_tensor_stays_one() -> None:
    state = learner_state()
    back = unpack_state(memoryview(joined(state)))
    assert same(state, back)
    assert back["anchors"][0] is back["kept"][0][1]
    assert len(flatten({"a": state["anchors"][0], "b": state["anchors"][0]}, "x")[1]) == 1


@pytest.mark.parametrize(
    "value",
    [
        None, True, 0, -(2**63), 2**64 - 1, 0.1, float("nan"), float("inf"), -0.0, "", "π", [], (), {}, [[]], ((),),
        {0: 1, "0": 2}, {"0": torch.ones(1), 0: torch.zeros(1)}, {1: [(None, 0.001), {"betas": (0.9, 0.999)}]},
        torch.tensor(3.5), torch.tensor(True), torch.empty(0), torch.empty(3, 0, 2), torch.arange(6).view(2, 3).t(),
        torch.linspace(-1, 2, 5).double(), torch.linspace(-1, 2, 5).half(),
        torch.tensor([True, False]), torch.arange(3, dtype=torch.int8),
        torch.ones(2).expand(3, 2), nn.Parameter(torch.ones(2)),
        {"T": "T", "l": ["T", "d", "l"]}, {"__metadata__": torch.ones(1)},
    ],
    ids=lambda v: str(v).replace("\n", "")[:40],
)  # fmt: skip
def test_plain_values_come_back_exactly(value: Any) -> None:
    assert same(value, unpack_state(joined(value)))


def test_packing_copies_no_tensor_and_the_safetensors_library_reads_the_file(tmp_path: Path) -> None:
    state = learner_state()
    addresses = {memory.obj.ctypes.data for memory in pack_state(state)[1:] if isinstance(memory, memoryview)}
    assert state["anchors"][0].data_ptr() in addresses
    write_state(tmp_path / "state", state)
    with safe_open(str(tmp_path / "state"), "pt") as file:
        assert torch.equal(file.get_tensor("state/tensors/a.weight"), state["tensors"]["a.weight"])
        assert file.metadata()["format"] == FORMAT


def test_what_is_not_plain_data_is_refused_by_name() -> None:
    optimizer = stepped(OPTIMIZERS["SGD"])
    optimizer.param_groups[0]["schedule"] = lambda step: step
    with pytest.raises(ConfigError, match=r"SGD cannot be stored or sent: state_dict\(\)/param_groups/0/schedule.*function"):
        refuse_unserialisable(optimizer)
    del optimizer.param_groups[0]["schedule"]
    refuse_unserialisable(optimizer)
    first = next(iter(optimizer.state))
    optimizer.state[first]["cache"] = Path("x")
    with pytest.raises(ConfigError, match=r"state/0/cache is of type PosixPath"):
        refuse_unserialisable(optimizer)


def test_odd_values_are_refused() -> None:
    endless: list[Any] = []
    endless.append(endless)
    for value in (endless, 2**64, {1.5: 0}, {True: 0}, {None: 0}, b"x", {1, 2}, "\ud800", torch.ones(2).to_sparse()):
        with pytest.raises(ConfigError):
            pack_state(value)


def test_damaged_bytes_give_a_data_error_and_nothing_else() -> None:
    whole = joined({"a": [torch.arange(3), torch.tensor([True])], "b": (1, "x", None)})
    chance = random.Random(0)
    for length in range(0, len(whole), 3):
        with pytest.raises(DataError):
            unpack_state(whole[:length])
    with pytest.raises(DataError, match="oversized"):
        unpack_state(whole + b"x")
    for _ in range(1500):  # a flipped bit of a number is not seen here (files have checksums), but nothing else may happen
        hurt = bytearray(whole)
        for _ in range(chance.choice((1, 1, 4))):
            hurt[chance.randrange(len(hurt))] = chance.randrange(256)
        try:
            unpack_state(hurt)
        except DataError:
            continue


def crafted(structure: bytes = b"\xc0", data: bytes = b"", **entries: Any) -> bytes:
    metadata = {"format": FORMAT, "structure": base64.b64encode(structure).decode()}
    text = msgspec.json.encode({"__metadata__": metadata, **entries})
    return len(text).to_bytes(8, "little") + text + data


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        (crafted(b"\x91" * 5000 + b"\xc0"), "structure"),
        (crafted(msgspec.msgpack.encode(["l", ["T", "nobody"]])), "structure"),
        (crafted(msgspec.msgpack.encode(["d", 1])), "structure"),
        (crafted(msgspec.msgpack.encode(["d", 1, 2, 1, 3])), "structure"),
        (crafted(msgspec.msgpack.encode(["d", [1], 2])), "structure"),
        (crafted(msgspec.msgpack.encode({"a": 1})), "structure"),
        (crafted(msgspec.msgpack.encode(b"x")), "structure"),
        (crafted(b"\xc0\xc0"), "structure"),
        (crafted(b"\x81\x90\x01"), "structure"),
        (crafted(a={"dtype": "F32", "shape": [2**60], "data_offsets": [0, 2**62]}), "shape"),
        (crafted(a={"dtype": "F32", "shape": [2**40, 2**40, 0], "data_offsets": [0, 0]}), "shape"),
        (crafted(a={"dtype": "F32", "shape": [2**40], "data_offsets": [0, 2**42]}), "truncated"),
        (crafted(a={"dtype": "F32", "shape": [-1], "data_offsets": [0, 0]}), "header"),
        (crafted(a={"dtype": "X", "shape": [], "data_offsets": [0, 4]}, data=b"abcd"), "dtype"),
        (crafted(a={"dtype": "I32", "shape": [], "data_offsets": [4, 8]}, data=b"abcdefgh"), "offsets"),
        (crafted(a={"dtype": "BOOL", "shape": [], "data_offsets": [0, 1]}, data=b"\x07"), "bool"),
        (b"\xff" * 8 + b"{}", "truncated"),
        (b"\x02" + b"\0" * 7 + b"{}", "format"),
        ((10**5).to_bytes(8, "little") + b"[" * 10**5, "header"),
        (b"", "truncated"),
    ],
)  # fmt: skip
def test_hostile_bytes_are_refused(bad: bytes, why: str) -> None:
    with pytest.raises(DataError, match=why):
        unpack_state(bad)


def test_state_file_is_checked_by_its_sum(tmp_path: Path) -> None:
    state, path = learner_state(), tmp_path / "state.safetensors"
    sha256 = write_state(path, state)
    assert same(state, read_state(path, sha256)) and same(state, read_state(path))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(DataError, match=r"state\.safetensors is damaged"):
        read_state(path, sha256)
    with pytest.raises(DataError, match="nothing is missing"):
        read_state(tmp_path / "nothing")


def test_full_disk_leaves_the_old_file_and_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "state"
    sha256 = write_state(path, {"x": torch.ones(3)})

    def full(handle: int, data: Any) -> int:
        raise OSError(28, "No space left on device")

    sentence = r"state: \d+ bytes were needed and \d+ are free: No space"
    with monkeypatch.context() as patch, pytest.raises(StorageFailed, match=sentence):
        patch.setattr(os, "write", full)
        write_state(path, {"x": torch.zeros(3)})
    assert [p.name for p in tmp_path.iterdir()] == ["state"]
    assert same(read_state(path, sha256), {"x": torch.ones(3)})


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE])
def test_read_without_a_descriptor_may_be_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Nothing is wrong with the file, so it is no DataError, which would end a syncer."""
    write_state(tmp_path / "state", {"a": 1})

    def none_left(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch, pytest.raises(StorageFailed):
        patch.setattr(Path, "open", none_left)
        read_state(tmp_path / "state")
    assert read_state(tmp_path / "state") == {"a": 1}
