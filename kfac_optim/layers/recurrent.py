"""LSTM, GRU and RNN, layers and cells: two Kronecker blocks for each level and direction (Martens et al. 2018).

One level in one direction computes, at each position t,::

    s_t = W_ih x_t + b_ih,    u_t = W_hh h_{t-1} + b_hh,    h_t = cell(s_t, u_t, state)

so ``W_ih`` is a Linear on the inputs and ``W_hh`` one on the hidden states before, both shared by all positions. The
module shows neither the gradients of s and u nor the hidden states of lower levels. :class:`RecurrentCall` computes
them anew from inputs, outputs and output gradients (``recurrence.py``). Dropout between the levels is left out there:
it is unknown which units the call has dropped.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from ..distributed import is_sharded
from .base import Declined, own_parameter
from .linear import LinearLayer
from .options import LayerOptions
from .recurrence import states_before, through_gru, through_lstm, through_rnn, with_final
from .registry import register_layer

_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "LSTM": torch.lstm,
    "GRU": torch.gru,
    "RNN_TANH": torch.rnn_tanh,
    "RNN_RELU": torch.rnn_relu,
}
_GATES = {"LSTM": 4, "GRU": 3, "RNN_TANH": 1, "RNN_RELU": 1}


class RecurrentLayer(LinearLayer):
    """The weight of a recurrent module for its inputs, or for its hidden states, in one level and direction.

    Its rows are ``[positions, n, d]``, or ``[rows, d]`` for packed sequences.

    Args:
        suffix: What the names of weight and bias end in, such as "ih_l0" for ``weight_ih_l0``.
    """

    most_reach = 0.05  # cells that saturate have no walls: weights would grow along flat directions for ever
    host: nn.Module

    def __init__(self, name: str, module: nn.Module, options: LayerOptions, *, suffix: str) -> None:
        self.suffix, self.host, self.gates = suffix, module, _GATES[_kind_of(module)]
        super().__init__(name, module, replace(options, batch_dim=1))

    def own_parameters(self, module: nn.Module) -> tuple[nn.Parameter, nn.Parameter | None]:
        weight = own_parameter(module, f"weight_{self.suffix}")
        if is_sharded(weight):
            raise Declined("a sharded weight of a recurrent module")
        return weight, module._parameters.get(f"bias_{self.suffix}")


@register_layer(nn.LSTM, nn.GRU, nn.RNN, nn.LSTMCell, nn.GRUCell, nn.RNNCell)
def _recurrent(name: str, module: Any, options: LayerOptions) -> Sequence[RecurrentLayer]:
    """The two layers of each level and direction."""
    if getattr(module, "proj_size", 0):
        raise Declined("an LSTM with projections (proj_size)")
    prefix = f"{name}." if name else ""
    suffixes = [f"{kind}{end}" for level in _levels(module) for end in level for kind in ("ih", "hh")]
    return [RecurrentLayer(prefix + suffix, module, options, suffix=suffix) for suffix in suffixes]


def _levels(module: Any) -> list[list[str]]:
    """For each level, what the names of its parameters end in, in each direction; a cell has one level."""
    if isinstance(module, nn.RNNCellBase):
        return [[""]]
    directions = ("", "_reverse") if module.bidirectional else ("",)
    return [[f"_l{level}{direction}" for direction in directions] for level in range(module.num_layers)]


def tensors_of(output: Any) -> list[Tensor]:
    """The tensors that a recurrent module returns: the hidden states of all positions, and the final state."""
    if isinstance(output, PackedSequence):
        return [output.data]
    return [output] if isinstance(output, Tensor) else [tensor for part in output for tensor in tensors_of(part)]


def with_tensors(output: Any, tensors: Iterator[Tensor]) -> Any:
    """The output of a recurrent module with other tensors in the place of its own."""
    if isinstance(output, PackedSequence):
        return output._replace(data=next(tensors))
    return next(tensors) if isinstance(output, Tensor) else tuple(with_tensors(part, tensors) for part in output)


class RecurrentCall:
    """One call of a recurrent module, until its output gradients arrive.

    All tensors are brought into one form: sequences into rows in the order of packed ones, ``[rows, d]``, and states
    into ``[levels * directions, n, H]``. The *place* of a level and direction is its index there.

    Args:
        module: The module.
        input: Its input.
        state: The initial state that it was given, or None.
        output: What it has returned.
        dtype: The precision to compute in.
    """

    def __init__(self, module: Any, input: Any, state: Any, output: Any, dtype: torch.dtype) -> None:
        self._module, self._kind, self._dtype = module, _kind_of(module), dtype
        self._is_cell, self._levels = isinstance(module, nn.RNNCellBase), _levels(module)
        self._batch_sizes = self._order = None  # of packed sequences
        if isinstance(input, PackedSequence):
            self._batch_sizes, self._order = input.batch_sizes, input.sorted_indices
        self._is_batched = self._batch_sizes is not None or input.dim() == (2 if self._is_cell else 3)
        self._input, self._output = (self._sequences(tensors_of(given)[0]) for given in (input, output))
        self._shape = self._input.shape[:-1]  # of sequences without their features
        self._sizes = [self._shape[-1]] * self._shape[0] if self._batch_sizes is None else self._batch_sizes.tolist()
        zeros = self._input.new_zeros(sum(map(len, self._levels)), self._sizes[0], module.hidden_size, dtype=dtype)
        # Those of this call: torch.func.functional_call puts others in their place.
        self._parameters = {end: self._parameters_of(end) for level in self._levels for end in level}
        self._state = [zeros, zeros] if state is None else [self._stacked(part) for part in tensors_of(state)]

    @torch.no_grad()
    def rows(self, gradients: Sequence[Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
        """The inputs and output gradients of each layer, by its suffix.

        ``gradients``: those of :func:`tensors_of` the output.
        """
        x, y, g = (
            sequences.to(self._dtype).flatten(0, -2)
            for sequences in (self._input, self._output, self._sequences(gradients[0]))
        )
        final = [self._stacked(part) for part in gradients[1:]]
        if self._is_cell:  # its output is its final hidden state
            final.insert(0, torch.zeros_like(self._state[0]))
        inputs, hidden = self._inputs_and_hidden_states(x, y)
        found: dict[str, tuple[Tensor, Tensor]] = {}
        for number, level in reversed(list(enumerate(self._levels))):
            x, parts = inputs[number], zip(hidden[number].chunk(len(level), -1), g.chunk(len(level), -1), strict=True)
            g = torch.zeros_like(x)
            for direction, (h, g_h) in enumerate(parts):
                place = number * len(level) + direction
                end, given = level[direction], [self._turned(each, direction) for each in (x, h, g_h)]
                of_final = [part[place] for part in final]
                found[f"ih{end}"], found[f"hh{end}"] = self._through_time(place, end, given, of_final)
                if number > 0:
                    g += self._turned(found[f"ih{end}"][1] @ self._parameters[end][0], direction)
        return {
            suffix: (a.unflatten(0, self._shape), g_rows.unflatten(0, self._shape))
            for suffix, (a, g_rows) in found.items()
        }

    def _through_time(
        self, place: int, end: str, sequences: Sequence[Tensor], final: Sequence[Tensor]
    ) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """The rows of the two layers of one level and direction, whose names end in ``end``.

        Args:
            place: The place of level and direction in states.
            end: What the names of its parameters end in.
            sequences: The inputs, the hidden states, and the gradients of these but for what arrives from later
                positions, all in the order in which they are read.
            final: The gradients of the final state.
        """
        x, h, g = sequences
        before = states_before(self._state[0][place], h, self._sizes)
        w_ih, w_hh, *biases = self._parameters[end]
        b_ih, b_hh = biases or (None, None)
        s, u = F.linear(x, w_ih, b_ih), F.linear(before, w_hh, b_hh)
        g = with_final(g, final[0], self._sizes)
        if self._kind == "GRU":
            g_s, g_u = through_gru(s, u, before, w_hh, g, self._sizes)
        elif self._kind == "LSTM":
            g_cell = with_final(torch.zeros_like(g), final[1], self._sizes)
            g_s = g_u = through_lstm(s, u, self._state[1][place], w_hh, g, g_cell, self._sizes)
        else:
            g_s = g_u = through_rnn(h, w_hh, g, self._sizes, relu=self._kind == "RNN_RELU")
        return (x, g_s), (before, g_u)

    def _inputs_and_hidden_states(self, x: Tensor, y: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Those of all levels, given the first input and the last hidden states; those between are computed anew."""
        inputs, hidden = [x], []
        for number, level in enumerate(self._levels[:-1]):
            x = inputs[number]
            states = [self._hidden_states(number * len(level) + d, d, end, x) for d, end in enumerate(level)]
            hidden.append(torch.cat(states, -1))
            inputs.append(hidden[-1])
        return inputs, [*hidden, y]

    def _hidden_states(self, place: int, direction: int, end: str, x: Tensor) -> Tensor:
        """The hidden states of one level and direction."""
        initial: Any = [part[place][None] for part in self._state]
        parameters, given = self._parameters[end], [self._turned(x, direction).unflatten(0, self._shape)]
        options = {"has_biases": len(parameters) > 2, "num_layers": 1, "dropout": 0.0}
        options |= {"train": False, "bidirectional": False}
        if self._batch_sizes is None:
            options["batch_first"] = False
        else:
            given.append(self._batch_sizes)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # cuDNN would like the parameters in one piece of memory
            initial = initial if self._kind == "LSTM" else initial[0]
            h, *_ = _FUNCTIONS[self._kind](*given, initial, parameters, **options)
        return self._turned(h.flatten(0, -2), direction)

    def _parameters_of(self, end: str) -> list[Tensor]:
        """``W_ih`` and ``W_hh``, and the biases if there are any."""
        kinds = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")[: 4 if self._module.bias else 2]
        return [getattr(self._module, kind + end).detach().to(self._dtype) for kind in kinds]

    # Forms of tensors -------------------------------------------------------------------------------------------------

    def _sequences(self, tensor: Tensor) -> Tensor:
        """An input, the hidden states of all positions, or their gradient, ``[T, n, d]``; packed ones ``[rows, d]``."""
        tensor = tensor.detach()
        if self._batch_sizes is not None:
            return tensor
        if self._is_cell:
            return tensor[None] if self._is_batched else tensor[None, None]
        if not self._is_batched:
            return tensor[:, None]
        return tensor.transpose(0, 1) if self._module.batch_first else tensor

    def _stacked(self, state: Tensor) -> Tensor:
        """A part of an initial or a final state, or its gradient, ``[levels * directions, n, H]``."""
        state = state.detach().to(self._dtype)
        if self._batch_sizes is not None:
            return state if self._order is None else state.index_select(1, self._order)
        state = state if self._is_batched else state[..., None, :]
        return state[None] if self._is_cell else state

    def _turned(self, rows: Tensor, direction: int) -> Tensor:
        """Each sequence from its last position to the first (direction 1), which is where its final state is."""
        if direction == 0:
            return rows
        if self._batch_sizes is None:
            return rows.unflatten(0, self._shape).flip(0).flatten(0, 1)
        return rows.index_select(0, self._turned_places)

    @functools.cached_property
    def _turned_places(self) -> Tensor:
        """For each row of packed sequences, the one that is as far from the other end; computed on the CPU."""
        assert self._batch_sizes is not None
        places = torch.arange(len(self._input), device="cpu")
        padded, lengths = pad_packed_sequence(PackedSequence(places, self._batch_sizes))
        mirrored = lengths - 1 - torch.arange(len(padded), device="cpu")[:, None]
        turned = pack_padded_sequence(padded.gather(0, mirrored.clamp(min=0)), lengths).data
        return turned.to(self._input.device, non_blocking=True)


def _kind_of(module: Any) -> str:
    """What a recurrent module is, as torch calls it for those that have levels."""
    if isinstance(module, nn.RNNBase):
        return str(module.mode)
    if isinstance(module, nn.RNNCell):
        return f"RNN_{module.nonlinearity.upper()}"
    return "LSTM" if isinstance(module, nn.LSTMCell) else "GRU"
