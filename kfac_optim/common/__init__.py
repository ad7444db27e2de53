"""What modules of several packages use, and what has nothing to do with curvature.

Where to look::

    checks.py           values of options and arguments
    counters.py         numbers that are saved: where they start, how large they may be
    rates.py            learning rates, as the groups of an optimizer give them
    machines.py         which devices are CPUs and which accelerators; refuses CUDA graph capture
    flat_storage.py     tensors side by side in one storage, which saves kernel launches
    grouping.py         what is decomposed, copied or sent at once; jobs evenly over workers
    precision.py        computation without autocast and TF32; directions as the user chose
    tensor_cache.py     caches of tensors that are kept between steps
    user_warning.py     warnings that point to the user's own line
    stopwatch.py        how long the stages of a step take (Fig. 7 of the paper)
"""
