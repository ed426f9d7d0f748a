"""What is trained: the model, its fragments, the data and the held-out set, built once from a config.

A `Task` is a plain value of functions, so that a test, an example or a user can build another.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from atoll.config import Config
from atoll.config.models import DECODER, SIZES, USUAL_SIZE
from atoll.errors import ConfigError
from atoll.ids import LearnerId
from atoll.rules import samples_max, samples_of
from atoll.store.checkpoints import load_initial
from atoll.store.versions import Version
from atoll.tensors.access import named_tensors, read_buffers, read_params, write_buffers, write_params
from atoll.tensors.inventory import frozen_parameters
from atoll.tensors.layout import Layout, build_layout
from atoll.tensors.outer import initial_state, outer_rule
from atoll.workload.data.corpus import Progress
from atoll.workload.data.seeds import generator
from atoll.workload.data.stream import Stream, heldout_batches
from atoll.workload.data.tokenizer import Tokenizer
from atoll.workload.data.tokens import text_data
from atoll.workload.evaluation.evaluate import heldout_loss
from atoll.workload.models.decoder import Decoder, build_model, language_model_loss, logits_of


@dataclass(frozen=True)
class Task:
    config: Config
    build: Callable[[], nn.Module]
    """A new model with the initial weights, the same on every call."""
    batch: Callable[[LearnerId, LearnerId, int], Any]
    """(learner, stream, micro-batch position) -> a batch; a pure function."""
    loss: Callable[[nn.Module, Any], Tensor]
    count: Callable[[Any], tuple[int, int]]
    """(tokens, samples) of a batch."""
    evaluate: Callable[[nn.Module], float]
    layout: Layout
    fingerprint: str
    accuracy: Callable[[nn.Module], float] | None = None
    """Share of held-out answers that are right; None for a task without right answers."""
    notes: tuple[str, ...] = ()
    """Sentences for the user about the data, such as which files were left out."""
    tokenizer: Tokenizer | None = None
    scratch: Callable[[], nn.Module] | None = None
    """A model to be overwritten and measured, kept where it is evaluated. None: a new one each time."""

    def evaluate_theta(self, params: Sequence[Tensor], buffers: Sequence[Tensor]) -> float:
        """Held-out loss of the outer parameters, not of a learner's weights."""
        return self.evaluate(self._filled(self._measured_model(), params, buffers))

    def accuracy_of_theta(self, params: Sequence[Tensor], buffers: Sequence[Tensor]) -> float | None:
        return None if self.accuracy is None else self.accuracy(self._filled(self._measured_model(), params, buffers))

    def model_of(self, params: Sequence[Tensor], buffers: Sequence[Tensor]) -> nn.Module:
        return self._filled(self.build(), params, buffers)

    def _measured_model(self) -> nn.Module:
        return (self.scratch or self.build)()

    def _filled(self, model: nn.Module, params: Sequence[Tensor], buffers: Sequence[Tensor]) -> nn.Module:
        tensors = named_tensors(model)
        for fragment, flat, values in zip(self.layout.fragments, params, buffers, strict=True):
            write_params(tensors, fragment, flat)
            write_buffers(tensors, fragment, values)
        return model


def layout_for(config: Config, model: nn.Module) -> Layout:
    p = config.protocol
    try:
        layout = build_layout(
            model, p.fragmentation, p.fragments, layers_per_fragment=p.layers_per_fragment, order=p.layer_order,
            embedding_glob=p.embedding_glob or None, outer_scope=config.outer.apply_outer_optimizer_to,
        )  # fmt: skip
    except ConfigError as error:  # names arguments; the user knows the section
        raise ConfigError(f"section protocol: {error}") from None
    if len(layout.fragments) != p.fragments:
        found = len(layout.fragments)
        raise ConfigError(f"key protocol.fragments = {p.fragments}: this model has {found} by {p.fragmentation!r}")
    return layout


def language_task(config: Config, allowed: Collection[str] = (), progress: Progress | None = None) -> Task:
    """The default task: next-token prediction on real text. A user's own model is named package.module:function, is imported
    only if it is `allowed`, and maps a batch of tokens to logits as the decoder does."""
    _model_maker(config.model.name, allowed)  # refuse a name before the text is read
    d = config.data
    text = text_data(d, progress)
    data, tokenizer = text.tokens, text.tokenizer
    build = model_builder(config, tokenizer, allowed)
    if config.model.name == DECODER:
        layout = layout_for(config, _shapes_of(build))
    else:
        layout = layout_for(config, model := build())
        _check_own(config, model)
    stream = Stream(data, config.seed, config.learners, samples_max(config), d.seq_len)
    heldout = heldout_batches(data, d.batch_size, d.seq_len, d.heldout_batches)

    def batch(learner: LearnerId, stream_id: LearnerId, position: int) -> Tensor:
        return stream.batch(stream_id, position)[: samples_of(config, learner)]

    return Task(
        config, build, batch, language_model_loss, lambda b: (b.shape[0] * (b.shape[1] - 1), b.shape[0]),
        lambda model: heldout_loss(model, heldout), layout, data.fingerprint, notes=text.notes, tokenizer=tokenizer,
    )  # fmt: skip


