"""An optimizer's saved state: where the engine's part is found in it; how the base class's is checked and loaded."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sized
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from ..bases.state_keys import LAYER_STATE, PREFIX, is_of_base
from .checks import checksums

_DECOUPLED = "decoupled_weight_decay"  # False in Adam's groups, True in AdamW's

# The shape of a small parameter. All sizes differ; two are above 128, below which some bases treat matrices otherwise.
_SMALL = (131, 137, 3, 5, 7, 11)


def with_checksums(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Returns an optimizer's state with the checksums of its layers' states added to every group."""
    states, groups = state_dict["state"], state_dict["param_groups"]
    layers = [states[i][LAYER_STATE] for group in groups for i in group["params"] if LAYER_STATE in states.get(i, ())]
    sums = {PREFIX + name: value for name, value in checksums(layers).items()}
    return {**state_dict, "param_groups": [{**group, **sums} for group in groups]}


def saved_parts(
    optimizer: torch.optim.Optimizer, state_dict: Mapping[str, Any], base_step: Callable[[Any], Any]
) -> tuple[dict[nn.Parameter, dict[str, Any]], dict[str, float | int], set[nn.Parameter]]:
    """Returns the engine's part of a saved state, after checking the rest of the state.

    Args:
        optimizer: The optimizer that is to load the state; it is not changed.
        state_dict: The saved state.
        base_step: The base class's ``step``.

    Returns:
        The layers' states by weight; the counters; and the parameters for which nothing was saved.

    Raises:
        ValueError: If the state is not an optimizer's, is damaged, or is of another model or kind of weight decay.
    """
    for key in ("state", "param_groups"):
        if key not in state_dict:
            raise ValueError(f"this is not the state of an optimizer: it has no {key!r}")
    groups, saved_groups = optimizer.param_groups, state_dict["param_groups"]
    sizes, saved_sizes = ([len(group["params"]) for group in gs] for gs in (groups, saved_groups))
    if sizes != saved_sizes:
        raise ValueError(
            f"the state has groups of {saved_sizes} parameters, the optimizer of {sizes}: build the optimizer over the "
            "same model and in the same groups as the one that was saved"
        )
    states, without = {}, set()
    for group, saved in zip(groups, saved_groups, strict=True):
        decoupled, own = saved.get(_DECOUPLED), group.get(_DECOUPLED)
        if saved.get("weight_decay") and None not in (decoupled, own) and decoupled != own:
            raise ValueError(
                f"the state has weight decay with {_DECOUPLED}={decoupled}, this optimizer {own}: that of AdamW for "
                f"Adam, or the other way round? Build the class that was saved, or give {_DECOUPLED}={decoupled}"
            )
        kinds = _kinds(optimizer, {**group, **saved, "params": group["params"]}, base_step)
        for parameter, i in zip(group["params"], saved["params"], strict=True):
            state = state_dict["state"].get(i, {})
            if not isinstance(state, dict):
                raise ValueError(f"the state is damaged: that of parameter {i} is {state!r}")
            if not state:
                without.add(parameter)
            if LAYER_STATE in state:
                states[parameter] = state[LAYER_STATE]
            base = {key: value for key, value in state.items() if key != LAYER_STATE}
            problem = _base_problem(parameter, base, optimizer.state.get(parameter, {}), kinds)
            if problem:
                raise ValueError(f"the state of parameter {i} {problem}")
    first: Mapping[str, Any] = saved_groups[0] if saved_groups else {}
    counters = {name.removeprefix(PREFIX): value for name, value in first.items() if name.startswith(PREFIX)}
    return states, counters, without


@contextmanager
def unchanged_on_errors(optimizer: torch.optim.Optimizer, checked: Sized) -> Iterator[None]:
    """For loading a state in a ``with`` block: on errors, the optimizer is as it was before.

    ``checked``: empty as long as the state has not been checked; later errors are the base class's.

    Raises:
        ValueError: If the base class cannot load the state, or it has not all options of the groups.
    """
    before, own_groups = dict(vars(optimizer)), optimizer.param_groups  # Lightning's stand-in has no groups of its own
    try:
        yield
        for own, new in zip(own_groups, optimizer.param_groups, strict=True):
            missing = [name for name in optimizer.defaults if name in own and name not in new]
            if missing:
                raise KeyError(missing[0])
    except BaseException as error:
        vars(optimizer).clear()
        vars(optimizer).update(before)
        if not checked or not isinstance(error, Exception):
            raise
        raise ValueError(
            f"the base class of {type(optimizer).__name__} cannot load the state: is it of another class of "
            f"optimizers? ({type(error).__name__}: {error})"
        ) from error


