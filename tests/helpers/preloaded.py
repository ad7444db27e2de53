"""What ranks need, imported once in the server process of ``ranks.py`` that they are forked from.

torch imports ``torch._dynamo`` when the first optimizer is built: in every rank, that would outlast most tests.
"""

import gc

import hypothesis  # noqa: F401
import pytest  # noqa: F401
import torch._dynamo
import torch.distributed.checkpoint.state_dict
import torch.distributed.fsdp
import torch.distributed.optim
import torch.distributed.pipelining
import torch.distributed.tensor.parallel  # noqa: F401

import tests.helpers.settings
import tests.helpers.training  # noqa: F401

gc.freeze()  # a rank that collects garbage would look at all of it, and so get a copy of every page
