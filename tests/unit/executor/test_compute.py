"""Precision and compilation: what `auto` is, what is refused, and that weights stay fp32."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from atoll.config import Config, load
from atoll.errors import ConfigError, UserError
from atoll.executor import compute as compute_module
from atoll.executor.compute import PLAIN, ComputeMode, compiling, loss_of, resolved, warm_up
from atoll.executor.learner import TensorLearner
from atoll.executor.virtual_run import evaluated_on
from atoll.protocol.vocabulary import InnerStep, StepDone
from atoll.tasks.task import language_task
from atoll.tensors.access import named_tensors

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def small(**model: Any) -> Config:
    data = {"max_bytes": 100_000, "seq_len": 16, "batch_size": 2, "heldout_batches": 1}
    return load(preset_name="decoupled", overrides={"learners": 2, "data": data, "model": model})


def stepped(config: Config) -> tuple[TensorLearner, float]:
    learner = TensorLearner(language_task(config), 0)
    (done,) = learner.execute(InnerStep(1, 0, 0, 0), None)
    assert isinstance(done, StepDone) and done.loss is not None
    return learner, done.loss


@pytest.mark.parametrize(
    ("device", "model", "found"),
    [
        (CPU, {}, ComputeMode("fp32", False)),
        (CUDA, {}, ComputeMode("bf16", True)),
        (CUDA, {"precision": "tf32", "compile": "off"}, ComputeMode("tf32", False)),
        (CPU, {"precision": "bf16"}, ComputeMode("bf16", False)),
        (CPU, {"compile": "on"}, ComputeMode("fp32", True)),
    ],
)
def test_auto_is_resolved_by_the_device(
    device: torch.device, model: dict[str, str], found: ComputeMode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: True)
    monkeypatch.setattr(compute_module, "_lacking", lambda _: "")
    assert resolved(small(**model), device) == found


def test_what_a_device_cannot_do_is_refused_by_its_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: False)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "an old GPU")
    monkeypatch.setattr("shutil.which", lambda _: None)
    with pytest.raises(UserError, match=r"^key model\.precision = 'tf32': "):
        resolved(small(precision="tf32"), CPU)
    with pytest.raises(UserError, match=r"^key model\.precision = 'auto': an old GPU has no bf16"):
        resolved(small(compile="off"), CUDA)
    with pytest.raises(UserError, match=r"^key model\.compile = 'on': there is no C\+\+ compiler here"):
        resolved(small(compile="on"), CPU)


def test_dtype_is_refused_with_what_to_write() -> None:
    with pytest.raises(ConfigError, match=r"key model\.dtype = 'bfloat16': was removed; .* model\.precision = 'bf16'"):
        small(dtype="bfloat16")


def test_bf16_changes_the_loss_a_little_and_leaves_weights_and_moments_fp32() -> None:
    (plain, loss), (learner, rounded) = stepped(small()), stepped(small(precision="bf16"))
    assert rounded != loss and rounded == pytest.approx(loss, rel=0.01)
    state = [value for each in learner.optimizer.state.values() for value in each.values()]
    assert {tensor.dtype for tensor in (*named_tensors(learner.model).values(), *state)} == {torch.float32}
    assert str(plain.prepare()) == "fp32, eager"


def test_heldout_loss_is_measured_in_the_runs_precision() -> None:
    task = language_task(small(precision="bf16"))
    model = task.build()
    assert evaluated_on(task, CPU).evaluate(model) != task.evaluate(model)
    assert evaluated_on(task, CPU).evaluate(model) == pytest.approx(task.evaluate(model), rel=0.01)


def test_checkpointed_activations_give_the_same_step_to_the_bit() -> None:
    (kept, loss), (again, same) = stepped(small()), stepped(small(checkpoint_activations=True))
    assert same == loss
    mine, others = named_tensors(kept.model), named_tensors(again.model)
    assert all(torch.equal(mine[name], others[name]) for name in mine)


def test_activations_of_another_model_than_a_decoder_are_not_checkpointed() -> None:
    from atoll.tasks.registry import task_for

    images = {"name": "lenet5", "checkpoint_activations": True}
    config = load(preset_name="fedavg", overrides={"data": {"corpus": "digits", "batch_size": 4}, "model": images})
    with pytest.raises(ConfigError, match=r"^key model\.checkpoint_activations = true: "):
        task_for(config)


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(x)
        return out


def test_warming_up_leaves_no_trace() -> None:
    model = Normed()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    warm_up(model, loss_of(lambda m, x: m(x).square().mean(), PLAIN, CPU), torch.randn(4, 3), "normed")
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_model_that_cannot_be_compiled_is_one_sentence_with_the_key() -> None:
    def failing(*_: Any) -> Any:
        raise torch._dynamo.exc.TorchDynamoException("no such operator\nand a long trace")

    sentence = r"cannot be compiled \(no such operator\); write model\.compile = 'off'$"
    with pytest.raises(ConfigError, match=sentence), compiling("m"):
        failing()
