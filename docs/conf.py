"""Sphinx's settings: README.rst and the docstrings as HTML. The command is in README.rst, "Contributing"."""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))  # the sources beside this file, whatever is installed

import kfac_optim

project, author, copyright = "kfac_optim", "The kfac_optim authors", "The kfac_optim authors"
version = release = kfac_optim.__version__
extensions = ["sphinx.ext.autodoc", "sphinx.ext.napoleon"]
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
nitpicky = True  # a reference to a name that is not documented is an error, but for names of others
nitpick_ignore_regex = [("py:.*", r"(torch|nn|dist|collections)\..*|Tensor|AbstractContextManager|.*\._\w+")]


def skip_public(app, what, name, obj, skip, options):
    """What can be imported from ``kfac_optim`` is documented there, and not a second time with its module."""
    return True if app.env.docname == "modules" and name in kfac_optim.__all__ else None


def setup(app):
    app.connect("autodoc-skip-member", skip_public)
