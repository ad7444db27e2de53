"""Loops in random order: the curvature is that of the passes whose gradient is in ``.grad`` at the step."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from kfac_optim import KFACSGD
from tests.helpers.compare import SAME, assert_near
from tests.helpers.reference import RunningAverage, Sums, averaged, cross_entropy, find_layers, layer_sums, watched
from tests.helpers.settings import OPTIONS

NAMES = ("0", "2")
DECAY = 0.9

LOSS = averaged(cross_entropy, "batch")


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


class Loop:
    """A training loop, and beside it a dense account of what is in ``.grad``."""

    def __init__(self) -> None:
        self.model, self.twin = net(), net()
        self.optimizer = KFACSGD(self.model, **(OPTIONS | {"lr": 0.01, "factor_decay": DECAY}))
        self.generator = torch.Generator().manual_seed(0)
        self.pending: list[tuple[Tensor, dict[str, Sums], int]] = []
        self.passes: list[tuple[dict[str, Sums], int]] = []  # of this step, and in .grad
        self.averages = {name: {side: RunningAverage(DECAY) for side in "AG"} for name in NAMES}
        self.steps = 0

    def data(self) -> tuple[Tensor, Tensor]:
        n = int(torch.randint(2, 6, (), generator=self.generator))
        x = torch.randn(n, 3, generator=self.generator, dtype=torch.float64)
        return x, torch.randn(n, 2, generator=self.generator, dtype=torch.float64)

    def sums(self, x: Tensor, y: Tensor) -> dict[str, Sums]:
        """The moments of a pass, on a twin that nobody watches."""
        self.twin.load_state_dict(self.model.state_dict())
        layers = find_layers(self.twin)
        with watched([layer.module for layer in layers]) as uses:
            loss = LOSS(self.twin(x), y)
        gradients = torch.autograd.grad(loss, [use.output for use in uses])
        return {
            layer.name: layer_sums(layer, [pair], "expand", 0)
            for layer, pair in zip(layers, zip(uses, gradients, strict=True), strict=True)
            if self.model.get_submodule(layer.name).weight.requires_grad
        }

    # What a loop does -----------------------------------------------------------------------------------------------

    def forward(self, call: Callable[[Tensor], Tensor] | None = None) -> None:
        x, y = self.data()
        sums = self.sums(x, y)
        self.pending.append((LOSS((call or self.model)(x), y), sums, len(x)))

    def forward_with_checkpoint(self) -> None:
        first, rest = self.model[:2], self.model[2]

        class Outer(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                return rest(checkpoint(first, x, use_reentrant=False))

        # A call of the whole, as far as the optimizer knows it: the parts are what it was built over.
        self.forward(Outer())

    def backward(self) -> None:
        if self.pending:
            loss, sums, terms = self.pending.pop()
            loss.backward()
            self.passes.append((sums, terms))

    def zero_grad_of_optimizer(self) -> None:
        self.optimizer.zero_grad()
        self.passes.clear()

    def zero_grad_of_model(self, set_to_none: bool = True) -> None:
        self.model.zero_grad(set_to_none)
        self.passes.clear()

    def zero_grad_of_model_in_place(self) -> None:
        self.zero_grad_of_model(False)

    def clip(self) -> None:
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.1)

    def step(self) -> None:
        stale = any(p.grad is not None and bool(p.grad.any()) for p in self.model.parameters())
        if stale and not self.passes:  # several such steps are an error, which has a test of its own
            self.zero_grad_of_model()
        self.optimizer.step()
        self.steps += 1
        terms = sum(m for _, m in self.passes)
        for name in NAMES:
            seen = [sums[name] for sums, _ in self.passes if name in sums]
            if seen:
                self.averages[name]["A"].add(sum(s.a for s in seen), sum(s.rows for s in seen))
                self.averages[name]["G"].add(terms**2 * sum(s.g for s in seen), terms)
        self.passes.clear()
        self.pending.clear()  # their graphs are of other weights
        self.compare()

    def freeze(self) -> None:
        self.model[0].requires_grad_(False)

    def unfreeze(self) -> None:
        self.model[0].requires_grad_(True)

    def evaluate(self) -> None:
        self.model.eval()
        self.model(self.data()[0])
        self.model.train()

    def look(self) -> None:
        with torch.no_grad():
            self.model(self.data()[0])

    def monitor(self) -> None:
        x, y = self.data()
        torch.autograd.grad(LOSS(self.model(x), y), [p for p in self.model.parameters() if p.requires_grad])

    def monitor_the_hessian(self) -> None:
        x, y = self.data()
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        gradients = torch.autograd.grad(LOSS(self.model(x), y), parameters, create_graph=True)
        torch.autograd.grad(sum(g.square().sum() for g in gradients), parameters)

    def attack(self) -> None:
        x, y = self.data()
        x.requires_grad_()
        torch.autograd.grad(LOSS(self.model(x), y), x)

    def copy(self) -> None:
        if not self.passes:  # those of a step in progress stay with the original
            self.model, self.optimizer = copy.deepcopy((self.model, self.optimizer))
            self.pending.clear()

    def compare(self) -> None:
        for name, average in self.averages.items():
            if average["A"].weight:
                a, g = self.optimizer.curvature.factors(name)
                assert_near(a, average["A"].mean, f"A of {name!r} after {self.steps} steps", SAME, scale=0.0)
                assert_near(g, average["G"].mean, f"G of {name!r} after {self.steps} steps", SAME, scale=0.0)


OPERATIONS = [name for name in vars(Loop) if not name.startswith("_") and name not in ("data", "sums", "compare")]
COMMON = ["forward", "backward", "forward", "backward", "step"]  # so that most loops train


@settings(max_examples=150)
@given(st.lists(st.sampled_from(OPERATIONS + COMMON), min_size=5, max_size=40))
@example(["forward", "backward", "zero_grad_of_model", "forward", "backward", "step"])
@example(["forward", "backward", "zero_grad_of_model_in_place", "forward", "backward", "clip", "step"])
@example(["monitor", "forward", "backward", "monitor_the_hessian", "step", "monitor", "step"])
@example(["forward", "backward", "step", "copy", "forward_with_checkpoint", "backward", "zero_grad_of_model", "step"])
def test_curvature_is_of_what_is_in_grad(operations: list[str]) -> None:
    loop = Loop()
    for name in [*operations, "step"]:
        getattr(loop, name)()
