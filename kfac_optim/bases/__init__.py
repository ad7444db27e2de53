"""The base class's own step: its parameters and their states, its first moment, its update, its weight decay.

Where to look::

    base_step.py        takes the step apart
    parameters.py       the parameters of a step, and what the base class does with their gradients
    first_moments.py    first moments of gradients, without weight decay
    state_keys.py       K-FAC's entries in the state of a parameter: who writes them, who reads them
    lamb.py             LAMB by multi-tensor operations
"""