def _shapes_of(build: Callable[[], nn.Module]) -> nn.Module:
    """The decoder without its numbers: drawing those of half a billion parameters takes seconds, and a layout needs none of them.
    (A user's own model is built in earnest: it may not be able to without memory.)"""
    with torch.device("meta"):
        return build()


def model_builder(config: Config, tokenizer: Tokenizer, allowed: Collection[str] = ()) -> Callable[[], nn.Module]:
    """Makes the language model that a config names, with its initial weights. A decoder without a size is `nano`; a user's own
    model defines its own sizes."""
    maker = _model_maker(config.model.name, allowed)
    usual = SIZES[USUAL_SIZE] if config.model.name == DECODER else {}
    numbers = usual | {"vocab": tokenizer.vocab_size, "context": config.data.seq_len} | config.model.numbers
    if int(numbers["vocab"]) < tokenizer.vocab_size:
        raise ConfigError(f"key model.numbers.vocab = {numbers['vocab']}: the tokenizer has {tokenizer.vocab_size} entries")
    return lambda: checkpointed(config, maker(numbers, config.seed).to(torch.float32))


def checkpointed(config: Config, model: nn.Module) -> nn.Module:
    if config.model.checkpoint_activations:
        if not isinstance(model, Decoder):
            raise ConfigError(f"key model.checkpoint_activations = true: model.name = {config.model.name!r} is no decoder")
        model.checkpoint_activations = True
    return model


def _model_maker(name: str, allowed: Collection[str]) -> Callable[[Mapping[str, int | float | bool], int], nn.Module]:
    if name == DECODER:
        return lambda numbers, seed: build_model(DECODER, dict(numbers), seed)
    module, _, function = name.partition(":")
    if name not in allowed:
        raise ConfigError(f"key model.name = {name!r}: is your own code; allow it here with --allow-model {name}")
    try:
        made = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, SyntaxError) as error:
        raise ConfigError(f"key model.name = {name!r}: cannot be imported ({error})") from None
    if not callable(made):
        kind = type(made).__name__
        raise ConfigError(f"key model.name = {name!r}: has type {kind}; it must be a function that returns the model")

    def make(numbers: Mapping[str, int | float | bool], seed: int) -> nn.Module:
        _check_takes(name, made, numbers)
        torch.manual_seed(generator("model", seed).initial_seed())
        model = made(**numbers)
        if not isinstance(model, nn.Module):
            raise ConfigError(f"key model.name = {name!r}: returned {type(model).__name__}, not a torch.nn.Module")
        return model

    return make


def _check_takes(name: str, made: Callable[..., Any], numbers: Mapping[str, int | float | bool]) -> None:
    """Checks the signature, where there is one: a TypeError from the call itself could also come from inside the function."""
    try:
        signature = inspect.signature(made)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(**numbers)
    except TypeError as error:
        called = f"is called with vocab, context and the keys of model.numbers ({error})"
        raise ConfigError(f"key model.name = {name!r}: {called}; it must take these by name") from None


def _check_own(config: Config, model: nn.Module) -> None:
    """Check the logits' shape before a process trains the model. It uses meta tensors, so that it costs nothing; the first batch
    checks a model that cannot run on them."""
    tokens = torch.zeros(1, config.data.seq_len, dtype=torch.int64, device="meta")
    try:
        with torch.no_grad():
            logits_of(model.eval().to("meta"), tokens)
    except ConfigError as error:
        raise ConfigError(f"key model.name = {config.model.name!r}: {error}") from None
    except Exception:
        return


def initial_model(task: Task) -> nn.Module:
    """With the weights that the run begins with: drawn from the seed, or read from where `model.init` says."""
    model = task.build()
    if task.config.model.init:
        if frozen := frozen_parameters(model):
            raise ConfigError(
                f"key model.init = {task.config.model.init!r}: {min(frozen)} does not train, so learners do not exchange it and "
                f"would not get its weights"
            )
        load_initial(named_tensors(model), task.config.model.init)
    return model


def initial_versions(task: Task, device: torch.device | None = None) -> list[Version]:
    """Version 0 of every fragment: the initial weights. `device`: for runs whose tensors all stay there."""
    tensors = named_tensors(initial_model(task))
    rule = outer_rule(task.config)
    versions = []
    for fragment in task.layout.fragments:
        theta = read_params(tensors, fragment).to(device)
        outer = initial_state(rule, fragment.numel, device=device) if rule else None
        versions.append(Version(theta, read_buffers(tensors, fragment).to(device), outer, None, theta, None))
    return versions
