"""What torch can do from some version after 2.6 on, asked of torch itself, or else told by its version."""

from __future__ import annotations

import inspect
import sys

import pytest
import torch
from torch.distributed.checkpoint import state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import ScheduleGPipe

VERSION = tuple(map(int, torch.__version__.split(".")[:2]))
ADAM_DECOUPLES = "decoupled_weight_decay" in inspect.signature(torch.optim.Adam).parameters
RATES_OF_ONE_DIMENSION = hasattr(sys.modules[torch.optim.Optimizer.__module__], "_to_scalar")
FLATTENS_DICTS = "nested" in inspect.getsource(state_dict._flatten_optim_state_dict)  # a block's factors are one

needs_sharding_on_cpus = pytest.mark.skipif(
    not hasattr(torch.cpu.Stream, "record_event"), reason="FSDP2 of this torch asks CPUs for events of streams"
)
needs_ignored_parameters = pytest.mark.skipif(
    "ignored_params" not in inspect.signature(fully_shard).parameters,
    reason="FSDP2 of this torch shards all parameters",
)
needs_working_pipelines = pytest.mark.skipif(
    "scale_grads" not in inspect.signature(ScheduleGPipe).parameters,
    reason="the pipelines of this torch know no scale_grads, and their ranks wait for each other without end here",
)
needs_flat_dicts = pytest.mark.skipif(
    not FLATTENS_DICTS, reason="this torch does not flatten an optimizer's state that holds dicts"
)
needs_export_flag = pytest.mark.skipif(
    not hasattr(torch.compiler, "_is_exporting_flag"), reason="this torch does not say that it exports"
)
needs_shared_graphs = pytest.mark.skipif(
    VERSION < (2, 9), reason="this torch makes a graph for each object that is called (2.7 and 2.8 were not tried)"
)
needs_traced_function_modes = pytest.mark.skipif(
    VERSION < (2, 12), reason="this torch can't compile a hook that leaves a function mode on"
)
needs_saved_tensors_hooks = pytest.mark.skipif(
    not hasattr(torch._C._autograd, "_top_saved_tensors_default_hooks"),
    reason="this torch does not tell whether hooks take what autograd saves",
)
needs_graph_tag = pytest.mark.skipif(
    not hasattr(torch.Tag, "cudagraph_unsafe"),
    reason="this torch has no such tag: it records no graph that has a tensor on the CPU, as the operators' tokens are",
)
needs_decay_in_states = pytest.mark.skipif(
    not ADAM_DECOUPLES,
    reason="this torch does not save whether weight decay is decoupled: nothing tells AdamW's states from Adam's",
)
needs_rates_of_one_dimension = pytest.mark.skipif(
    not RATES_OF_ONE_DIMENSION, reason="this torch's own optimizers take no rate [1]"
)
