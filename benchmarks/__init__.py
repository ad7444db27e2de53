"""Training jobs and measurements on real and generated data; no part of the installed package.

``python -m benchmarks.train TASK --optimizer NAME`` trains one of three tasks with any optimizer, ``python -m
benchmarks.first_look`` produces the first table of results, ``python -m benchmarks.paper`` the paper's tables and
figures at the scale of one machine, ``python -m benchmarks.scaling`` those about many machines. All run from the root
of the repository.

    models -> tasks, paper_tasks, data -+
                                        +--> runs -> train, first_look; study -> paper_parts -> paper
    settings -> optimizers -------------+        \\-> plots
"""
