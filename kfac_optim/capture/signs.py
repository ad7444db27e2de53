"""Watches, between the steps of an optimizer, for signs that its network is the discriminator of a game.

:mod:`kfac_optim.steering.opponents` makes of them whether networks train against each other. Both signs are gradients
that are thrown away: those of the backward passes by which the generator trains.

*Captured ones* were seen by the layers' hooks, and are removed before a step has used them. That shows only before
steps that collect statistics. *Added ones* were added to the gradients that a step has left in ``.grad``, by the time
the optimizer clears these (:class:`Leftover`). That shows before every step, but only if they are cleared so late.

Many GANs freeze their discriminator while the generator trains through it (``requires_grad_(False)``, Lightning's
``toggle_optimizer()``). It then gets no gradients that could be thrown away; the passes themselves are seen instead
(:meth:`.GameSigns.note_frozen_call`), before every step, because the generator may train in few of them.
They count as both signs.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from ..layers import KroneckerLayer
from .autograd import leaves_of, nodes_reached
from .microbatch import BackwardPasses

_NUMBERS = itertools.count(1)


class Leftover:
    """Watches whether a later backward pass adds to a gradient that ``step()`` has left in ``.grad``.

    It watches for as long as somebody holds a reference to it.

    Args:
        parameter: The parameter; it gets a hook.
        gradient: Its gradient after the step, which gets a number as an attribute. No reference to the gradient is
            kept, not even a weak one: torch could not swap it then, as ``model.to()`` does under
            ``torch.__future__.set_swap_module_params_on_conversion(True)``. Attributes are swapped as well.
    """

    def __init__(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        self._additions: set[int] = set()  # the hook's, which must not refer to this object
        if parameter.requires_grad:
            number, additions = next(_NUMBERS), self._additions
            gradient._kfac_left = number  # type: ignore[attr-defined]

            def on_gradient_added(parameter: Tensor) -> None:
                if getattr(parameter.grad, "_kfac_left", 0) == number:
                    additions.add(number)

            handle = parameter.register_post_accumulate_grad_hook(on_gradient_added)
            # Not in __del__: when a cycle is collected, the handle has lost its hooks by then.
            weakref.finalize(self, handle.remove)

    @property
    def has_grown(self) -> bool:
        """Whether another backward pass has added to the gradient."""
        return bool(self._additions)


class GameSigns:
    """What was thrown away since the last step of an optimizer: captured gradients, and added ones."""

    def __init__(self) -> None:
        self._passes: weakref.ref[BackwardPasses] | None = None  # weak, because they hold this object
        self._leftover: Leftover | None
        self.restore(captured=False, added=False)

    def _forget_calls(self) -> None:
        self._served: set[KroneckerLayer] = set()  # the layers that have served since the last step
        self._serve: bool | None = None  # found from the first frozen layer, because walks from each take too long

    def watch(self, passes: BackwardPasses) -> None:
        """Starts to watch the passes that new hooks see."""
        self._passes = weakref.ref(passes)
        self._forget_calls()

    def note_frozen_call(self, layer: KroneckerLayer, a: Any) -> None:
        """Notes a call of a frozen layer with the input ``a``, which *serves* if parameters have made that.

        It does not serve if gradients end at a tensor other than a parameter, as for an adversarial example. Compiled
        networks, re-entrant checkpoints and recurrent layers are not searched.
        """
        if self._serve is False or layer in self._served or not isinstance(a, Tensor) or not a.requires_grad:
            return
        if self._serve is None:
            self._serve = any(isinstance(leaf, nn.Parameter) for leaf in leaves_of(nodes_reached([a.grad_fn])))
        if self._serve:
            self._served.add(layer)

    def note_left(self, gradients: Mapping[nn.Parameter, Tensor] | None) -> None:
        """Starts to watch the gradients that a step leaves in ``.grad``; None or empty: there are none."""
        self._leftover = Leftover(*next(iter(gradients.items()))) if gradients else None

    def note_captured_lost(self) -> None:
        """Notes that captured gradients are thrown away."""
        self._captured = True

    def note_clearing(self) -> None:
        """Notes, before the optimizer clears gradients, what is thrown away by that."""
        self._captured, self._added = self._if_cleared
        self._leftover = None  # clearing gradients a second time throws nothing away

    def take(self) -> tuple[bool, bool]:
        """Whether captured gradients and added ones were thrown away before the step that begins; starts anew.

        Layers that have served count if they train in this step.
        """
        weights = [layer.weight for layer in self._served]
        served = any(weight.requires_grad and weight.grad is not None for weight in weights)
        found = self._captured or served, self._added or served
        self._captured = self._added = False
        self._forget_calls()
        return found

    @property
    def _if_cleared(self) -> tuple[bool, bool]:
        """Whether gradients of both kinds were thrown away, or would be if they were cleared now."""
        passes = None if self._passes is None else self._passes()
        captured = passes is not None and bool(passes.statistics.sums)
        added = self._leftover is not None and self._leftover.has_grown
        return self._captured or captured, self._added or added

    @property
    def if_resumed(self) -> tuple[bool, bool]:
        """What :meth:`take` finds in a resumed run, which has lost the gradients of all passes since the last step."""
        (captured, added), served = self._if_cleared, bool(self._served)
        return captured or served, added or served

    def restore(self, *, captured: bool, added: bool) -> None:
        """Goes on from a saved state; what was seen before is forgotten."""
        self._captured, self._added, self._leftover = captured, added, None
        self._forget_calls()

    def __getstate__(self) -> dict[str, Any]:
        """The state to copy or pickle: hooks stay behind, and what was captured is lost."""
        (captured, added), copied = self.if_resumed, GameSigns()
        copied.restore(captured=captured, added=added)
        return vars(copied)
