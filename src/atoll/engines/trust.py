"""Certificates and tokens of a run that leaves this machine: made once, by `atoll up`, or given by the user."""

from __future__ import annotations

from pathlib import Path

from atoll.engines.deployment import Deployment, learner_name
from atoll.errors import UserError
from atoll.transport.keys import add_learner, make_keys


def ensure_keys(deployment: Deployment) -> Path:
    """A certificate for each learner, one for the syncer, and a join token. Nothing that is there is replaced."""
    folder = deployment.keys
    names = [learner_name(n) for n in deployment.learners]
    if not (folder / "ca.pem").exists():
        if deployment.placement.keys:
            raise UserError(f"key placement.keys = {str(folder)!r}: there is no ca.pem; make the folder with `atoll keys`")
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        make_keys(folder, learners=names)
    for name in names:
        if not (folder / f"{name}.pem").exists():
            add_learner(folder, name)
    return folder


def syncer_files(folder: Path) -> list[Path]:
    return [folder / name for name in ("ca.pem", "syncer.pem", "syncer.key", "token.key", "token") if (folder / name).exists()]


def learner_files(folder: Path, learner: int) -> list[Path]:
    """Its own alone."""
    name = learner_name(learner)
    return [folder / "ca.pem", folder / f"{name}.pem", folder / f"{name}.key", folder / "token"]
