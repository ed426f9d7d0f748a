"""A run that has trained, as its model: Theta from its folder, in the model its config names; to export, or to ask questions."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from atoll.config import CUSTOM, Config, load
from atoll.errors import DataError, UserError
from atoll.executor.durable import FOLDER, DurableDisk
from atoll.executor.kept_text import kept_text, said, tokenizer_of
from atoll.executor.vision import VISION_MODELS
from atoll.executor.weights import save_weights
from atoll.executor.workbench import layout_for, model_builder
from atoll.ids import OuterStep
from atoll.tensors.access import named_tensors, write_buffers, write_params
from atoll.workload import benchmarks
from atoll.workload.benchmarks import TASKS, Result
from atoll.workload.bpe import BpeTokenizer, ByteTokenizer, Tokenizer
from atoll.workload.evaluate import heldout_loss
from atoll.workload.export import (
    END_TEXT,
    hf_config,
    hf_generation_config,
    hf_tensors,
    hf_tokenizer,
    hf_tokenizer_config,
    refuse_unexportable,
    token_text,
)  # fmt: skip
from atoll.workload.likelihood import likelihoods
from atoll.workload.model import Decoder
from atoll.workload.stream import heldout_batches
from atoll.workload.tokenizer_json import JsonTokenizer
from atoll.workload.tokens import named_tokenizer, text_data

HELDOUT = "heldout"
"""The held-out loss, named among the tasks."""


class _Summary(msgspec.Struct, frozen=True):
    outer_steps: int
    """As many as there were, where the config says how many there should be."""


@dataclass(frozen=True)
class Trained:
    run: Path
    config: Config
    model: nn.Module
    tokenizer: Tokenizer
    outer_step: OuterStep
    """The newest that is in the weights."""

    @property
    def early(self) -> str | None:
        """What whoever takes the model must be told, where the run is not at its end."""
        if self.outer_step >= self.config.outer_steps:
            return None
        reached = f"outer step {self.outer_step} of {self.config.outer_steps}"
        return f"run {self.run}: ended early or still runs; its newest weights are of {reached}"

    @property
    def longest(self) -> int:
        return self.model.shape.context if isinstance(self.model, Decoder) else self.config.data.seq_len


def open_trained(run: Path, allowed: Collection[str] = ()) -> Trained:
    """A virtual run's folder, a live one's, or that of a syncer started alone. What a live run had stored when it ended early
    counts too, `early` then says so; the weights that a run began with are no model of its making."""
    config = _config_of(run)
    if config.model.name == CUSTOM:
        raise UserError(f"run {run}: model.name = 'custom' is code of yours, and only it can load theta.safetensors")
    if config.model.name in VISION_MODELS:
        raise UserError(f"run {run}: model.name = {config.model.name!r} reads pictures; this takes language models")
    home = next((h for h in (run, run / "syncer") if (h / "theta.safetensors").is_file() or (h / FOLDER).is_dir()), None)
    if home is None:
        cut = "a run that was cut short in virtual time or under torch's DDP"
        raise UserError(f"run {run}: holds no weights (atoll sim leaves none, nor does {cut})")
    ended = (home / "theta.safetensors").is_file()
    outer_step = _last_told(run, config) if ended else _newest(DurableDisk.open(home, read_only=True))
    if outer_step == 0:
        began = f"holds only the weights it began with (outer step 0 of {config.outer_steps})"
        raise UserError(f"run {run}: {began}; name a run that stored an outer step")
    found = kept_text(run)
    tokenizer = tokenizer_of(*found, config.data) if found else named_tokenizer(config.data) or text_data(config.data).tokenizer
    model = model_builder(config, tokenizer, allowed)()
    if ended:
        _load(home / "theta.safetensors", model)
    else:  # opened again: if the run still goes on, the versions of a moment ago may be gone
        disk = DurableDisk.open(home, read_only=True)
        outer_step = _newest(disk)
        _load_versions(disk, config, model)
    return Trained(run, config, model, tokenizer, outer_step)


def _config_of(run: Path) -> Config:
    path = run / "config.toml"
    if not path.is_file():
        raise UserError(f"run {run}: is no run's folder, it has no config.toml")
    return load(path)


def _newest(disk: DurableDisk) -> OuterStep:
    """Fragments take turns, so most are older."""
    return max(max(kept) for kept in disk.kept())


def _last_told(run: Path, config: Config) -> OuterStep:
    """Of a run with theta.safetensors, which is written at the end. Training on a tape ends where the tape does, and a tape may
    have been cut: only the summary knows. A syncer started alone writes none, and no theta.safetensors before its last step."""
    path = run / "summary.json"
    if not path.is_file():
        return config.outer_steps
    try:
        return msgspec.json.decode(path.read_bytes(), type=_Summary).outer_steps
    except (msgspec.MsgspecError, OSError) as error:
        raise DataError(f"{path} is not a run's summary: {error}") from None


def _load(path: Path, model: nn.Module) -> None:
    try:
        found = load_file(path)
    except (SafetensorError, OSError) as error:
        raise DataError(f"{path} cannot be read: {error}") from None
    tensors = named_tensors(model)
    for name in sorted(set(found) | set(tensors)):
        if name not in found or name not in tensors or found[name].shape != tensors[name].shape:
            raise DataError(
                f"{path} is not of the model that config.toml names: tensor {name} is missing on one side or has another shape"
            )
    with torch.no_grad():
        for name, tensor in tensors.items():
            tensor.copy_(found[name])


def _load_versions(disk: DurableDisk, config: Config, model: nn.Module) -> None:
    layout = layout_for(config, model)
    tensors = named_tensors(model)
    params, buffers = disk.theta()
    if [f.numel for f in layout.fragments] != [p.numel() for p in params]:
        raise DataError(f"{disk.directory / FOLDER} is not of the model that config.toml names: fragments differ in size")
    for fragment, flat, values in zip(layout.fragments, params, buffers, strict=True):
        write_params(tensors, fragment, flat)
        write_buffers(tensors, fragment, values)


# ---------------------------------------------------------------- export


def open_to_export(run: Path) -> Trained:
    """As `open_trained`. A model of the user's own is told by its name: to build it, only to refuse it, would take its code."""
    name = _config_of(run).model.name
    if ":" in name:
        raise _without_architecture(run, name)
    return open_trained(run)


