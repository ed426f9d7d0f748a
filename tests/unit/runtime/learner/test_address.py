"""Whose model is it: a learner's is compared with the one that the syncer was sent."""

from __future__ import annotations

import asyncio
import logging
import random
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from atoll.errors import ConfigError, UserError
from atoll.runtime.join import upload as join_upload
from atoll.runtime.learner import address as addresses
from atoll.runtime.learner.address import Address, request_place
from atoll.runtime.log import PacedLog
from atoll.runtime.syncer.places import Placement
from atoll.tensors.access import named_tensors
from atoll.tensors.inventory import frozen_digest, with_frozen
from atoll.tensors.layout import Layout, build_layout
from atoll.transport import LinkFailed


def placed(layout: str) -> Placement:
    return Placement(learner=1, incarnation=0, key="", run="r", epoch=0, config={}, data_fingerprint="", layout=layout)


def model_of(backbone: float, *, frozen: bool = True) -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
    nn.init.constant_(model[0].weight, backbone)
    nn.init.zeros_(model[0].bias)
    if frozen:
        model[0].requires_grad_(False)
    return model


def agree(here: nn.Module, there: str) -> None:
    address = Address(syncer="127.0.0.1:1", token="t", run="", listen="", advertise="")
    asyncio.run(join_upload.agree_on_model(address, placed(there), layout_of(here), weights_of(here), frozen_digest(here)))


def weights_of(model: nn.Module) -> join_upload.OwnWeights:
    return join_upload.OwnWeights(named_tensors(model), layout_of(model).fragments)


def layout_of(model: nn.Module) -> Layout:
    return build_layout(model, "whole")


def fingerprint(model: nn.Module) -> str:
    return with_frozen(layout_of(model).fingerprint, frozen_digest(model))


def test_learner_is_let_in_where_what_trains_is_alike_and_the_frozen_part_the_same(caplog: pytest.LogCaptureFixture) -> None:
    for frozen in (False, True):
        agree(model_of(0.5, frozen=frozen), fingerprint(model_of(0.5, frozen=frozen)))
    agree(model_of(0.5, frozen=False), fingerprint(model_of(0.25, frozen=False)))  # its weights are overwritten
    assert not caplog.records


def test_learner_with_another_frozen_part_is_told_so_and_what_would_be_right() -> None:
    with pytest.raises(ConfigError, match=r"frozen part .*requires_grad=False.*load the same weights.*on every learner"):
        agree(model_of(0.5), fingerprint(model_of(0.25)))


def test_learner_that_has_no_frozen_part_where_the_run_has_one_is_told_so() -> None:
    head = nn.Sequential(nn.Identity(), nn.Linear(4, 1))
    assert fingerprint(model_of(0.5)).startswith(fingerprint(head)), "what trains is the same"
    with pytest.raises(ConfigError, match="frozen part"):
        agree(head, fingerprint(model_of(0.5)))


def test_learner_with_other_tensors_is_told_that_and_not_of_its_frozen_part() -> None:
    for there in (model_of(0.5, frozen=False), nn.Linear(3, 2).requires_grad_(True)):
        with pytest.raises(ConfigError, match="other names, shapes or dtypes"):
            agree(model_of(0.5), fingerprint(there))


def test_run_that_was_never_told_of_its_frozen_part_is_joined_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    """An older Atoll sent the model or keeps it: such a run must not become one that nobody can come back to."""
    with caplog.at_level(logging.WARNING):
        agree(model_of(0.5), layout_of(model_of(0.5)).fingerprint)
    assert ["not compared" in r.getMessage() for r in caplog.records] == [True]


def test_first_learner_uploads_the_fingerprint_of_the_whole_model(monkeypatch: pytest.MonkeyPatch) -> None:
    uploaded: list[Layout] = []
    model = model_of(0.5)

    async def answer(*_: object) -> bytes:
        return fingerprint(model).encode()

    monkeypatch.setattr(join_upload, "pack_model", lambda layout, *_: uploaded.append(layout))
    monkeypatch.setattr(join_upload, "upload_model", answer)
    torch.manual_seed(0)
    address = Address(syncer="127.0.0.1:1", token="t", run="", listen="", advertise="")
    place = Placement(
        learner=0, incarnation=0, key="", run="r", epoch=0, config={}, data_fingerprint="", layout="", needs_model=True
    )
    asyncio.run(join_upload.agree_on_model(address, place, layout_of(model), weights_of(model), frozen_digest(model)))
    assert [layout.fingerprint for layout in uploaded] == [fingerprint(model)]


def test_learner_that_waits_says_so_at_once_and_again_at_a_bounded_rate(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With the name of the syncer, how long it waited and for how long it will, as warnings: a library's users see those. On a
    clock of its own, which only its sleeps move."""
    now = [100.0]

    async def closed(*_: object) -> bytes:
        raise LinkFailed("nobody listens there")

    async def sleep(seconds: float) -> None:
        now[0] += seconds

    monkeypatch.setattr(addresses, "call", closed)
    monkeypatch.setattr(addresses, "asyncio", SimpleNamespace(sleep=sleep))
    monkeypatch.setattr(addresses, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(addresses, "PacedLog", lambda seconds: PacedLog(seconds, lambda: now[0]))
    address = Address(syncer="127.0.0.1:1", token="t", join_timeout_seconds=60.0)
    with caplog.at_level(logging.INFO), pytest.raises(UserError, match=r"^syncer 127\.0\.0\.1:1: cannot be joined: nobody"):
        asyncio.run(request_place(address, -1, random.Random(0)))
    first, *waits = caplog.records
    assert first.levelno == logging.INFO and "127.0.0.1:1" in first.getMessage()
    assert 4 <= len(waits) <= 7 and {line.levelno for line in waits} == {logging.WARNING}
    assert all("127.0.0.1:1" in line.getMessage() and "nobody listens there" in line.getMessage() for line in waits)


def test_address_by_file_is_read_anew_for_every_connection(tmp_path: Path) -> None:
    file = tmp_path / "address"
    address = Address(syncer=f"file:{file}", token="t")
    with pytest.raises(LinkFailed, match="does not say yet"):
        address.where()
    for found in ("127.0.0.1:7077", "localhost:7078"):
        file.write_text(found + "\n")
        assert address.where() == found
    file.write_text("half an addr")
    with pytest.raises(LinkFailed):
        address.where()


def test_address_by_file_on_another_machine_needs_keys_as_any_other_does(tmp_path: Path) -> None:
    (tmp_path / "address").write_text("node7.example:7077")
    address = Address(syncer=f"file:{tmp_path / 'address'}", token="t")
    with pytest.raises(UserError, match=r"node7\.example:7077.*is not a loopback address"):
        address.where()
    assert replace(address, insecure=True).where() == "node7.example:7077"


def test_large_fragments_are_spread_over_two_connections_unless_told_otherwise() -> None:
    address = Address(syncer="127.0.0.1:1", token="t")
    assert [address.connections_for(parameters) for parameters in (0, 1 << 20, 8 << 20, 47_000_000)] == [1, 1, 2, 2]
    assert replace(address, connections=4).connections_for(1 << 20) == 4
    assert replace(address, connections=1).connections_for(47_000_000) == 1
