"""Training jobs and measurements on real and generated data; no part of the installed package.

``python -m benchmarks.train TASK --optimizer NAME`` trains one of three tasks with any optimizer. Each other package
answers a question by a command of its own (from the root of the repository), and writes tables, pictures and JSON to
its folder of ``benchmarks/results/``:

    convergence         steps and seconds to a target, every optimizer tuned alike; ``.width``: the best rate by width
    swap                small scripts with one line changed: where K-FAC is behind the base optimizer, and its time
    step_time           what a step costs, and what it holds in memory
    launches            kernels that a step on a GPU launches, and waits for it, counted without one
    gpu                 the same for large models on a GPU, time to a target, and decompositions by size
    paper               the paper's tables and figures at the scale of one machine
    scaling             stages and bytes on real ranks, and the model that predicts them

``common`` is what they share (``runs`` trains, ``reports`` writes), ``peers`` the optimizers of other projects.
"""
