"""What an engine saves, how it is checked and loaded, and how an engine is copied and pickled."""

from __future__ import annotations

import copy
import functools
from collections.abc import Collection, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from ..blocks import LEARNED, SIDES, State, set_learned
from ..capture import when_whole
from ..common.user_warning import warn_user
from ..config import loaded_options, saved_options
from ..distributed import shard_number
from ..factors import copy_average_
from ..placement import whole_state
from ..saved_state import check_counters, check_states, check_sums, checksums
from .build import COUNTERS, OWN_COUNTERS, BuiltEngine

__all__ = ["StatefulEngine"]

# What a copy or a pickle of an engine leaves out, because it belongs to the process or can be made from the rest.
_LEFT_BEHIND = ("_capture", "_owner", "grad_scaler", "_preconditioner")


class StatefulEngine(BuiltEngine):
    """The part of the engine that saves, loads and copies.

    The factors of a layer are saved in the state of its weight, the counters in every parameter group of the optimizer:
    the two places that survive torch.distributed.checkpoint. Counters are plain numbers; -1 stands for "never".
    """

    # Loading and saving ---------------------------------------------------------------------------------------------

    def adopt_states(self, states: Mapping[nn.Parameter, State]) -> None:
        """Adopts factors that were moved or replaced from outside (Lightning moves optimizer state between devices).

        Raises:
            RuntimeError: If a new engine gets factors of a run, of which it does not have the counters.
        """
        for block in self.trained.blocks:
            given = states.get(block.layer.weight, block.state)
            if given is block.state or block.fits(given):
                is_new = not (self.step_count or self._steps_taken or block.has_data())
                block.adopt(given)
                self._lacks_counters |= is_new and block.has_data()
        if self._lacks_counters:
            raise RuntimeError(
                "the optimizer has got factors from an earlier run, but not by its load_state_dict(), so that its "
                "counters are missing. ZeroRedundancyOptimizer does so with a consolidated state: save "
                "optimizer.optim.state_dict() on every rank, each in a file of its own, and load that by "
                "optimizer.optim.load_state_dict()"
            )

    def counters(self) -> dict[str, float | int]:
        """The plain numbers of the state: counters, and the hyperparameters that are numbers."""
        return {**self.stage_counters(), **saved_options(self), **self._shard()}

    def _shard(self) -> dict[str, int]:
        """The number of this rank's shard of weights that tensor parallelism has split; empty if there are none."""
        split = [layer.weight for layer in self.layers if layer.is_shard]
        return {"shard": shard_number(split[0])} if split else {}

    def check(
        self,
        states: Mapping[nn.Parameter, Any],
        counters: Mapping[str, Any],
        frozen: Collection[nn.Parameter] | None = None,
    ) -> None:
        """Raises unless the state could be loaded; changes nothing.

        Args:
            states: The factors by weight.
            counters: The counters.
            frozen: The weights that may have been frozen when it was saved, and then have no factors; None: all.

        Raises:
            ValueError: If a layer's factors are missing, of another shape or not finite, or a parameter has factors
                that has none here; if a counter is missing or out of range; if the state is of another shard.
            TypeError: If a hyperparameter among the counters is of the wrong kind.
        """
        check_counters(COUNTERS, counters)
        if self.trained.blocks and not states and counters["last_refresh"] >= 0:
            raise ValueError(
                "the state has counters but no Kronecker factors: it is damaged, or torch.distributed.checkpoint read "
                "it into an optimizer that had no room for them, because there were gradients when its state_dict() "
                "was asked for: ask for it before the first backward pass"
            )
        loaded_options(self, counters)
        for name, own in self._shard().items():
            if counters.get(name, own) != own:
                raise ValueError(
                    f"the state has factors of shard {counters[name]} of weights that tensor parallelism has split, "
                    f"but this rank has shard {own}: save the optimizer.state_dict() of every rank in a file of its "
                    "own, and load that; torch.distributed.checkpoint takes them for copies, and keeps one"
                )
        check_states(self.trained.blocks, states, self.comm.rank, frozen, pending=counters["pending_spread"] >= 0)
        check_sums(self.trained.blocks, states, counters)

    def load(self, states: Mapping[nn.Parameter, State], counters: Mapping[str, Any]) -> None:
        """Copies checked states, in the engine's own precision, and rebuilds the decompositions."""
        for name, value in loaded_options(self, counters).items():
            setattr(self, name, value)
        for name, counter in OWN_COUNTERS.items():
            setattr(self, counter.attribute, counter.restored(counters.get(name)))
        self._lacks_counters = False
        spreads = self.may_spread or counters.get("pending_spread", -1) >= 0
        for block in self.trained.blocks:
            block.drop()
            block.adopt({})
            saved = states.get(block.layer.weight)
            if saved is not None or (states and block.needs_room):
                block.make_room(self.factor_dtype, self.comm.rank, spreads=spreads)
            if saved is not None:
                _copy_state(block.state, saved)
        self._averaging.load(counters)
        self._steering.load(counters)
        self._refresher.resume(counters, self.trained.blocks, self.comm.rank)
        if states and not self._closed:
            self._refresher.invalidate()
            if self.ranks.alone:  # several ranks do it together, in their next step
                self._refresher.rebuild(self.step_count, self.trained.blocks, self.comm)
        self._sightings.note_lost()
        self._capture.discard()
        self._prepare_statistics()

    def state_dict(self) -> dict[str, Any]:
        """The state of an engine without an optimizer of this package: factors by layer name, and counters.

        If the strategy shares factors out, they are those of this rank; see :meth:`full_state_dict`.
        """
        return self._saved({block.layer.name: block.state for block in self.trained.blocks if block.state})

    def full_state_dict(self) -> dict[str, Any]:
        """The :meth:`state_dict` of all ranks together, the same on each (a collective: call it on all of them)."""
        states = self.whole_states()
        return self._saved(
            {block.layer.name: states[block.layer.weight] for block in self.trained.blocks if block.state}
        )

    def _saved(self, layers: dict[str, Any]) -> dict[str, Any]:
        return {"layers": layers, "counters": {**self.counters(), **checksums(layers.values())}}

    @torch.no_grad()
    def synchronize(self) -> None:
        """Pools the statistics of all ranks since the last refresh (a collective: call it on all of them).

        Without it, a state saved between two refreshes lacks at most that one interval of statistics. One process has
        nothing to pool.
        """
        self._prepare_ranks()
        self._compare()
        self._averaging.pool(self.trained.blocks, self.comm)

    def whole_states(self) -> dict[nn.Parameter, State]:
        """The factors of all ranks by weight, with all statistics so far (a collective).

        Factors that the strategy shares out are gathered on the CPU, layer by layer; others are not copied.
        """
        self.synchronize()
        found: dict[nn.Parameter, State] = {}
        for block in self.trained.blocks:
            if block.state:
                whole = whole_state(block, self.factor_dtype, self.comm)
                # Copied, because the numbers of averages, which every rank has, go on changing.
                if block.workers.shares_factors:
                    whole = tree_map_only(Tensor, lambda t: t.to("cpu", copy=True), whole)
                found[block.layer.weight] = whole
        return found

    @torch.inference_mode(False)  # whose tensors could not be changed in place later
    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Loads :meth:`state_dict`.

        Raises:
            ValueError: If the state is damaged or of another model; nothing is changed then.
        """
        for key in ("layers", "counters"):
            if not isinstance(state_dict.get(key), Mapping):
                raise ValueError(f"this is not the state of an engine: it has no {key!r}")
        weights = {block.layer.name: block.layer.weight for block in self.trained.blocks}
        unknown = set(state_dict["layers"]) - set(weights)
        if unknown:
            raise ValueError(
                f"the state has layers that this model lacks: {', '.join(sorted(unknown))}. Load the state of the same "
                "model, built with the same skip_layers"
            )
        states = {weights[name]: state for name, state in state_dict["layers"].items()}
        self.check(states, state_dict["counters"])
        self.load(states, state_dict["counters"])

    # Copies and pickles ---------------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles carry the model; hooks, scaler, communicator and what is captured stay behind."""
        state = {key: value for key, value in self.__dict__.items() if key not in _LEFT_BEHIND}
        return {**state, "communicator": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._take_over(state, joins=True)

    def __deepcopy__(self, memo: dict[int, Any]) -> StatefulEngine:
        """A copy for a copy of the model, among the same ranks."""
        if self.grad_scaler is not None:
            warn_user(
                "the copy of this optimizer has no grad_scaler, so that its statistics would count the loss as scaled: "
                "set that of its own loop on copied.curvature.grad_scaler",
            )
        copied = object.__new__(type(self))
        memo[id(self)] = copied
        state = copy.deepcopy(self.__getstate__(), memo)
        copied._take_over(state, communicator=self.communicator)
        return copied

    def _take_over(self, state: dict[str, Any], *, joins: bool = False, **own: Any) -> None:
        """Goes on from :meth:`__getstate__`, with ``own`` attributes; ``joins``: among the ranks of this process."""
        self.__dict__.update(state, _owner=None, grad_scaler=None, **own)
        # A model that holds its optimizer is copied along with it, and cannot take hooks before it is complete.
        when_whole(self.trained.roots, functools.partial(self._finish_copy, joins=joins))

    def _finish_copy(self, *, joins: bool) -> None:
        """Puts hooks on the model."""
        self._restore()
        if joins:
            self._join_ranks(self.ranks.after_unpickling())


def _copy_state(target: State, saved: State) -> None:
    """Copies a layer's saved state into a fresh one, which keeps its dtype and device and shares nothing with it."""
    for source, snapshot in target.items():
        if source not in saved:  # no refresh was in progress, or its factors were not saved
            continue
        for side in SIDES:
            copy_average_(snapshot[side], saved[source][side])
        if "gamma" in snapshot:
            snapshot["gamma"].copy_(saved[source]["gamma"])
        else:
            numbers = cast(Mapping[str, Any], saved[source])
            set_learned(snapshot, {name: learned.restored(numbers[name]) for name, learned in LEARNED.items()})
