"""What the next gradients say of the last step: how they agree with vectors that were noted in it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from .beside import launches_count
from .distributed import gathered_together, is_sharded, may_be_sharded
from .grouping import grouped_by_key

__all__ = ["Compared", "Copies", "Lessons", "alignment", "alignments"]

Compared = tuple[Tensor, Tensor, float | Tensor]  # the gradient of a parameter, what it is compared with, the rate

Pair = tuple[Tensor, Tensor]
Copies = dict[tuple[int, ...], Tensor]  # gradients side by side, by the identities of the single ones

_BATCH_NUMEL = 2**25  # on a GPU gradients are copied side by side up to so many numbers


@dataclass(frozen=True)
class Lessons:
    """What a step learns from the last one, on the device: it is read together with all else that a step reads.

    Attributes:
        turn: How far the gradients agree with the last ``k - u``, 0-dim (:mod:`kfac_optim.trust`).
        average: Likewise with the average of the gradients before them, where one is kept.
        length: The length of the base optimizer's last update, if it was turned.
        stretch: ``<g', s>`` of each parameter that was stretched, ``[n]``: g' the gradient, s the last stretch.
        descent: ``<g, s>`` of each, ``[n]``: g the averaged gradient that s was made of. Their ratio is the slope of
            :mod:`~kfac_optim.reach`.
        stretched: These parameters.
        rates: Their learning rates, where these are numbers, which the device need not know; else 1.
    """

    turn: Tensor | None = None
    average: Tensor | None = None
    length: Tensor | None = None
    stretch: Tensor | None = None
    descent: Tensor | None = None
    stretched: Sequence[nn.Parameter] = ()
    rates: Sequence[float] = ()

    @property
    def tensors(self) -> dict[str, Tensor]:
        """All that is known, by name."""
        known = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in known.items() if isinstance(value, Tensor)}

    def read(self, values: Iterator[float]) -> tuple[dict[str, float], dict[nn.Parameter, tuple[float, float]]]:
        """Takes its numbers from those that were read.

        Returns:
            ``turn``, ``average`` and ``length`` as far as they are known, and by parameter ``stretch`` and ``descent``.
        """
        found = {name: [next(values) for _ in range(of.numel())] for name, of in self.tensors.items()}
        slopes = zip(found.pop("stretch", ()), found.pop("descent", ()), self.rates, strict=True)
        by_parameter = zip(self.stretched, ((after * lr, before * lr) for after, before, lr in slopes), strict=True)
        return {name: value for name, (value,) in found.items()}, dict(by_parameter)


def alignment(parameters: Sequence[Compared], copies: Copies | None = None) -> Tensor:
    """``lr <g, v>``, summed over all parameters, 0-dim.

    ``copies``: gradients that are side by side already; new ones are noted in it.
    """
    products: list[Tensor] = []
    if may_be_sharded():
        sharded = [(g, v, lr) for g, v, lr in parameters if is_sharded(g)]
        parameters = [(g, v, lr) for g, v, lr in parameters if not is_sharded(g)] if sharded else parameters
        products += _of_shards(sharded)
    for lr, places in _alike(parameters):
        pairs = [parameters[i][:2] for i in places]
        products.append(_times(_sum(_dots(pairs, copies)), lr))
    return _sum([product.to(products[0].device) for product in products])


def alignments(parameters: Sequence[Compared], copies: Copies | None = None) -> Tensor:
    """``lr <g, v>`` of each parameter, ``[n]``; ``copies``: see :func:`alignment`."""
    found: list[Tensor] = []
    order: list[int] = []
    if may_be_sharded():
        order = [i for i, (g, _, _) in enumerate(parameters) if is_sharded(g)]
        found = [product.reshape(1) for product in _of_shards([parameters[i] for i in order])]
    left = set(order)
    for lr, places in _alike(parameters):
        places = [i for i in places if i not in left]
        pairs = [parameters[i][:2] for i in places]
        found += [_times(_each_dot(pairs, copies), lr)] if pairs else []
        order += places
    whole = found[0] if len(found) == 1 else torch.cat([part.to(found[0].device) for part in found])
    if order == sorted(order):
        return whole
    back = sorted(range(len(order)), key=order.__getitem__)
    return whole[torch.tensor(back).to(whole.device, non_blocking=True)]


def _of_shards(parameters: Sequence[Compared]) -> list[Tensor]:
    """The same of shards, 0-dim each (a collective)."""
    return gathered_together([torch.mul(*_widened(g, v)).sum() * lr for g, v, lr in parameters])


def _alike(parameters: Sequence[Compared]) -> list[tuple[float | Tensor, list[int]]]:
    """The places of parameters of one rate whose gradients are of one kind and on one device, with that rate."""
    found: dict[Any, tuple[float | Tensor, list[int]]] = {}
    for i, (g, v, lr) in enumerate(parameters):
        kind = g.device, g.dtype, v.dtype, id(lr) if isinstance(lr, Tensor) else lr
        found.setdefault(kind, (lr, []))[1].append(i)
    return list(found.values())


def _times(product: Tensor, lr: float | Tensor) -> Tensor:
    return product * lr if isinstance(lr, Tensor) or lr != 1 else product


def _sum(numbers: Sequence[Tensor]) -> Tensor:
    return numbers[0] if len(numbers) == 1 else torch.stack(list(numbers)).sum()


def _dots(pairs: Sequence[Pair], copies: Copies | None) -> list[Tensor]:
    """Dot products of tensors on one device, 0-dim, each of one or of several pairs."""
    if launches_count(pairs[0][0].device):
        pairs = list(_side_by_side(pairs, copies))
    return [torch.dot(g.reshape(-1), v.reshape(-1)) for g, v in _all_widened(pairs)]


def _each_dot(pairs: Sequence[Pair], copies: Copies | None) -> Tensor:
    """The dot product of each pair of tensors on one device, ``[n]``."""
    device = pairs[0][0].device
    if not launches_count(device):
        return torch.stack([torch.dot(g.reshape(-1), v.reshape(-1)) for g, v in _all_widened(pairs)])
    products = [torch.mul(*_widened(g, v)) for g, v in _side_by_side(pairs, copies)]
    lengths = [_on_device(tuple(g.numel() for g, _ in batch), device) for batch in _batches(pairs)]
    found = [
        torch.segment_reduce(of_batch, "sum", lengths=of_parts, unsafe=True)
        for of_batch, of_parts in zip(products, lengths, strict=True)
    ]
    return found[0] if len(found) == 1 else torch.cat(found)


def _batches(pairs: Sequence[Pair]) -> list[list[Pair]]:
    """Pairs that are copied side by side, in order."""
    return list(grouped_by_key(pairs, lambda pair: None, lambda pair: pair[0].numel(), _BATCH_NUMEL))


def _side_by_side(pairs: Sequence[Pair], copies: Copies | None) -> Iterator[Pair]:
    """The pairs of each batch as one pair of vectors."""
    copies = {} if copies is None else copies
    for batch in _batches(pairs):
        gradients = tuple(id(g) for g, _ in batch)
        if gradients not in copies:
            copies[gradients] = torch.cat([g.reshape(-1) for g, _ in batch])
        yield copies[gradients], torch.cat([v.reshape(-1) for _, v in batch])


def _all_widened(pairs: Sequence[Pair]) -> Sequence[Pair]:
    """The same of pairs of one kind, nearly always of float32."""
    kinds = {part.dtype for part in pairs[0]}
    return pairs if kinds in ({torch.float32}, {torch.float64}) else [_widened(g, v) for g, v in pairs]


def _widened(g: Tensor, v: Tensor) -> Pair:
    """Both in float32, in float64 where one of them is."""
    dtype = torch.promote_types(torch.promote_types(g.dtype, v.dtype), torch.float32)
    return g.to(dtype), v.to(dtype)


@lru_cache(maxsize=16)
def _on_device(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    """The same in every step, so that they are sent there once."""
    return torch.tensor(lengths).to(device, non_blocking=True)
