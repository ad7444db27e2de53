"""Models that return something else than logits, or are never called themselves."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kfac_optim import KFACSGD, Categorical

TURNED = {
    "lr": 0.05,
    "scaling": "unit",
    "factor_update_steps": 1,
    "inv_update_steps": 5,
}  # by K-FAC from the first step


@dataclass
class Output:
    loss: Tensor | None
    logits: Tensor


class Returning(nn.Module):
    """A nested classifier called by keywords, whose output is of some kind."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        inner = nn.Sequential(nn.Sequential(nn.Flatten(), nn.Linear(64, 8)), nn.ModuleDict({"act": nn.Tanh()})["act"])
        self.parts = nn.ModuleDict({"inner": inner, "head": nn.Linear(8, 4)})

    def forward(self, *, images: Tensor, labels: Tensor) -> dict[str, Tensor] | Output:
        logits = self.parts["head"](self.parts["inner"](images))
        loss = F.cross_entropy(logits, labels)
        return {"logits": logits} if self.kind == "dict" else Output(loss, logits)


class Enlarging(nn.Module):
    """A transposed convolution whose input is not its first argument, but the first tensor."""

    def __init__(self, *, by_keyword: bool) -> None:
        super().__init__()
        self.conv, self.by_keyword = nn.ConvTranspose2d(1, 2, 3, stride=2), by_keyword

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(output_size=[18, 18], input=x) if self.by_keyword else self.conv(x, [18, 18])
        return y.mean((2, 3))


def classify(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


def of_dict(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(images=x, labels=y)["logits"], y)


def of_dataclass(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return model(images=x, labels=y).loss


def batch() -> tuple[Tensor, Tensor]:
    """Eight images of four patterns in noise."""
    y = torch.arange(8) % 4
    patterns = torch.randn(4, 1, 8, 8)
    return patterns[y] + 0.3 * torch.randn(8, 1, 8, 8), y


@pytest.mark.parametrize("fisher", ["empirical", "categorical"])
@pytest.mark.parametrize("kind", ["dict", "dataclass"])
def test_outputs_of_other_kinds_equal_the_plain_tensor(fisher: str, kind: str) -> None:
    """The logits are found in a dict or beside a loss, also to sample from."""
    model = Returning(kind)
    inner = copy.deepcopy(model.parts)
    plain = nn.Sequential(inner["inner"], inner["head"])
    output_fn = (lambda output: output["logits"]) if kind == "dict" else None
    options = {"fisher": fisher, **TURNED}
    ours = options | ({} if fisher == "empirical" else {"fisher": Categorical(output_fn=output_fn)})
    first, second = KFACSGD(model, **ours), KFACSGD(plain, **options)
    for _ in range(3):
        x, y = batch()
        for optimizer, loss in ((first, of_dict if kind == "dict" else of_dataclass), (second, classify)):
            optimizer.zero_grad()
            loss(model if optimizer is first else plain, x, y).backward()
            optimizer.step()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(p, q)


def test_a_layer_called_by_keywords_is_seen_whatever_their_order() -> None:
    torch.manual_seed(0)
    models = Enlarging(by_keyword=False), Enlarging(by_keyword=True)
    models[1].load_state_dict(models[0].state_dict())
    optimizers = [KFACSGD(model, **TURNED) for model in models]
    for _ in range(3):
        x, y = batch()
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            classify(model, x, y % 2).backward()
            optimizer.step()
    assert all(map(torch.equal, *(optimizer.curvature.factors("conv") for optimizer in optimizers)))
    assert all(map(torch.equal, *(model.parameters() for model in models)))


@pytest.mark.parametrize("mask", ["attn_mask", "key_padding_mask"])
def test_attention_called_by_keywords_is_seen_whatever_their_order(mask: str) -> None:
    """A mask that comes first is not taken for the query."""
    x, targets = torch.randn(5, 8, 6), torch.randn(5, 8, 6)
    given = {mask: torch.zeros(10, 8, 8) if mask == "attn_mask" else torch.zeros(5, 8)}
    found = []
    for first, last in [({}, given), (given, {})]:
        torch.manual_seed(0)
        model = nn.MultiheadAttention(6, 2, batch_first=True)
        optimizer = KFACSGD(model, **TURNED, weight_sharing="reduce")
        for _ in range(2):
            optimizer.zero_grad()
            F.mse_loss(model(**first, query=x, key=x, value=x, **last)[0], targets).backward()
            optimizer.step()
        found.append([factor for layer in optimizer.curvature.layers for factor in optimizer.curvature.factors(layer)])
    assert len(found[0]) > 2 and all(map(torch.equal, *found))


def test_a_call_that_torch_refuses_fails_as_without_the_optimizer() -> None:
    for model in (nn.MultiheadAttention(4, 2), nn.Linear(4, 2)):
        optimizer = KFACSGD(model, **TURNED)
        with pytest.raises(TypeError, match=r"forward\(\) missing"):
            model()
        assert optimizer.curvature.layers


class Parent(nn.Module):
    """Lightning's way: the parent has a training_step and is never called itself."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.Tanh())
        self.decoder = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 64))

    def training_step(self, x: Tensor) -> Tensor:
        return F.mse_loss(self.decoder(self.encoder(x)), x.flatten(1))


def test_parts_that_are_called_on_their_own_train_as_one_model() -> None:
    """The loss is a mean over the elements of the last one, and the largest, of the outputs."""
    parent = Parent()
    plain = nn.Sequential(*copy.deepcopy([parent.encoder, parent.decoder]))
    first, second = (KFACSGD(model, loss_average="elements", **TURNED) for model in (parent, plain))
    for _ in range(3):
        x, _ = batch()
        for optimizer in (first, second):
            optimizer.zero_grad()
            (parent.training_step(x) if optimizer is first else F.mse_loss(plain(x), x.flatten(1))).backward()
            optimizer.step()
    for layer, other in zip(first.curvature.layers, second.curvature.layers, strict=True):
        assert all(map(torch.equal, first.curvature.factors(layer), second.curvature.factors(other)))
    assert all(map(torch.equal, parent.parameters(), plain.parameters()))