@torch.no_grad()
def _kinds(optimizer: Any, group: dict[str, Any], base_step: Callable[[Any], Any]) -> dict[tuple[int, str], str]:
    """What kinds of entries the base class keeps for a group's parameters, found by a step on small parameters.

    Returns:
        By a parameter's number of dimensions and a key of its state: "parameter" for a tensor of its shape, "dims" for
        one that shares sizes with it (Adafactor, Shampoo), "none" for None. Empty if the step fails, or if the
        optimizer holds something that it might change (another optimizer, a list).
    """
    if not all(_is_fixed(value) for name, value in vars(optimizer).items() if not _is_torchs(optimizer, name)):
        return {}
    dims = {p.dim(): p for p in group["params"] if p.dim()}
    small = [torch.ones(_SMALL[:n], dtype=p.dtype, device=p.device) for n, p in dims.items()]
    for tensor in small:
        tensor.requires_grad_().grad = torch.ones_like(tensor)
    options = tree_map_only(Tensor, torch.clone, {**group, "params": ()})  # which the step may change in place
    probe = object.__new__(type(optimizer))
    probe.__dict__.update(optimizer.__dict__, state=defaultdict(dict), param_groups=[{**options, "params": small}])
    on_cuda = {tensor.device for tensor in small if tensor.device.type == "cuda"}
    try:
        with torch.random.fork_rng(on_cuda):  # the step may draw random numbers
            base_step(probe)
    except Exception:  # the step does not know the saved options, or a kernel does not take such tensors
        return {}
    found: dict[tuple[int, str], str] = {}
    for tensor in small:
        for key, value in probe.state.get(tensor, {}).items():
            if isinstance(value, Tensor) and value.dim() and _shares(value.shape, tensor.shape):
                found[tensor.dim(), key] = "parameter" if value.shape == tensor.shape else "dims"
            elif value is None:
                found[tensor.dim(), key] = "none"
    return found


def _is_torchs(optimizer: Any, name: str) -> bool:
    """Whether an attribute is one that all optimizers have, or a method, as the ``step`` that schedulers wrap."""
    ours = ("state", "param_groups", "defaults", "curvature")
    return name in ours or name.startswith("_optimizer_") or callable(getattr(type(optimizer), name, None))


def _is_fixed(value: object) -> bool:
    """Whether a step cannot change a value in its place."""
    kinds = (bool, int, float, str, frozenset, type(None), torch.dtype, torch.device)
    return all(map(_is_fixed, value)) if isinstance(value, tuple) else isinstance(value, kinds)


def _shares(shape: torch.Size, parameter: torch.Size) -> bool:
    """Whether a tensor has a size other than 1 in common with its parameter, or only sizes of 1."""
    sizes = {size for size in shape if size > 1}
    return not sizes or not sizes.isdisjoint(parameter)


def _base_problem(
    parameter: Tensor, saved: Mapping[str, Any], own: Mapping[str, Any], kinds: Mapping[tuple[int, str], str]
) -> str:
    """Why a parameter's state of the base class cannot be loaded, as the end of a sentence; empty if it can."""
    known = {key: kind for (n, key), kind in kinds.items() if n == parameter.dim()}
    whole = [key for key, kind in known.items() if kind == "parameter"]
    missing = [key for key in whole if not isinstance(saved.get(key), Tensor)]
    if missing and any(key in saved for key in whole):
        return f"is damaged, or of another class of optimizers: it has no {missing[0]!r}"
    for key, value in saved.items():
        mine, kind = own.get(key), known.get(key) if is_of_base(key) else "parameter"
        if isinstance(value, Tensor) and value.dim():
            like = mine.shape if isinstance(mine, Tensor) and kind != "parameter" else parameter.shape
            fits = _shares(value.shape, like) if kind == "dims" and mine is None else value.shape == like
            if not fits and (kind or mine is not None):
                return f"has a {key!r} of shape {tuple(value.shape)}, which does not fit {tuple(like)}: another model?"
        if isinstance(value, Tensor) and bool(value.isnan().any()):
            return f"is damaged, or was saved after training had failed: {key!r} is not a number"
        lost = value is None and kind != "none" and (kinds or not is_of_base(key))
        counts = key == "step" and isinstance(value, Tensor | int | float)
        if lost or counts and not 0 <= float(value) < math.inf:
            return f"is damaged: its {key!r} is {value}"
    return ""
