r"""Training jobs and measurements on real and generated data; no part of the installed package.

``python -m benchmarks.train TASK --optimizer NAME`` trains one of three tasks with any optimizer. The others answer a
question each, and write a table, JSON and a plot: ``convergence`` (every optimizer, tuned alike), ``step_time`` (what a
step costs), ``gpu`` (on a GPU), ``paper`` (its tables and figures at the scale of one machine), ``scaling`` (on many
ranks). All run from the root of the repository.

    models -> tasks, paper_tasks, data -+
                                        +--> runs -> train, convergence; study -> paper_parts -> paper
    settings -> optimizers -------------+        \\-> plots, summary
     muon, peers --^        \\--> timing -> step_time, gpu
    models -> works -------------/
    models -> cluster -> scaling
"""
