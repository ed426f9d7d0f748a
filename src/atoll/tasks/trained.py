"""The model of a run that has trained: Theta from the run's folder in the model that its config names, to export or evaluate."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
import torch
from torch import nn

from atoll.config import CUSTOM, Config, load, read_toml
from atoll.errors import UNDECODABLE, ConfigError, DataError, UserError
from atoll.ids import OuterStep
from atoll.store.checkpoints import write_dcp
from atoll.store.durable import DurableVersions
from atoll.store.striped import RemergeOf, StripedVersions, open_versions
from atoll.store.tokenizer_file import read_tokenizer_file, tokenizer_of, tokenizer_setting
from atoll.store.version_file import FOLDER
from atoll.store.versions import digest
from atoll.store.weights import THETA_FILE, read_weights, save_weights
from atoll.tasks.task import layout_for, model_builder
from atoll.tasks.vision import VISION_MODELS
from atoll.tensors.access import named_tensors, read_buffers, read_params, write_buffers, write_params
from atoll.tensors.layout import Fragment
from atoll.workload.data.stream import heldout_batches
from atoll.workload.data.tokenizer import END_TEXT, BpeTokenizer, ByteTokenizer, JsonTokenizer, Tokenizer
from atoll.workload.data.tokens import named_tokenizer, text_data
from atoll.workload.evaluation import benchmarks
from atoll.workload.evaluation.benchmarks import TASKS, Result
from atoll.workload.evaluation.evaluate import heldout_loss
from atoll.workload.evaluation.export import (
    hf_config,
    hf_generation_config,
    hf_tensors,
    hf_tokenizer,
    hf_tokenizer_config,
    refuse_unexportable,
)  # fmt: skip
from atoll.workload.evaluation.likelihood import likelihoods
from atoll.workload.models.decoder import Decoder

RemergeFor: TypeAlias = Callable[[Config, Sequence[Fragment]], RemergeOf]
HELDOUT = "heldout"
"""Name of the held-out loss among the tasks."""


class _Summary(msgspec.Struct, frozen=True):
    total_steps: int
    """Outer steps that were taken; the config has those that were planned."""
    theta_sha256: str | None = None


@dataclass(frozen=True)
class Trained:
    run: Path
    config: Config
    model: nn.Module
    tokenizer: Tokenizer
    outer_step: OuterStep
    """The newest outer step in the weights."""

    @property
    def early(self) -> str | None:
        """A warning for the user of the model, if the run is not at its end."""
        if self.outer_step >= self.config.total_steps:
            return None
        reached = f"outer step {self.outer_step} of {self.config.total_steps}"
        return f"run {self.run}: ended early or still runs; its newest weights are those of {reached}"

    @property
    def longest(self) -> int:
        return self.model.shape.context if isinstance(self.model, Decoder) else self.config.data.seq_len


def open_trained(run: Path, allowed: Collection[str] = (), remerge_for: RemergeFor | None = None) -> Trained:
    """`run` is the folder of a virtual run, of a live run, or of a syncer started alone. The versions of a live run that ended
    early count too, and `early` then says so; initial weights alone are refused. `remerge_for`: for versions that are stored by
    their inputs only."""
    config = config_of(run)
    if config.model.name == CUSTOM:
        raise UserError(f"run {run}: model.name = 'custom' is your own code, and only it can load theta.safetensors")
    if config.model.name in VISION_MODELS:
        raise UserError(f"run {run}: model.name = {config.model.name!r} reads images; this takes language models")
    home = next((h for h in (run, run / "syncer") if (h / THETA_FILE).is_file() or (h / FOLDER).is_dir()), None)
    if home is None:
        cut = "a run that was stopped early in virtual time or under torch's DDP"
        raise UserError(f"run {run}: holds no weights (atoll sim stores none, nor does {cut})")
    ended = (home / THETA_FILE).is_file()
    summary = _summary_of(run) if ended else None
    if ended:  # theta.safetensors comes after the last step; of a run on a cut tape only the summary has the number of steps
        outer_step = summary.total_steps if summary is not None else config.total_steps
    else:
        outer_step = _newest(open_versions(home))
    if outer_step == 0:
        began = f"holds only the weights it began with (outer step 0 of {config.total_steps})"
        raise UserError(f"run {run}: {began}; name a run that stored an outer step")
    found = read_tokenizer_file(run)
    tokenizer = tokenizer_of(*found, config.data) if found else named_tokenizer(config.data) or text_data(config.data).tokenizer
    model = model_builder(config, tokenizer, allowed)()
    if ended:
        _load(home / THETA_FILE, model)
        if summary is not None and summary.theta_sha256 is not None:
            _refuse_damaged(home / THETA_FILE, run, summary.theta_sha256, config, model)
    else:  # opened again: a run that still trains may have deleted the versions found above
        remerge = remerge_for(config, layout_for(config, model).fragments) if remerge_for else None
        disk = open_versions(home, remerge)
        outer_step = _newest(disk)
        _load_versions(disk, config, model)
    return Trained(run, config, model, tokenizer, outer_step)


def config_of(run: Path) -> Config:
    path = run / "config.toml"
    if not path.is_file():
        raise UserError(f"run {run}: is not a run's folder: it has no config.toml")
    read_toml(path)  # refuses a file that is not TOML, with its name
    try:
        return load(path)
    except ConfigError as error:  # names a key; the user may never have seen this config
        raise ConfigError(f"{path}: {error}") from None


def _newest(disk: DurableVersions | StripedVersions) -> OuterStep:
    """Of all fragments: they are merged in turn, so most have an older version."""
    return max(max(kept) for kept in disk.kept())


def _summary_of(run: Path) -> _Summary | None:
    """None: a syncer started alone writes none."""
    path = run / "summary.json"
    if not path.is_file():
        return None
    try:
        return msgspec.json.decode(path.read_bytes(), type=_Summary)
    except (*UNDECODABLE, OSError) as error:
        raise DataError(f"{path} is not a run's summary: {error}") from None


def _load(path: Path, model: nn.Module) -> None:
    found = read_weights(path)
    tensors = named_tensors(model)
    for name in sorted(set(found) | set(tensors)):
        if name not in found or name not in tensors or found[name].shape != tensors[name].shape:
            raise DataError(
                f"{path} does not fit the model that config.toml names: tensor {name} is missing on one side or differs in shape"
            )
    with torch.no_grad():
        for name, tensor in tensors.items():
            tensor.copy_(found[name])


def _refuse_damaged(path: Path, run: Path, sha256: str, config: Config, model: nn.Module) -> None:
    """A flipped bit loads without an error, so compare the digest in the summary. It covers fp32 vectors: a file with other
    dtypes (bf16, integers) cannot be compared."""
    tensors, fragments = named_tensors(model), layout_for(config, model).fragments
    if any(slot.dtype != torch.float32 for fragment in fragments for slot in (*fragment.params, *fragment.buffers)):
        return
    vectors = [read_params(tensors, f) for f in fragments] + [read_buffers(tensors, f) for f in fragments]
    if digest(vectors) != sha256:
        differs = f"its SHA-256 is not theta_sha256 in {run / 'summary.json'}"
        raise DataError(f"{path} is damaged or belongs to another run: {differs}; restore the run's own file, or train again")


def _load_versions(disk: DurableVersions | StripedVersions, config: Config, model: nn.Module) -> None:
    layout = layout_for(config, model)
    tensors = named_tensors(model)
    params, buffers = disk.theta()
    if [f.numel for f in layout.fragments] != [p.numel() for p in params]:
        raise DataError(f"{disk.directory / FOLDER} does not fit the model that config.toml names: fragments differ in size")
    for fragment, flat, values in zip(layout.fragments, params, buffers, strict=True):
        write_params(tensors, fragment, flat)
        write_buffers(tensors, fragment, values)


# ---------------------------------------------------------------- export


def open_to_export(run: Path, remerge_for: RemergeFor | None = None) -> Trained:
    """As `open_trained`, but a user's own model is refused by its name, before its code would be imported."""
    name = config_of(run).model.name
    if ":" in name:
        raise _without_architecture(run, name)
    return open_trained(run, remerge_for=remerge_for)


