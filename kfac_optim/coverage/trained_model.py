"""Which trained parameters are preconditioned, as the weight or bias of which layer, and why the others are not."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from ..blocks import Block
from ..common.machines import machine_of
from ..common.user_warning import warn_user
from ..config import Config
from ..distributed import Communicator, gathered_weight, own_shape, refuse_flattened, sharding_problem, whole_shape
from ..layers import COMPUTED, FoundLayers, LayerOptions, LinearLayer, skip_reason
from .whereabouts import Whereabouts, owners_of, parameters_in, unwrap

_STEPS_ON_FEWER = 3  # after so many in a row, parameters that the optimizer has no longer count as taken out of it
_RESHARD = ". With FSDP2 call reshard() before you build it, if forward passes without backward passes came before"


def parameters_of(source: nn.Module | Iterable[Any]) -> list[nn.Parameter]:
    """The parameters of a module, or of anything torch's optimizers take: tensors, named tensors, groups of them."""
    if isinstance(source, nn.Module):
        return parameters_of(source.parameters())
    found: list[nn.Parameter] = []
    for item in source:
        if isinstance(item, dict):
            found += parameters_of([item["params"]] if isinstance(item["params"], Tensor) else item["params"])
        else:
            found.append(item[1] if isinstance(item, tuple) else item)
    return found


