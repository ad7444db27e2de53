"""Back through time: the gradients of what recurrent cells add up, ``s = W_ih x + b_ih`` and ``u = W_hh h + b_hh``.

The hidden states are known, so that nearly all is computed for all positions at once. One after the other come only the
gradients of hidden states and cells, which are linear in those of the next position.

Shapes: n sequences, H hidden units; s and u are ``[rows, gates H]``, gates in torch's order. Rows are in the order of
packed sequences: those of the first position, then those of the second, the longest sequence first in each. ``sizes``
says how many sequences have each position. Gradients of hidden states and cells are given without, and changed in place
to those with, what arrives from later positions.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def states_before(initial: Tensor, states: Tensor, sizes: Sequence[int]) -> Tensor:
    """The states before each position, ``[rows, H]``: the initial ones, ``[n, H]``, and those of earlier positions."""
    parts = (initial, *states.split_with_sizes(sizes)[:-1])
    return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])


def with_final(g: Tensor, final: Tensor, sizes: Sequence[int]) -> Tensor:
    """A copy of the gradients of all states, ``[rows, H]``, with those of the final ones, ``[n, H]``, added."""
    g = g.clone()
    for part, size, following in zip(g.split_with_sizes(sizes), sizes, (*sizes[1:], 0), strict=True):
        if following < size:  # some sequences end here
            part[following:] += final[following:size]
    return g


def through_lstm(
    s: Tensor, u: Tensor, cell: Tensor, weight: Tensor, g_hidden: Tensor, g_cell: Tensor, sizes: Sequence[int]
) -> Tensor:
    """The gradient of s, which is that of u as well.

    With ``i, f, o = sigmoid(...)`` and ``k = tanh(...)`` of the four parts i, f, k, o of s + u::

        c_t = f_t c_{t-1} + i_t k_t,    h_t = o_t tanh(c_t)

    Args:
        s: From the inputs.
        u: From the hidden states.
        cell: The initial cells, ``[n, H]``.
        weight: W_hh.
        g_hidden: The gradients of the hidden states, ``[rows, H]``.
        g_cell: Those of the cells, ``[rows, H]``.
        sizes: How many sequences have each position.
    """
    i, f, k, o = (s + u).unflatten(-1, (4, -1)).unbind(-2)
    i, f, k, o = i.sigmoid(), f.sigmoid(), k.tanh(), o.sigmoid()
    cells, before = i * k, torch.empty_like(f)
    for at, kept, from_before in zip(*(x.split_with_sizes(sizes) for x in (cells, f, before)), strict=True):
        from_before.copy_(cell[: len(at)])
        cell = at.addcmul_(kept, from_before)
    squashed = cells.tanh()
    to_cell = o * (1 - squashed.square())
    slopes = torch.stack((k * i * (1 - i), before * f * (1 - f), i * (1 - k.square())), dim=1)
    slope_o = squashed * o * (1 - o)
    g = torch.empty_like(s).unflatten(-1, (4, -1))
    of_g, of_hidden, of_cell, *known = (
        x.split_with_sizes(sizes) for x in (g, g_hidden, g_cell, to_cell, slopes, slope_o, f)
    )
    for t in reversed(range(len(sizes))):
        cell_slopes, gate_slopes, output_slopes, kept = (part[t] for part in known)
        of_cell[t].addcmul_(of_hidden[t], cell_slopes)
        torch.mul(gate_slopes, of_cell[t][:, None], out=of_g[t][:, :3])
        torch.mul(output_slopes, of_hidden[t], out=of_g[t][:, 3])
        if t > 0:
            of_hidden[t - 1][: sizes[t]].addmm_(of_g[t].flatten(1), weight)
            of_cell[t - 1][: sizes[t]].addcmul_(of_cell[t], kept)
    return g.flatten(1)


def through_gru(
    s: Tensor, u: Tensor, before: Tensor, weight: Tensor, g_hidden: Tensor, sizes: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """The gradients of s and u.

    With ``r, z = sigmoid(s + u)`` of the first two of their parts r, z, k::

        h_t = (1 - z_t) k_t + z_t h_{t-1},    k_t = tanh(s_k + r_t u_k)

    Args:
        s: From the inputs.
        u: From the hidden states.
        before: The hidden states before each position, ``[rows, H]``.
        weight: W_hh.
        g_hidden: The gradients of the hidden states, ``[rows, H]``.
        sizes: How many sequences have each position.
    """
    s_r, s_z, s_k = s.unflatten(-1, (3, -1)).unbind(-2)
    u_r, u_z, u_k = u.unflatten(-1, (3, -1)).unbind(-2)
    r, z = (s_r + u_r).sigmoid(), (s_z + u_z).sigmoid()
    k = (s_k + r * u_k).tanh()
    to_k = (1 - z) * (1 - k.square())
    to_r, to_z = to_k * u_k * r * (1 - r), (before - k) * z * (1 - z)
    g_hidden = _through_time(g_hidden, torch.stack((to_r, to_z, to_k * r), dim=1), z, weight, sizes)
    both = torch.stack((to_r, to_z, to_k), dim=1), torch.stack((to_r, to_z, to_k * r), dim=1)
    g_s, g_u = ((slopes * g_hidden[:, None]).flatten(1) for slopes in both)
    return g_s, g_u


def through_rnn(hidden: Tensor, weight: Tensor, g_hidden: Tensor, sizes: Sequence[int], *, relu: bool) -> Tensor:
    """The gradient of s, which is that of u as well, for ``h_t = tanh(s_t + u_t)``, or its positive part.

    Args:
        hidden: The hidden states, ``[rows, H]``.
        weight: W_hh.
        g_hidden: Their gradients.
        sizes: How many sequences have each position.
        relu: Whether the positive part is taken.
    """
    slopes = (hidden > 0).to(hidden) if relu else 1 - hidden.square()
    return slopes * _through_time(g_hidden, slopes[:, None], None, weight, sizes)


def _through_time(
    g_hidden: Tensor, slopes: Tensor, kept: Tensor | None, weight: Tensor, sizes: Sequence[int]
) -> Tensor:
    """Adds to each position's gradient what arrives from the next one.

    Args:
        g_hidden: The gradients of hidden states, ``[rows, H]``.
        slopes: Those of u for a gradient of one, ``[rows, gates, H]``.
        kept: How much of a hidden state is in the next one, beside what u adds, ``[rows, H]``.
        weight: W_hh.
        sizes: How many sequences have each position.
    """
    of_g, of_slopes = g_hidden.split_with_sizes(sizes), slopes.split_with_sizes(sizes)
    of_kept = None if kept is None else kept.split_with_sizes(sizes)
    for t in range(len(sizes) - 1, 0, -1):
        earlier = of_g[t - 1][: sizes[t]]
        earlier.addmm_((of_slopes[t] * of_g[t][:, None]).flatten(1), weight)
        if of_kept is not None:
            earlier.addcmul_(of_kept[t], of_g[t])
    return g_hidden
