"""The curvature engine, which calls the stages of the pipeline in order.

Its class is built in four files, each of which extends the class of the one before, and the first the options of
:mod:`kfac_optim.config`::

    build.py            how the stages are put together, and again when the model or the ranks change
    state.py            what is saved, loaded, copied and pickled
    views.py            what it reports about itself
    step.py             the step
"""

from .step import CurvatureEngine, memory_estimate

__all__ = ["CurvatureEngine", "memory_estimate"]
