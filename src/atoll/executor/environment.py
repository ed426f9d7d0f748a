"""What a bit-exact replay depends on, as the tape's header records it, and how to meet it again."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path

import torch

from atoll.version import __version__


@cache
def code_version() -> str:
    """The version, and a digest of the sources: an edited checkout is another code."""
    root = Path(__file__).parents[1]
    sha = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        sha.update(path.relative_to(root).as_posix().encode())
        sha.update(path.read_bytes())
    return f"{__version__}+{sha.hexdigest()[:12]}"


def use_threads(count: int) -> None:
    """One thread is the default: small models are not faster on more, and summation order stays put. oneDNN keeps a
    pool of its own that a busy neighbour slows down, so it is off where one thread was asked for."""
    torch.set_num_threads(count)
    torch.backends.mkldnn.set_flags(_enabled=count > 1)


def cpu_capability() -> str:
    kernels = "onednn" if torch.backends.mkldnn.enabled else "no onednn"
    return f"{torch.backends.cpu.get_cpu_capability()}, {kernels}"


def mismatches(
    header_threads: int, header_torch: str, header_cpu: str, header_code: str, *, decisions_only: bool = False
) -> list[str]:
    """Why the bits may differ here from those on the tape. Decisions depend on the code alone."""
    pairs = [
        ("thread count", header_threads, torch.get_num_threads()),
        ("torch", header_torch, str(torch.__version__)),
        ("CPU capability", header_cpu, cpu_capability()),
        ("code", header_code, code_version()),
    ]
    if decisions_only:
        pairs = pairs[-1:]
    return [f"{what}: {taped} on the tape, {here} here" for what, taped, here in pairs if taped != here]