def _without_architecture(run: Path, name: str) -> UserError:
    return UserError(f"run {run}: model.name = {name!r} has no Hugging Face architecture; only 'decoder' has one")


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
    written = [directory / name for name in (*files, "model.safetensors")]
    try:
        if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
            raise UserError(f"--hf {directory}: exists and is not an empty folder; choose another")
        with _whole_or_nothing(directory, written):
            for path, content in zip(written, files.values(), strict=False):
                raw = content if isinstance(content, bytes) else msgspec.json.format(msgspec.json.encode(content))
                path.write_bytes(raw)
            save_weights(written[-1], hf_tensors(model.shape, named_tensors(model)), {"format": "pt"})
    except OSError as error:
        raise UserError(f"--hf {directory}: cannot be written ({error.strerror})") from None
    return written


def export_dcp(run: Path, directory: Path, remerge_for: RemergeFor | None = None) -> tuple[str | None, list[Path]]:
    """Any run's weights by name; the code of a model is not needed where the run has ended. A warning, and the files."""
    home = next((h for h in (run, run / "syncer") if (h / THETA_FILE).is_file()), None)
    early = None
    if home is not None:
        tensors = read_weights(home / THETA_FILE)
    elif config_of(run).model.name == CUSTOM:
        raise UserError(f"run {run}: has not ended, so it has no {THETA_FILE} yet, and its model is your own code")
    else:
        trained = open_to_export(run, remerge_for)
        tensors, early = named_tensors(trained.model), trained.early
    try:
        write_dcp(directory, tensors)
    except OSError as error:
        raise UserError(f"--dcp {directory}: cannot be written ({error.strerror})") from None
    return early, sorted(directory.iterdir())


