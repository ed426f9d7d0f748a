"""What a bit-exact replay depends on: recorded in the tape's header, compared and set up again here."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import torch

from atoll.config import Config
from atoll.store.versions import IN_BLOCKS
from atoll.tape.format import Header
from atoll.version import __version__


@cache
def code_version() -> str:
    """The version and a digest of the sources, so that an edited checkout has another version."""
    root = Path(__file__).parents[1]
    sha = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        sha.update(path.relative_to(root).as_posix().encode())
        sha.update(path.read_bytes())
    return f"{__version__}+{sha.hexdigest()[:12]}"


def use_threads(count: int) -> None:
    """One thread is the default: small models gain nothing from more, and the order of summation stays fixed. oneDNN has its
    own thread pool, which slows down on a busy machine, so it is off with one thread."""
    torch.set_num_threads(count)
    torch.backends.mkldnn.set_flags(_enabled=count > 1)


def cpu_capability() -> str:
    kernels = "onednn" if torch.backends.mkldnn.enabled else "no onednn"
    return f"{torch.backends.cpu.get_cpu_capability()}, {kernels}"


def device_words(device: torch.device) -> str:
    """Its kind, and the name of a GPU: two of different names need not give the same bits."""
    return f"{device.type} ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else device.type


def mismatches(header: Header, compute_here: str, device_here: str = "cpu", *, decisions_only: bool = False) -> list[str]:
    """Reasons why a replay here may differ in bits from the tape. Decisions depend on the code alone."""
    pairs = [
        ("thread count", header.threads, torch.get_num_threads()),
        ("torch", header.torch_version, str(torch.__version__)),
        ("CPU capability", header.cpu_capability, cpu_capability()),
        ("device", header.device, device_here if header.compute else "cpu"),
        ("arithmetic", header.compute or compute_here, compute_here),
        ("code", header.code_version, code_version()),
    ]
    if decisions_only:
        pairs = pairs[-1:]
    return [f"{what}: {taped} on the tape, {here} here" for what, taped, here in pairs if taped != here]


def tape_header(config: Config, *, data_fingerprint: str, tensors: bool, compute: str = "", **more: Any) -> Header:
    """The header of a tape that this process writes, with everything of this process that a bit-exact replay depends on."""
    return Header(
        config=msgspec.to_builtins(config), code_version=code_version(), data_fingerprint=data_fingerprint,
        threads=torch.get_num_threads(), torch_version=str(torch.__version__),
        cpu_capability=cpu_capability(), tensors=tensors, compute=compute, digests=IN_BLOCKS,
        **more,
    )  # fmt: skip