class TrainedModel:
    """The trained parameters, their places in the model, and the blocks of those that are preconditioned.

    Parameters may be replaced or moved inside the model after an optimizer was built, by frameworks or by the user.
    :meth:`follow` notices that, and goes on with the parameters that have taken their places.

    Args:
        model: The module, raw or wrapped (DDP, torch.compile), or the parameters (or parameter groups) whose owning
            modules are then found by identity.
        params: The parameters that are trained; None: all of the model's.

    Attributes:
        model: The module without its wrapper, because a wrapper may refuse to be copied (DDP in a group of its own);
            None if none was given.
        parameters: The trained parameters, in order.
        roots: The modules that own them.
        blocks: The blocks of the preconditioned layers; empty before :meth:`find_blocks`.
        uncovered: For every other trained parameter, its name and the reason why it has no block.

    Raises:
        ValueError: If a model was given that owns none of the trained parameters.
    """

    def __init__(self, model: nn.Module | Iterable[Any], params: Iterable[Any] | None) -> None:
        self.model = unwrap(model) if isinstance(model, nn.Module) else None
        self.parameters = dict.fromkeys(parameters_of(model if params is None else params))
        self.roots: list[nn.Module] = []
        self.blocks: list[Block] = []
        self.uncovered: dict[nn.Parameter, tuple[str, str]] = {}
        self._whereabouts = Whereabouts((), (), ())
        self._steps_on_fewer = 0  # steps in a row on fewer parameters than are known
        owned = () if self.model is None else parameters_in(self.model)
        if self.model is not None and self.parameters and not any(p in self.parameters for p in owned):
            raise ValueError(
                f"model={type(self.model).__name__}: it owns none of the {len(self.parameters)} parameters that the "
                "optimizer got. Pass the model whose parameters these are, or leave model= out: the modules are then "
                "found automatically"
            )

    def extend(self, params: Iterable[Any]) -> None:
        """Adds trained parameters; the next :meth:`find_blocks` finds their blocks."""
        self.parameters.update(dict.fromkeys(parameters_of(params)))

    def find_roots(self) -> list[nn.Module]:
        """The modules that own the trained parameters now."""
        return [self.model] if self.model is not None else owners_of(self.parameters, self.roots)

    def find_blocks(self, config: Config, comm: Communicator) -> None:
        """Finds the blocks of the trained parameters; those that are known already stay the same objects.

        ``config`` decides what a layer is, and ``comm`` has the ranks that share factors.
        """
        self.roots = self.find_roots()
        refuse_flattened(self.roots)
        options = LayerOptions(
            weight_sharing=config.weight_sharing,
            batch_dim=config.batch_dim,
            max_factor_dim=config.max_factor_dim,
            skip_layers=config.skip_layers,
            trainable=self.parameters,
            own_shape=functools.partial(own_shape, roots=self.roots),
        )
        blocks_before = {block.layer.weight: block for block in self.blocks}
        found = FoundLayers(self.roots, options)
        blocks, uncovered = [], found.uncovered
        for layer in found.layers:
            problem = sharding_problem(layer.weight, self.roots, comm)
            if layer.is_shard:
                problem = problem if type(layer) is LinearLayer else "split by tensor parallelism, not an nn.Linear"
                names = {p: uncovered[p][0] for module in layer.modules for p in module.parameters() if p in uncovered}
                uncovered.update((p, (name, "one bias for all shards of a weight")) for p, name in names.items())
            if problem:
                uncovered.update(dict.fromkeys(layer.parameters, (layer.name, problem)))
            else:
                block = blocks_before.get(layer.weight)
                if block is None or not block.take_layer(layer):
                    block = Block(layer)
                blocks.append(block)
        self.blocks, self.uncovered = blocks, uncovered
        covered = self.covered()
        for i, parameter in enumerate(self.parameters):
            if parameter not in covered and parameter not in uncovered:
                uncovered[parameter] = (f"parameter {i}", "no module of the model owns it")
        computed = {p for p, (_, reason) in uncovered.items() if COMPUTED in reason}
        self._whereabouts = Whereabouts(self.roots, [block.layer for block in blocks], computed)

    def warn_if_uncovered(self, skipped: Sequence[str]) -> None:
        """Warns at construction if nothing is preconditioned, or a pattern of ``skip_layers`` matches nothing.

        Frozen layers do not count while other parameters train: adapters between them, for instance.

        ``skipped``: the patterns.
        """
        reasons = {reason for _, reason in self.uncovered.values()}
        names = [name for root in self.roots for name, _ in root.named_modules()]
        trained = [reason for p, (_, reason) in self.uncovered.items() if p.requires_grad or not self.blocks]
        for pattern in skipped:
            if skip_reason(pattern) not in reasons and not any(re.search(pattern, name) for name in names):
                warn_user(f"skip_layers: {pattern!r} matches the name of no layer")
        if self.parameters and not self.roots:
            warn_user(
                "no module was found that owns the optimizer's parameters, so that all of them train by the base rule; "
                "if they are a model's, pass the model, as first argument or as model=..."
            )
        elif not skipped and trained and not any(block.layer.weight.requires_grad for block in self.blocks):
            frozen = ["all layers that it could precondition are frozen"] if self.blocks else []
            shown = [*frozen, *dict.fromkeys(trained)][:3]
            more = (
                "; if modules of a model compute with them, pass the model as model=..." if self.model is None else ""
            )
            warn_user(
                "K-FAC preconditions none of the optimizer's parameters, so that all of them train by the base rule: "
                f"{'; '.join(shown)}. print(optimizer.curvature) lists them, and register_layer() adds a rule{more}"
            )

    def covered(self) -> set[nn.Parameter]:
        """The parameters of layers that are preconditioned."""
        return {p for block in self.blocks for p in block.layer.parameters}

    def reaches(self) -> dict[nn.Parameter, float]:
        """The share of the stretch that each parameter gets: that of its layer, or of the first layer that has it."""
        reaches = ((block.layer.parameters, block.reach) for block in reversed(self.blocks))
        return {p: reach for parameters, reach in reaches for p in parameters}

    @property
    def has_moved(self) -> bool:
        """Whether a model of which no layer was seen is on another kind of machine than when its layers were found.

        How large the blocks of factors are depends on the machine. Factors that a state had stay as they are.
        """
        moved = any(block.layer.machine != machine_of(block.layer.weight.device) for block in self.blocks)
        return moved and not any(block.has_data() for block in self.blocks)

    @property
    def is_intact(self) -> bool:
        """Whether all layers and their parameters are still in their places."""
        return self._whereabouts.are_intact

    def present_parameters(self) -> list[nn.Parameter]:
        """The trained parameters; one that was replaced in its layer is represented by its successor there."""
        own, now = self._owned(), self._whereabouts.successors()
        present = (p if p in own else now.get(p, p) for p in self.parameters)
        return [p for p in present if p is not None]

    def follow(self, stepped: Sequence[nn.Parameter], *, first: bool) -> bool:
        """Goes on with the parameters that an optimizer steps on, if they have taken the place of the known ones.

        Args:
            stepped: The parameters that the optimizer steps on.
            first: Whether it has taken no step yet, so that the layers have to be checked even if they are unchanged.

        Returns:
            Whether the layers may have changed, so that :meth:`find_blocks` has to be called again.

        Raises:
            RuntimeError: If the parameters are not weights of the model, or are no longer matrices, or those of a layer
                have been replaced in the model but not in the optimizer.
        """
        whole = self.is_intact or self._whereabouts.accept_moves()
        moved = first and self.has_moved
        # With fewer parameters, groups were taken out of the optimizer: for good, unless they return within some steps.
        self._steps_on_fewer = self._steps_on_fewer + 1 if len(stepped) < len(self.parameters) else 0
        known = all(p in self.parameters for p in stepped) and self._steps_on_fewer < _STEPS_ON_FEWER
        if not known:
            new = self._moves(stepped)
            self.parameters = dict.fromkeys(stepped)
            for block in self.blocks:
                block.layer.replace_parameters({p: new.get(p, p) for p in block.layer.parameters})
        unchanged = known and whole
        if first or not unchanged:
            self._check(stepped)
        return moved or not unchanged

    def warn_of_declined(self, before: Iterable[Block]) -> None:
        """Warns of layers that had a block before and are declined now, because their parameters were changed."""
        names = {block.layer.name for block in self.blocks}
        lost = (block.layer for block in before if block not in self.blocks)
        left = [layer for layer in lost if layer.weight in self.parameters and layer.weight.requires_grad]
        declined = {f"{x.name!r} ({type(x.modules[0]).__name__})" for x in left if x.name not in names}
        if declined:
            warn_user(
                f"{', '.join(sorted(declined))}: the parameters or the modules were changed after the optimizer was "
                "built, by a parametrization or pruning for instance; from now on they train by the base rule "
                "(print(optimizer.curvature) says why)"
            )

    def _owned(self) -> set[nn.Parameter]:
        """The parameters that the modules have now."""
        return {p for root in self.roots for p in parameters_in(root)}

    def _moves(self, stepped: Sequence[nn.Parameter]) -> Mapping[nn.Parameter, nn.Parameter]:
        """By parameter, the one of the same shape that has taken its place and that the optimizer steps on.

        Frameworks that shard a model after the optimizer was built replace the parameters of both (Accelerate does so
        for FSDP2).

        Raises:
            RuntimeError: If weights of layers may have moved into new tensors that no module owns (flat partitions).
                Tensors that are not weights of layers may come and go: the points of a scene that are split and pruned.
        """
        now, stepping, own = self._whereabouts.successors(), set(stepped), self._owned()
        strangers = any(p not in self.parameters and p not in own for p in stepping)
        if strangers and any(p not in stepping and now.get(p, p) not in stepping for p in self.covered()):
            raise RuntimeError(
                "the optimizer's parameters have been replaced by others that are not weights of the model, as "
                "DeepSpeed does with ZeRO stages 1-3 (flat partitions) and half precision. Give the framework its own "
                "optimizer instead, build engine = CurvatureEngine(model, ...) before wrapping the model, and call "
                "engine.precondition_(lr) between its backward and its step"
            )
        return {p: q for p, q in now.items() if q in stepping and q.shape == p.shape}

    def _check(self, stepped: Sequence[nn.Parameter]) -> None:
        """Raises RuntimeError unless the layers have the model's own parameters, and weights are matrices."""
        own, stepping = self._owned(), set(stepped)
        blocks = [block for block in self.blocks if not stepping.isdisjoint(block.layer.parameters)]
        matrices = [block.layer for block in blocks if not block.layer.is_shard]
        gathered = [layer.name for layer in matrices if gathered_weight(layer.weight, layer.modules) is not None]
        if gathered:
            raise RuntimeError(
                f"FSDP2 has whole weights in the places of its shards, of {', '.join(map(repr, gathered))}, as after a "
                "forward pass that no backward pass followed, after unshard() or set_reshard_after_backward(False): "
                "the step would change the shards, and the next forward pass use the old weights. Call reshard() of "
                "every module that is sharded before step()"
            )
        if own and (blocks or not self.blocks) and not any(p in self.parameters for p in own):
            raise RuntimeError(
                "the model's parameters have been replaced since the optimizer was built: build it after "
                f"fully_shard(), to_empty(), load_state_dict(assign=True) or whatever made new ones{_RESHARD}"
            )
        if any(whole_shape(layer.weight) != layer.weight_shape for layer in matrices):
            raise RuntimeError(
                "the model's weights have changed their shape since the optimizer was built, as under "
                "FullyShardedDataParallel (FSDP1): shard the model with torch.distributed.fsdp.fully_shard (FSDP2)"
            )
        there = {module for root in self.roots for module in root.modules()}
        now = self._whereabouts.successors()
        gone = {p for p in stepping - own if _trains(p) or _trains(now.get(p))}  # not those that stay frozen
        layers = [block.layer for block in blocks if not there.isdisjoint(block.layer.modules)]  # still in the model
        lost = [layer.name for layer in layers if own and any(p in gone for p in layer.parameters)]
        if lost and any(hasattr(p, "_st_info") for p in gone):
            raise RuntimeError(
                "DistributedDataParallel(device_mesh=) has taken weights that tensor parallelism has split out of "
                f"their modules, of {', '.join(map(repr, lost))}: name these layers in skip_layers, or leave the "
                "wrapper out and average the gradients over the ranks with other data before step()"
            )
        if lost:
            raise RuntimeError(
                f"the optimizer steps on parameters that the model no longer has, of {', '.join(map(repr, lost))}: "
                "they have been replaced since the optimizer was built, by load_state_dict(assign=True), "
                "weight_norm() or its removal, .to() under "
                "torch.__future__.set_overwrite_module_params_on_conversion(True) or an assignment. Build the "
                "optimizer after that, or put the new parameters in the place of the old ones in "
                f"optimizer.param_groups{_RESHARD}"
            )


def _trains(parameter: nn.Parameter | None) -> bool:
    """Whether a step moves a parameter, if it is the optimizer's."""
    return parameter is not None and (parameter.requires_grad or parameter.grad is not None)
