"""``KFAC`` under Lightning, whose automatic optimization gives every step a closure."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from kfac_optim import KFAC

lightning = pytest.importorskip("lightning")


class Classifier(lightning.LightningModule):
    """Remembers its losses."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
        self.losses: list[float] = []

    def training_step(self, batch: Any, index: int) -> Tensor:
        inputs, classes = batch
        loss = F.cross_entropy(self.net(inputs), classes)
        self.losses.append(float(loss.detach()))
        return loss

    def configure_optimizers(self) -> KFAC:
        return KFAC(self.net, fisher="categorical")


@pytest.mark.filterwarnings("ignore")
def test_automatic_optimization() -> None:
    model, inputs = Classifier(), torch.randn(256, 4)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = lightning.Trainer(max_epochs=6, accelerator="cpu", enable_model_summary=False, **quiet)
    trainer.fit(model, DataLoader(TensorDataset(inputs, inputs[:, :3].argmax(1)), batch_size=128))
    assert trainer.global_step == 12
    assert model.losses[-1] < model.losses[0] / 3
    assert len(model.losses) > 12 + 3  # the search and three looks back
