"""Back through time: the gradients of what recurrent cells add up, ``s = W_ih x + b_ih`` and ``u = W_hh h + b_hh``.

The hidden states are known, so that nearly all is computed for all positions at once. One after the other come only the
gradients of hidden states and cells, which are linear in those of the next position.

Shapes: T positions, n examples, H hidden units; s and u are ``[T, n, gates H]``, gates in torch's order. Gradients of
hidden states and cells are given without, and changed in place to those with, what arrives from later positions.
"""

from __future__ import annotations

import torch
from torch import Tensor


def through_lstm(s: Tensor, u: Tensor, cell: Tensor, weight: Tensor, g_hidden: Tensor, g_cell: Tensor) -> Tensor:
    """The gradient of s, which is that of u as well.

    With ``i, f, o = sigmoid(...)`` and ``k = tanh(...)`` of the four parts i, f, k, o of s + u::

        c_t = f_t c_{t-1} + i_t k_t,    h_t = o_t tanh(c_t)

    Args:
        s: From the inputs.
        u: From the hidden states.
        cell: The initial cells, ``[n, H]``.
        weight: W_hh.
        g_hidden: The gradients of the hidden states, ``[T, n, H]``.
        g_cell: Those of the cells, ``[T, n, H]``.
    """
    i, f, k, o = (s + u).unflatten(-1, (4, -1)).unbind(-2)
    i, f, k, o = i.sigmoid(), f.sigmoid(), k.tanh(), o.sigmoid()
    cells = i * k
    before = torch.cat((cell[None], cells[:-1]))  # a copy: the loop fills in what it lacks
    for t in range(len(cells)):
        if t > 0:
            before[t] = cells[t - 1]
        cells[t].addcmul_(f[t], before[t])
    squashed = cells.tanh()
    to_cell = o * (1 - squashed.square())
    slopes = torch.stack((k * i * (1 - i), before * f * (1 - f), i * (1 - k.square())), dim=2)
    slope_o = squashed * o * (1 - o)
    g = torch.empty_like(s).unflatten(-1, (4, -1))
    for t in reversed(range(len(s))):
        g_cell[t].addcmul_(g_hidden[t], to_cell[t])
        torch.mul(slopes[t], g_cell[t, :, None], out=g[t, :, :3])
        torch.mul(slope_o[t], g_hidden[t], out=g[t, :, 3])
        if t > 0:
            g_hidden[t - 1].addmm_(g[t].flatten(1), weight)
            g_cell[t - 1].addcmul_(g_cell[t], f[t])
    return g.flatten(2)


def through_gru(s: Tensor, u: Tensor, before: Tensor, weight: Tensor, g_hidden: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of s and u.

    With ``r, z = sigmoid(s + u)`` of the first two of their parts r, z, k::

        h_t = (1 - z_t) k_t + z_t h_{t-1},    k_t = tanh(s_k + r_t u_k)

    Args:
        s: From the inputs.
        u: From the hidden states.
        before: The hidden states before each position, ``[T, n, H]``.
        weight: W_hh.
        g_hidden: The gradients of the hidden states, ``[T, n, H]``.
    """
    s_r, s_z, s_k = s.unflatten(-1, (3, -1)).unbind(-2)
    u_r, u_z, u_k = u.unflatten(-1, (3, -1)).unbind(-2)
    r, z = (s_r + u_r).sigmoid(), (s_z + u_z).sigmoid()
    k = (s_k + r * u_k).tanh()
    to_k = (1 - z) * (1 - k.square())
    to_r, to_z = to_k * u_k * r * (1 - r), (before - k) * z * (1 - z)
    g_hidden = _through_time(g_hidden, torch.stack((to_r, to_z, to_k * r), dim=2), z, weight)
    both = torch.stack((to_r, to_z, to_k), dim=2), torch.stack((to_r, to_z, to_k * r), dim=2)
    g_s, g_u = ((slopes * g_hidden[:, :, None]).flatten(2) for slopes in both)
    return g_s, g_u


def through_rnn(hidden: Tensor, weight: Tensor, g_hidden: Tensor, *, relu: bool) -> Tensor:
    """The gradient of s, which is that of u as well, for ``h_t = tanh(s_t + u_t)``, or its positive part.

    Args:
        hidden: The hidden states, ``[T, n, H]``.
        weight: W_hh.
        g_hidden: Their gradients.
        relu: Whether the positive part is taken.
    """
    slopes = (hidden > 0).to(hidden) if relu else 1 - hidden.square()
    return slopes * _through_time(g_hidden, slopes[:, :, None], None, weight)


def _through_time(g_hidden: Tensor, slopes: Tensor, kept: Tensor | None, weight: Tensor) -> Tensor:
    """Adds to each position's gradient what arrives from the next one.

    Args:
        g_hidden: The gradients of hidden states, ``[T, n, H]``.
        slopes: Those of u for a gradient of one, ``[T, n, gates, H]``.
        kept: How much of a hidden state is in the next one, beside what u adds, ``[T, n, H]``.
        weight: W_hh.
    """
    for t in range(len(g_hidden) - 1, 0, -1):
        g_hidden[t - 1].addmm_((slopes[t] * g_hidden[t, :, None]).flatten(1), weight)
        if kept is not None:
            g_hidden[t - 1].addcmul_(kept[t], g_hidden[t])
    return g_hidden