@contextmanager
def _whole_or_nothing(directory: Path, files: Sequence[Path]) -> Iterator[None]:
    """A partial export is useless, and would make the same command refuse the folder when it is repeated."""
    missing = [path for path in (directory, *directory.parents) if not path.exists()]
    try:
        directory.mkdir(parents=True, exist_ok=True)
        yield
    except BaseException:
        with suppress(OSError):
            for path in files:
                path.unlink(missing_ok=True)
            for path in missing:
                path.rmdir()
        raise


def _tokenizer_files(trained: Trained, context: int) -> dict[str, Any]:
    tokenizer = trained.tokenizer
    if isinstance(tokenizer, ByteTokenizer | BpeTokenizer):
        return {"tokenizer.json": hf_tokenizer(tokenizer), "tokenizer_config.json": hf_tokenizer_config(context, END_TEXT)}
    assert isinstance(tokenizer, JsonTokenizer)
    config = hf_tokenizer_config(context, tokenizer.end_text)
    return {"tokenizer.json": tokenizer.exported, "tokenizer_config.json": config}


# ---------------------------------------------------------------- evaluation


def check_tasks(names: Sequence[str], data: Path | None, limit: int | None) -> list[tuple[str, Path | None]]:
    """Each task with its file. All files are checked before a model is loaded."""
    for name in names:
        if name != HELDOUT and name not in TASKS:
            raise UserError(f"--tasks {name}: no such task; there are {', '.join((*TASKS, HELDOUT))}")
    wanted = list(dict.fromkeys(names))
    if not wanted:
        raise UserError(f"--tasks: name at least one of {', '.join((*TASKS, HELDOUT))}")
    if data is None and wanted != [HELDOUT]:
        raise UserError("--data: name the folder with the benchmarks' JSON lines")
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
        _heldout(trained, limit) if path is None else _benchmark(trained, task, path, limit, progress or _silent)
        for task, path in tasks
    ]


def _heldout(trained: Trained, limit: int | None) -> Result:
    """The held-out loss as in training, on the same batches. An example is a sequence. `limit` takes the first ones, which come
    from the beginning of the text."""
    d = trained.config.data
    text, found = text_data(d), read_tokenizer_file(trained.run)
    if found is not None and text.tokenizer.fingerprint != found[1].tokenizer:
        now = f"{tokenizer_setting(d)} gives run {trained.run} another tokenizer now"
        raise UserError(f"--tasks {HELDOUT}: {now}; leave this task out")
    if found is not None and text.tokens.fingerprint != found[1].data:
        raise UserError(f"--tasks {HELDOUT}: the text of run {trained.run} ({d.corpus}) has changed since; leave this task out")
    batches = heldout_batches(text.tokens, d.batch_size, d.seq_len, d.heldout_batches)
    if limit is not None:
        batches = list(torch.cat(batches)[:limit].split(d.batch_size))
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
