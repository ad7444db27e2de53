"""Notices layers that train unseen, so that none trains without curvature in silence.

The hooks see nothing of a layer whose module is called other than by its ``__call__``, or was compiled before the hooks
were there, although it has gradients. The user is warned once for each layer. If not even a call of the model was seen,
the step raises an error.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .blocks import Block
from .capture import StepMoments, TakenStatistics
from .common.user_warning import warn_user

# After this many statistics steps in a row with gradients the user is told of a layer that was not seen; if no layer
# was seen, an error ends training.
_UNSEEN_STEPS = 3

_NONE_SEEN = (
    "the model has gradients, but none of its layers was seen in a forward and backward pass since the last "
    "zero_grad(). Build the optimizer before the forward pass whose gradients it is to take, call the model's modules "
    "rather than their forward methods or copies of them (as the library higher does), and call them and the backward "
    "pass outside of torch.func.grad and vmap (torchjd: parallel_chunk_size=1); a sampled fisher and KFAC see nothing "
    "inside torch.func.jvp, either. If the model is compiled, build the optimizer before the first call of a compiled "
    "model, or call torch._dynamo.reset(). What torch.jit has traced or torch.export has exported calls no hooks: "
    "train the model that it was traced from. A pass with create_graph=True is taken for a derivative in the loss and "
    "does not count: take second derivatives by torch.autograd.grad(..., create_graph=True) beside an ordinary "
    "backward(), or use the base class. The output_fn of a sampled fisher has to return the very tensor that the loss "
    "is computed from. Name layers whose weights are used without calling them (fake quantization) in skip_layers. "
    "Gradients that no backward pass has made (a formula, evolution strategies, the averages of a server) have no "
    "curvature: use the base class itself for these"
)


class Sightings:
    """What this rank has seen of the model.

    Attributes:
        blind: Whether training cannot go on because the model is not seen. Either some rank has seen nothing for too
            long, and no other rank has seen a layer, which all ranks know; or a refresh has found nothing to decompose.
    """

    def __init__(self) -> None:
        self.blind = False
        self._model_seen = False  # whether a call of the model was seen in the last step with statistics
        self._lost = False  # whether what was seen of the step in progress is lost
        self._unseen_steps = 0  # statistics steps in a row with gradients but no backward pass that was seen
        # For each layer, statistics steps in a row in which its weight had a gradient, but this rank did not see it.
        self._unseen: dict[Block, int] = {}  # without those that it saw in the last one
        self._told: set[Block] = set()  # those that the user was warned of

    def note_lost(self) -> None:
        """Notes that what was seen of this step is lost: layers were added, a state was loaded, or it raised."""
        self._lost = not self.blind  # else there was nothing to lose, and the exception may be that of require()

    def count_step(self, statistics: TakenStatistics, resolved: StepMoments, *, trains: bool) -> bool:
        """Counts a step with statistics; ``trains``: whether it changes weights.

        Returns:
            Whether this rank has trained for too many such steps in a row without seeing the model.
        """
        self._model_seen, self._lost = statistics.model_seen or self._lost, False
        seen = self._model_seen or resolved.any_taken
        if trains and not seen and statistics.has_gradients():
            self._unseen_steps += _UNSEEN_STEPS if statistics.transformed else 1
        elif trains:
            self._unseen_steps = 0
        return self._unseen_steps >= _UNSEEN_STEPS

    def note(self, blocks: Iterable[Block], resolved: StepMoments, *, blind: bool, alone: bool) -> None:
        """Notes for each layer whether it was seen; ``blind``: see the attribute.

        ``alone``: whether this is the only rank; else another one may have seen the layer.
        """
        self.blind, before, self._unseen = blind, self._unseen, {}
        for index, block in enumerate(blocks):
            if index in resolved.sums or not alone and block.has_data():
                continue
            gradient, steps = block.layer.weight.grad, before.get(block, 0)
            if gradient is not None:
                steps += 1
                if steps == _UNSEEN_STEPS and not bool(gradient.count_nonzero()):  # zero_grad(set_to_none=False)
                    steps = 0
            if steps:
                self._unseen[block] = steps

    def has_never_seen(self, block: Block) -> bool:
        """Whether the weight trains, but no rank has ever seen the layer in a forward and backward pass."""
        return self._unseen.get(block, 0) >= _UNSEEN_STEPS and not (block.has_direction or block.has_data())

    def has_lost(self, block: Block) -> bool:
        """Whether the weight still trains, but the layer, seen before, was not in the last steps with statistics."""
        return self._unseen.get(block, 0) >= _UNSEEN_STEPS and not self.has_never_seen(block)

    def require(self, *, missing: bool = False) -> None:
        """Raises RuntimeError if no training is seen; ``missing``: a refresh has just found nothing to decompose."""
        self.blind |= missing and not self._model_seen
        if self.blind:
            raise RuntimeError(_NONE_SEEN)

    def warn(self, blocks: Sequence[Block]) -> None:
        """Warns, once for each layer, of layers that have gradients but are not seen."""
        unseen = (block for block in blocks if self._unseen.get(block, 0) >= _UNSEEN_STEPS)
        told = [block for block in unseen if block not in self._told]
        self._told = {*self._told.intersection(blocks), *told}
        for lost in (False, True):
            names = [repr(block.layer.name) for block in told if self.has_lost(block) == lost]
            if not names:
                continue
            seen = "is no longer seen" if lost else "was never seen"
            ends = "goes on with the factors that it has" if lost else "trains by the base rule"
            warn_user(
                f"{', '.join(names)}: the weight has gradients, but the layer {seen} in a forward and backward "
                f"pass, so that it {ends}. Call the module itself: a weight that is used on its own, "
                "as in F.linear(x, layer.weight), is not seen, nor is one inside a function that was compiled before "
                "the optimizer was built, or in a pipeline whose schedule splits backward passes (zero bubble). A pass "
                "does not count if its gradients were cleared since (PCGrad), if it is torch.autograd.grad beside a "
                "backward(), if it has create_graph=True, or inside torch.vmap (torchjd: parallel_chunk_size=1). Steps "
                "that are taken inside the backward pass need factor_update_steps=1. A sampled Fisher sees no layer "
                "that the output does not depend on, and no pass the last layer of a net whose derivatives alone are "
                "in the loss (a potential, trained on forces). If all this is intended, name the layer in skip_layers"
            )
