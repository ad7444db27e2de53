"""Takes activations ``a`` and output gradients ``g`` out of a model, and adds them up as the raw moments of a step.

How a layer is watched. A forward hook reduces the input to its moment at once, so that nothing large is kept and
activation checkpointing still saves memory, and puts a hook on the *output tensor*. The input's moment counts only if
that output's gradient arrives: a rule that suits evaluation, ``no_grad`` and both kinds of activation checkpointing.
Full backward hooks are never used: they crash when an in-place activation follows the layer.

How loss terms are counted. M, the number of terms that the loss averages, belongs to the loss. It is derived from the
output of the outermost module call, once per backward pass, however many layers and calls took part.

Where to look::

    hooks.py           eager models: the hooks, from the call of a model to the end of its backward pass
    hook_objects.py    the hooks as objects, the modules that get them, and how they get to their places
    compiled.py        compiled models: the operators that replace the hooks, and the order in which graphs run them
    calls.py           which call of the model is in progress, and which one a layer's call belongs to
    recorder.py        the inputs and output gradients of layer calls -> moments
    microbatch.py      the moments of a backward pass -> a micro-batch
    statistics.py      micro-batches -> the statistics of a step
    gradients.py       which backward passes count: those whose gradient is in ``.grad`` at the step
    sampling.py        the sampled Fisher's own backward pass, whose moments wait for the user's
    fisher.py          the distributions that the sampled Fisher draws from
    loss_terms.py      input and output of a model -> M
    taps.py            functions of torch that get a weight inside the call of a module, as in attention
    recurrent.py       recurrent modules, whose layers are inside one operation
    signs.py           signs of networks that train against each other
    weight_uses.py     weights that are used outside the calls of their modules
    autograd.py        the graph behind a tensor, the pass in progress, gradients that arrive
    replay.py          repeats the calls of a model at other weights
    copies.py          copies and pickles of a watched model, without the hooks
"""

from .copies import when_whole
from .fisher import Bernoulli, Categorical, Fisher, Gaussian
from .hooks import Capture
from .loss_terms import LossAverage, LossTerms
from .replay import Part, RandomState, Replay, repeating
from .signs import GameSigns
from .statistics import StepMoments, TakenStatistics

__all__ = [
    "Bernoulli",
    "Capture",
    "Categorical",
    "Fisher",
    "Gaussian",
    "LossAverage",
    "LossTerms",
    "Part",
    "RandomState",
    "Replay",
    "GameSigns",
    "StepMoments",
    "TakenStatistics",
    "repeating",
    "when_whole",
]
