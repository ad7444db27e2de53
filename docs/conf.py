"""Sphinx's settings. The command that builds the pages is in contributing.rst."""

import pathlib
import re
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))  # the sources beside this file, whatever is installed

import kfac_optim

project, author, copyright = "kfac_optim", "The kfac_optim authors", "The kfac_optim authors"
version = release = kfac_optim.__version__
extensions = ["sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme_options = {"page_width": "1240px", "body_max_width": "none", "fixed_sidebar": True}
autodoc_default_options = {"members": True, "member-order": "bysource"}
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
nitpicky = True  # a reference to a name that is not documented is an error, but for names of others
nitpick_ignore_regex = [
    ("py:.*", r"(torch|nn|dist|collections|dataclasses|inspect|threading)\..*"),
    ("py:.*", r"Tensor|Source|Record|Sides|AbstractContextManager|.*\._\w+"),
]


def skip_public(app, what, name, obj, skip, options):
    """What can be imported from ``kfac_optim`` is documented there, and not a second time with its module."""
    return True if app.env.docname == "modules" and name in kfac_optim.__all__ else None


def title_module(app, what, name, obj, options, lines):
    """A module inside a package gets its name as a title, so that it takes a single line of modules.rst."""
    if what == "module" and name.count(".") == 2:
        lines[:0] = [f".. rubric:: {name.removeprefix('kfac_optim.')}", ""]


def link_pages(app, path, parent, content):
    """README.rst is the front page: there its links to docs/NAME.rst lead to NAME.html."""
    content[0] = re.sub(r"<docs/([\w/]+)\.rst>`__", r"<\1.html>`__", content[0])


def setup(app):
    app.connect("autodoc-skip-member", skip_public)
    app.connect("autodoc-process-docstring", title_module)
    app.connect("include-read", link_pages)
