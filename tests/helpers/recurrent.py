"""Recurrent modules written out: Linear layers that are called once for each position."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

KINDS: dict[str, Any] = {"LSTM": nn.LSTM, "GRU": nn.GRU, "RNN_TANH": nn.RNN, "RNN_RELU": nn.RNN}


class Unrolled(nn.Module):
    """What ``nn.LSTM``, ``nn.GRU``, ``nn.RNN`` or one of their cells computes, from the equations of torch's pages.

    Its Linear layers have the names that the engine gives to the layers of the module: ``ih_l0``, ``hh_l0``.
    """

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.is_cell = isinstance(module, nn.RNNCellBase)
        self.hidden, self.batch_first = module.hidden_size, getattr(module, "batch_first", False)
        self.kind = getattr(module, "mode", "") or type(module).__name__.removesuffix("Cell")
        if self.kind == "RNN":
            self.kind += f"_{module.nonlinearity.upper()}"
        levels, directions = getattr(module, "num_layers", 1), 2 if getattr(module, "bidirectional", False) else 1
        self.ends = [[f"_l{i}", f"_l{i}_reverse"][:directions] for i in range(levels)]
        if self.is_cell:
            self.ends = [[""]]
        for side in (f"{kind}{end}" for level in self.ends for end in level for kind in ("ih", "hh")):
            weight = getattr(module, f"weight_{side}")
            layer = nn.Linear(*weight.T.shape, bias=module.bias, dtype=weight.dtype)
            layer.load_state_dict({kind: getattr(module, f"{kind}_{side}") for kind, _ in layer.named_parameters()})
            self.add_module(side, layer)

    def forward(self, input: Any, state: Any = None) -> Any:
        """The same inputs and outputs as the module's, batched ones."""
        if self.is_cell:
            _, final = self._run(input[None], self._states(state, 1, len(input)), None)
            return tuple(part[0] for part in final) if self.kind == "LSTM" else final[0][0]
        packed, lengths, x = isinstance(input, PackedSequence), None, input
        if packed:
            x, lengths = pad_packed_sequence(input)
        elif self.batch_first:
            x = input.transpose(0, 1)
        y, final = self._run(x, self._states(state, sum(map(len, self.ends)), x.shape[1]), lengths)
        if packed:
            y = pack_padded_sequence(y, lengths, enforce_sorted=False)
        elif self.batch_first:
            y = y.transpose(0, 1)
        return y, final if self.kind == "LSTM" else final[0]

    def _states(self, state: Any, places: int, examples: int) -> list[Tensor]:
        zeros = torch.zeros(places, examples, self.hidden, dtype=torch.float64)
        if state is None:
            return [zeros, zeros]
        parts = state if isinstance(state, tuple) else (state, state)
        return [part[None] if self.is_cell else part for part in parts]

    def _run(self, x: Tensor, state: list[Tensor], lengths: Tensor | None) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The hidden states of the last level, and the final state of all."""
        final: list[tuple[Tensor, Tensor]] = []
        for level in self.ends:
            outputs = []
            for direction, end in enumerate(level):
                h, c = (part[len(final)] for part in state)
                hidden = [h] * len(x)
                for t in range(len(x)) if direction == 0 else reversed(range(len(x))):
                    alive = torch.ones(len(h), dtype=torch.bool) if lengths is None else t < lengths
                    s = self.get_submodule(f"ih{end}")(x[t, alive])
                    u = self.get_submodule(f"hh{end}")(h[alive])
                    new_h, new_c = self._cell(s, u, h[alive], c[alive])
                    h, c = h.clone(), c.clone()
                    h[alive], c[alive] = new_h, new_c
                    hidden[t] = torch.where(alive[:, None], h, 0.0)
                outputs.append(torch.stack(hidden))
                final.append((h, c))
            x = torch.cat(outputs, -1)
        hs, cs = zip(*final, strict=True)
        return x, (torch.stack(hs), torch.stack(cs))

    def _cell(self, s: Tensor, u: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        if self.kind == "LSTM":
            i, f, g, o = (s + u).chunk(4, -1)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            return o.sigmoid() * c.tanh(), c
        if self.kind == "GRU":
            (s_r, s_z, s_n), (u_r, u_z, u_n) = s.chunk(3, -1), u.chunk(3, -1)
            r, z = (s_r + u_r).sigmoid(), (s_z + u_z).sigmoid()
            return (1 - z) * (s_n + r * u_n).tanh() + z * h, c
        return (s + u).tanh() if self.kind == "RNN_TANH" else (s + u).relu(), c