def _without_architecture(run: Path, name: str) -> UserError:
    return UserError(f"run {run}: model.name = {name!r} has no Hugging Face architecture; 'decoder' has")


def export_hf(trained: Trained, directory: Path) -> list[Path]:
    """config.json, generation_config.json, model.safetensors and the tokenizer's two files."""
    model, config = trained.model, trained.config
    if not isinstance(model, Decoder):
        raise _without_architecture(trained.run, config.model.name)
    refuse_unexportable(model.shape)
    end = trained.tokenizer.end_of_document
    files: dict[str, Any] = {
        "config.json": hf_config(model.shape, model.embedding.weight.dtype, end),
        "generation_config.json": hf_generation_config(end),
    } | _tokenizer_files(trained, model.shape.context)
    try:
        if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
            raise UserError(f"--hf {directory}: exists and is not an empty folder; choose another")
        directory.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            raw = content if isinstance(content, bytes) else msgspec.json.format(msgspec.json.encode(content))
            (directory / name).write_bytes(raw)
        tensors = hf_tensors(model.shape, named_tensors(model))
        save_weights(directory / "model.safetensors", tensors, {"format": "pt"})
    except OSError as error:
        raise UserError(f"--hf {directory}: cannot be written ({error.strerror})") from None
    return [directory / name for name in (*files, "model.safetensors")]


def _tokenizer_files(trained: Trained, context: int) -> dict[str, Any]:
    tokenizer = trained.tokenizer
    if isinstance(tokenizer, ByteTokenizer | BpeTokenizer):
        return {"tokenizer.json": hf_tokenizer(tokenizer), "tokenizer_config.json": hf_tokenizer_config(context, END_TEXT)}
    assert isinstance(tokenizer, JsonTokenizer)
    content = tokenizer.content
    end = token_text(content, tokenizer.end_of_document)
    return {"tokenizer.json": content, "tokenizer_config.json": hf_tokenizer_config(context, end)}


# ---------------------------------------------------------------- questions


def check_tasks(names: Sequence[str], data: Path | None, limit: int | None) -> list[tuple[str, Path | None]]:
    """Each task with its file, before anything is loaded."""
    for name in names:
        if name != HELDOUT and name not in TASKS:
            raise UserError(f"--tasks {name}: no such task; there are {', '.join((*TASKS, HELDOUT))}")
    wanted = list(dict.fromkeys(names))
    if not wanted:
        raise UserError(f"--tasks: name at least one of {', '.join((*TASKS, HELDOUT))}")
    if data is None and wanted != [HELDOUT]:
        raise UserError("--data: say in which folder the benchmarks' JSON lines are")
    found = [(name, None if name == HELDOUT or data is None else benchmarks.find_file(name, data)) for name in wanted]
    for name, path in found:
        if path is not None:
            benchmarks.read_items(name, path, limit)
    return found


def evaluate_run(
    trained: Trained, tasks: Sequence[tuple[str, Path | None]], limit: int | None = None,
    progress: Callable[[str, int, int], None] | None = None,
) -> list[Result]:  # fmt: skip
    """`progress(task, queries done, queries)`."""
    return [
        _heldout(trained) if path is None else _benchmark(trained, task, path, limit, progress or _silent)
        for task, path in tasks
    ]


def _heldout(trained: Trained) -> Result:
    """What training told of Theta, on the same batches. An example is a sequence: a batch is as large as memory allows."""
    d = trained.config.data
    text, found = text_data(d), kept_text(trained.run)
    if found is not None and text.tokenizer.fingerprint != found[1].tokenizer:
        raise UserError(f"--tasks {HELDOUT}: {said(d)} gives run {trained.run} another tokenizer now; leave this task out")
    if found is not None and text.tokens.fingerprint != found[1].data:
        raise UserError(f"--tasks {HELDOUT}: the text of run {trained.run} ({d.corpus}) is not what it was; leave this task out")
    batches = heldout_batches(text.tokens, d.batch_size, d.seq_len, d.heldout_batches)
    return Result(task=HELDOUT, examples=sum(map(len, batches)), loss=heldout_loss(trained.model, batches))


def _benchmark(
    trained: Trained, task: str, path: Path, limit: int | None, progress: Callable[[str, int, int], None]
) -> Result:
    items = benchmarks.read_items(task, path, limit)
    queries = [query for item in items for query in item.queries]
    scores = likelihoods(
        trained.model, queries, trained.tokenizer, longest=trained.longest, vocab=trained.tokenizer.vocab_size,
        progress=lambda done: progress(task, done, len(queries)),
    )  # fmt: skip
    return benchmarks.result(task, path.name, items, scores)


def _silent(task: str, done: int, of: int) -> None:
    pass
