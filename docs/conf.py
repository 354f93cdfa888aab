"""Build the documentation's site with Sphinx, from the Markdown that GitHub shows as well."""

import inspect
import re
from importlib import metadata

ADDRESSES = dict(line.split(", ") for line in metadata.metadata("keras_dp").get_all("Project-URL"))

project = "keras_dp"
author = metadata.metadata("keras_dp")["Author"]
release = metadata.version("keras_dp")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
exclude_patterns = ["_build"]

myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 4

# Docstrings say in words which types arguments have. Their `names` are code, as in Markdown.
autodoc_typehints = "none"
autodoc_member_order = "bysource"
default_role = "literal"
nitpick_ignore_regex = [("py:.*", r"(?!keras_dp).*")]  # other projects are not linked

html_theme = "furo"
html_title = f"keras_dp {release}"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_use_index = html_copy_source = html_show_sourcelink = html_show_copyright = html_show_sphinx = False
html_theme_options = {"source_edit_link": f"{ADDRESSES['Homepage']}/blob/main/docs/{{filename}}"}
copybutton_exclude = ".linenos, .gp, .go"  # prompts and output


def link_to_repository(app, page, source):
    """Makes links from a page to files outside of docs/ lead to the repository."""
    source[0] = re.sub(r"\]\(\.\./([^)]+)\)", rf"]({ADDRESSES['Homepage']}/blob/main/\1)", source[0])


def show_own_arguments(app, kind, name, value, options, signature, returned):
    """Shows the arguments of `__init__`: `__new__`, which Sphinx takes, has those of Keras's classes."""
    if kind != "class":
        return None
    _, *parameters = inspect.signature(value.__init__).parameters.values()
    return str(inspect.Signature([parameter.replace(annotation=parameter.empty) for parameter in parameters])), None


def setup(app):
    """Registers what this file adds to Sphinx."""
    app.connect("source-read", link_to_repository)
    app.connect("autodoc-process-signature", show_own_arguments)
