from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from atoll.config.models import DecoderShape
from atoll.errors import DataError
from atoll.workload.evaluation.evaluate import heldout_loss
from atoll.workload.models.decoder import Z_LOSS, build_decoder, language_model_loss


class Biased(nn.Module):
    """Gives token 0 probability 3/4 and token 1 the rest; in training mode it is wrong on purpose."""

    def __init__(self) -> None:
        super().__init__()
        self.logits = nn.Parameter(torch.tensor([math.log(3.0), 0.0]))
        self.frozen = nn.Dropout(0.5).eval()

    def forward(self, tokens: Tensor) -> Tensor:
        assert not self.training and not torch.is_grad_enabled()
        return self.logits.expand(*tokens.shape, 2)


def test_heldout_loss_over_batches_of_different_sizes_is_the_mean_over_tokens() -> None:
    zeros, ones = torch.zeros(3, 5, dtype=torch.long), torch.ones(1, 5, dtype=torch.long)
    expected = -(12 * math.log(0.75) + 4 * math.log(0.25)) / 16
    assert heldout_loss(Biased(), [zeros, ones]) == pytest.approx(expected, abs=1e-6)


def test_heldout_loss_puts_every_module_back_into_its_own_mode() -> None:
    model = Biased().train()
    model.frozen.eval()
    heldout_loss(model, [torch.zeros(1, 3, dtype=torch.long)])
    assert model.training and not model.frozen.training
    model.eval()
    heldout_loss(model, [torch.zeros(1, 3, dtype=torch.long)])
    assert not model.training


def test_heldout_loss_when_the_model_fails_still_puts_the_mode_back() -> None:
    model = Biased().train()
    with pytest.raises(IndexError):
        heldout_loss(model, [torch.zeros(3, dtype=torch.long)])
    assert model.training


def test_heldout_loss_is_the_training_loss_without_z_loss_and_leaves_no_gradient() -> None:
    model = build_decoder(DecoderShape(257, 32, 2, 2, 64), 0)
    batch = torch.randint(0, 257, (4, 17), generator=torch.Generator().manual_seed(0))
    z_loss = Z_LOSS * torch.logsumexp(model(batch[:, :-1]), dim=-1).square().mean()
    assert z_loss > 1e-3
    assert heldout_loss(model, [batch]) == pytest.approx((language_model_loss(model, batch) - z_loss).item(), abs=1e-5)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_heldout_loss_of_a_diverged_model_is_nan() -> None:
    model = Biased()
    with torch.no_grad():
        model.logits.fill_(math.nan)
    assert math.isnan(heldout_loss(model, [torch.zeros(1, 3, dtype=torch.long)]))


def test_heldout_loss_without_batches_is_refused() -> None:
    with pytest.raises(DataError, match="no held-out batch to evaluate on"):
        heldout_loss(Biased(), [])
