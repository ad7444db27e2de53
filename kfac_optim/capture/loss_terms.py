"""M, the number of loss terms, from the inputs and the output of a model."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Literal

import torch
from torch import Tensor

LossAverage = Literal["batch", "batch+sequence", "elements"] | int | Callable[[Any, Any], int]
_MOST_COMPILED = 100  # the most tuples, lists, dicts and dataclasses that compiled models look into


@dataclass(frozen=True)
class LossTerms:
    """Counts M, the number of terms over which the loss takes its mean, from the inputs and the output of the model.

    Attributes:
        average: The engine's ``loss_average``, documented there.
        batch_dim: The dimension of the examples in outputs and inputs that have positions.
        class_dim: The dimension of the classes in the model's output; the others are positions.
    """

    average: LossAverage | None = "batch"
    batch_dim: int = 0
    class_dim: int = -1

    def count(self, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> int:
        """The number of loss terms M in one model call.

        It is derived from the output, or from the inputs if the model returns a scalar loss or nothing.

        Args:
            args: The positional arguments of the call. A callable ``average`` gets them as its ``inputs``.
            kwargs: The keyword arguments, which it gets instead if there are no positional ones.
            output: What the model returned.
        """
        if callable(self.average):
            return self._checked(self.average(args if args else kwargs, output))
        if isinstance(self.average, int):
            return self.average
        if self.average is None:
            return 1
        tensor = main_tensor(output)
        if tensor is None or tensor.dim() == 0:  # the model returns its loss: count its examples instead
            # Skips a time or another number that is the same for all examples; a strided nested tensor has no shape.
            sized = [t for t in tensors_in((args, kwargs)) if t.dim() and not t.is_nested]
            if not sized:
                return 1
            tensor = sized[0]
            classes = tensor.size(-1) if tensor.is_floating_point() else 1
        elif self.average != "elements" and _is_one_example(_first_tensor((args, kwargs)), tensor):
            return 1
        elif tensor.dim() < 2:
            classes = 1
        elif -tensor.dim() <= self.class_dim < tensor.dim():
            classes = tensor.size(self.class_dim) if self.average == "batch+sequence" else 1
        else:
            raise ValueError(
                f"Categorical(dim={self.class_dim}): the model's output {list(tensor.shape)} has no such dimension"
            )
        if self.average == "elements":
            return tensor.numel()
        if self.average == "batch+sequence":
            return tensor.numel() // max(1, classes)
        return tensor.size(self.dim_of_examples(tensor))  # "batch"

    def of_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        """M as far as it is known before the model returns; 0 if a callable ``average`` has to see the output."""
        return 0 if callable(self.average) else self.count(args, kwargs, None)

    @staticmethod
    def _checked(terms: Any) -> int:
        """Checks that a callable has returned a number of terms, and returns it; 0 if a batch has none."""
        try:
            number = int(terms)
        except (TypeError, ValueError, OverflowError):  # int() raises the last two for nan and inf
            number = -1
        if number < 0:
            raise ValueError(f"loss_average: the callable has returned {terms!r}; must be a number of loss terms >= 0")
        return number

    def dim_of_examples(self, tensor: Tensor) -> int:
        """The dimension of the examples in an output or input: the first if it has no positions, ``[N, C]``."""
        features = tensor.is_floating_point()  # token numbers have no features
        return self.batch_dim if tensor.dim() > 1 + features else 0


def _is_one_example(x: Tensor | None, output: Tensor) -> bool:
    """Whether an output ``[C]`` is that of one example ``[D]``, and not of a batch of numbers.

    This cannot be known, and is taken to be false, if C equals D, or if the input is not a vector of real numbers
    (token numbers may belong to several texts).
    """
    return x is not None and x.dim() == output.dim() == 1 and x.is_floating_point() and x.shape != output.shape


def _first_tensor(value: Any) -> Tensor | None:
    """The first tensor in nested tuples, lists, dicts and dataclasses."""
    found = tensors_in(value)
    return found[0] if found else None


def main_tensor(output: Any) -> Tensor | None:
    """The main tensor of a model's output: its ``.logits``, or else the first tensor in it that is not of integers."""
    try:
        logits = getattr(output, "logits", None)
    except Exception:  # KeyError of a dict whose __getattr__ is __getitem__, or whatever a property may raise
        logits = None
    if isinstance(logits, Tensor):
        return logits
    return _first_tensor([t for t in tensors_in(output) if t.is_floating_point() or t.is_complex()])


def tensors_in(value: Any) -> list[Tensor]:
    """All tensors in nested tuples, lists, dicts and dataclasses; a list, because older compilers reject generators.

    What is there several times is looked into once: the nodes of a tree may know their parents. Compilers know no
    identity of what a graph makes, so that only the first containers are looked into there.
    """
    found: list[Tensor] = []
    waiting, seen, compiled = [value], {}, 0
    while waiting and compiled < _MOST_COMPILED:
        value = waiting.pop()
        if isinstance(value, Tensor):
            found.append(value)
            continue
        items = _items_of(value)
        if items and torch.compiler.is_compiling():
            compiled += 1
        elif items:
            items = [] if id(value) in seen else items
            seen[id(value)] = value  # kept, or another object might get its number
        waiting += items[::-1]
    return found


def _items_of(value: Any) -> list[Any]:
    if isinstance(value, (tuple, list)):
        return list(value)
    if isinstance(value, (dict, UserDict)):  # transformers.BatchEncoding is a UserDict
        return [value[key] for key in value]  # an entry named "values" or "items" may hide the method of that name
    if is_dataclass(value):
        # With slots=True there is no __dict__; what __post_init__() has added is no field.
        of_fields = {field.name: getattr(value, field.name, None) for field in fields(value)}
        return list({**of_fields, **getattr(value, "__dict__", {})}.values())
    return []
