"""Training jobs and measurements on real and generated data; no part of the installed package.

``python -m benchmarks.train TASK --optimizer NAME`` trains one of three tasks with any optimizer, ``python -m
benchmarks.first_look`` produces the first table of results, ``python -m benchmarks.convergence`` the one with every
optimizer tuned alike. All run from the root of the repository.

    models -> tasks ----+
                        +--> runs -> train, first_look, convergence
    settings -> optimizers         \\-> plots, summary
     muon, peers --^
"""
