"""kfac-jax as an optimizer of torch models; imported only for its class.

``KFACJax`` needs kfac-jax (``pip install kfac-jax "jax[cpu]<0.7"``: with jax 0.8.1 version 0.0.8 had a held-out
loss of 167 instead of 121 after 20 steps of curves from a damping of 150).
"""

from __future__ import annotations

import os
from typing import Any

os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false")  # one thread, as torch has

import jax
import jax.numpy as jnp
import kfac_jax
import numpy as np
import torch
from torch import Tensor, nn


class KFACJax(torch.optim.Optimizer):
    """kfac-jax with its automatic step size, momentum and damping (Martens & Grosse 2015, sections 6.4, 6.5 and 7).

    For autoencoders of Linear and Tanh with the Bernoulli loss summed over pixels, a mean over the batch, whose inputs
    are the targets. A step takes the batch of the last forward, computes loss, gradient and Fisher products in jax, and
    writes the new weights into the torch model. Its seconds contain the forward and backward of torch, which it does
    not use; compiling is done in the constructor. Its curvature is not in the state.

    Args:
        params: What is trained: all parameters of ``model``.
        model: The autoencoder.
        lr: Not used.
        initial_damping: Where the adaptation of damping starts, > 0.
        compile_for: Batch size to compile for in the constructor; for others the first step compiles.

    Raises:
        ValueError: If the model has other modules.
    """

    def __init__(
        self, params: Any, *, model: nn.Module, lr: float, initial_damping: float = 1.0, compile_for: int = 1000
    ) -> None:
        layers = list(model) if isinstance(model, nn.Sequential) else []
        if not layers or not all(isinstance(layer, (nn.Linear, nn.Tanh)) for layer in layers):
            raise ValueError("KFACJax trains nn.Sequential of Linear and Tanh alone")
        super().__init__(params, {"lr": lr})
        self.linears = [layer for layer in layers if isinstance(layer, nn.Linear)]
        squashed = [isinstance(layer, nn.Tanh) for layer in [*layers[1:], None]]
        squashed = [after for layer, after in zip(layers, squashed, strict=True) if isinstance(layer, nn.Linear)]

        def loss(weights: Any, images: Any) -> Any:
            logits = images
            for (weight, bias), squash in zip(weights, squashed, strict=True):
                logits = logits @ weight + bias
                logits = jnp.tanh(logits) if squash else logits
            kfac_jax.register_sigmoid_cross_entropy_loss(logits, images)
            entropies = jnp.maximum(logits, 0) - logits * images + jnp.log1p(jnp.exp(-jnp.abs(logits)))
            return entropies.sum() / len(images)

        self.optimizer = kfac_jax.Optimizer(
            jax.value_and_grad(loss),
            l2_reg=0.0,
            use_adaptive_learning_rate=True,
            use_adaptive_momentum=True,
            use_adaptive_damping=True,
            initial_damping=initial_damping,
            min_damping=1e-6,
            num_burnin_steps=0,
            inverse_update_period=5,
        )
        self.start()
        for _ in range(6):  # among them one of every kind, which are compiled apart
            self._advance(jnp.full((compile_for, self.linears[0].in_features), 0.5, jnp.float32))
        self.start()
        model.register_forward_pre_hook(self._record_input)

    def start(self) -> None:
        """Begin with the weights of the torch model."""
        self.steps = 0
        self.state: Any = None
        self.key = jax.random.PRNGKey(0)
        self.weights = self._read()

    def _read(self) -> list[tuple[Any, Any]]:
        copies = [(layer.weight.detach().numpy().T, layer.bias.detach().numpy()) for layer in self.linears]
        return [(jnp.array(weight), jnp.array(bias)) for weight, bias in copies]

    def _record_input(self, module: nn.Module, inputs: tuple[Tensor]) -> None:
        if module.training and torch.is_grad_enabled():
            self.batch = jnp.asarray(inputs[0].numpy())

    def _advance(self, batch: Any) -> None:
        if self.state is None:
            self.state = self.optimizer.init(self.weights, self.key, batch)
        self.key, key = jax.random.split(self.key)
        result = self.optimizer.step(self.weights, self.state, key, batch=batch, global_step_int=self.steps)
        self.weights, self.state = jax.block_until_ready(result[:2])
        self.steps += 1

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Take one step on the batch of the last forward."""
        self._advance(self.batch)
        for layer, (weight, bias) in zip(self.linears, self.weights, strict=True):
            layer.weight.copy_(torch.from_numpy(np.array(weight)).T)
            layer.bias.copy_(torch.from_numpy(np.array(bias)))
