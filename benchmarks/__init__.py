"""Training jobs and measurements on real and generated data; no part of the installed package.

``python -m benchmarks.train TASK --optimizer NAME`` trains one of three tasks with any optimizer, ``python -m
benchmarks.first_look`` produces the first table of results, ``python -m benchmarks.step_time`` says what a step costs
and ``python -m benchmarks.gpu`` what it costs on a GPU. All run from the root of the repository.

    models -> tasks ----+
                        +--> runs -> train, first_look
    settings -> optimizers         \\-> plots
                   \\--> timing -> step_time, gpu
    models -> works --/
"""
