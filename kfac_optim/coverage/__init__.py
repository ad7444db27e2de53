"""The trained parameters, and the blocks that cover them.

Where to look::

    trained_model.py    parameters and their blocks; why some have none; follows those that are replaced
    whereabouts.py      where layers and their parameters are, and whether they are still there
"""

from .trained_model import TrainedModel

__all__ = ["TrainedModel"]
