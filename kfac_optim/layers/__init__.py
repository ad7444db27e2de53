"""Kronecker structure of each module type.

One canonical shape serves every layer: a call computes::

    s[n, r] = W a[n, r],     n examples, r shared positions (pixels, tokens; 1 for a plain Linear)

The bias is the last column of ``W``, with a 1 appended to ``a``; the output gradient is ``g[n, r] = dL/ds[n, r]``. A
layer turns what a module saw into *rows* of that form, ``[n, r, p, d]``, and gradients into matrices
``[p, d_out, d_in]`` and back. ``p`` is the number of Kronecker pairs: 1, the groups of a grouped convolution, 3 for the
packed q/k/v of attention, the channels of a norm layer. The raw second moments follow from the rows in the same way for
every type (Eschenhagen et al. 2023)::

    expand:  sum_{n,r} a a^T  (count n r)                     sum_{n,r} g g^T
    reduce:  a~ = mean_r a, g~ = sum_r g;  sum_n a~ a~^T  (count n)    sum_n g~ g~^T

For convolutions expand is KFC (Grosse & Martens 2016). Norm layers have no such product structure: their block is the
Fisher of scale and shift per channel, which is the pair (1, F_c) with ``W = [scale, shift]^T`` and ``a = 1``.

``register_layer`` adds a module type. A module that cannot be treated exactly is declined with a reason
(:class:`~kfac_optim.Declined`), and the base class's own rule trains it.

Where to look::

    base.py          the base classes: weight, bias, pairs; from rows to moments, from tensors to matrices and back
    options.py       the options that concern layers; how much of a factor is kept (blocks, the diagonal)
    moments.py       second moments of rows
    registry.py      which module types have layers; register_layer
    search.py        from the modules of a model to its layers
    linear.py        Linear, transformers' Conv1D, Embedding
    convolution.py   Conv, ConvTranspose
    windows.py       how a kernel slides over an image; the second moment of unfolded patches
    shifts.py        the same moment from products of shifted images, if that is faster
    weight_norm.py   Linear and convolutions with weight norm
    norm.py          LayerNorm, RMSNorm, GroupNorm, BatchNorm, SyncBatchNorm
    recurrent.py     LSTM, GRU, RNN and their cells
    recurrence.py    the gradients of these, back through time
    lookalikes.py    modules that have their own forward but compute the same as one of the above
    stand_ins.py     copies of modules, for trying what their forward does
    hosted.py        layers whose weight is given to F.linear or F.conv2d inside the call of a module
    attention.py     the projections of MultiheadAttention
    own_forward.py   Linear and convolutions with a forward of their own around F.linear or F.conv2d
"""

from . import attention, convolution, linear, norm, recurrent  # noqa: F401  (each registers its layers)
from .attention import AttentionInputLayer, AttentionLayer, ProjectionCall
from .base import COMPUTED, Declined, KroneckerLayer, Observation, RowsLayer
from .hosted import Application, HostedLayer, application_of
from .linear import LinearLayer
from .moments import spread_examples
from .options import LayerOptions, Sharing
from .own_forward import OwnForwardConvLayer, OwnForwardLinearLayer
from .recurrent import RecurrentCall, RecurrentLayer, tensors_of, with_tensors
from .registry import register_layer
from .search import FoundLayers, skip_reason

__all__ = [
    "COMPUTED",
    "Application",
    "AttentionInputLayer",
    "AttentionLayer",
    "Declined",
    "FoundLayers",
    "HostedLayer",
    "KroneckerLayer",
    "LayerOptions",
    "LinearLayer",
    "Observation",
    "OwnForwardConvLayer",
    "OwnForwardLinearLayer",
    "ProjectionCall",
    "RecurrentCall",
    "RecurrentLayer",
    "RowsLayer",
    "Sharing",
    "application_of",
    "register_layer",
    "skip_reason",
    "spread_examples",
    "tensors_of",
    "with_tensors",
]
