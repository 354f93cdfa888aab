"""Build the documentation's site with Sphinx, from the Markdown that GitHub shows as well."""

import inspect
import json
import re
import sys
from importlib import metadata
from pathlib import Path

import numpy as np
from sphinx.util import logging

sys.path.append(str(Path(__file__).parent))
from notebooks import ADDRESSES, write_notebook

# What people look for: the page that the search finds first, and its heading.
SEARCHES = {
    "batch size": ("batch_size", "# Batch size and learning rate"),
    "learning rate": ("batch_size", "# Batch size and learning rate"),
    "loss is nan": ("troubleshooting", "## Loss is nan"),
    "second gpu not used": ("troubleshooting", "## The second GPU is not used"),
    "out of memory": ("out_of_memory", "# The batch does not fit: out of memory"),
    "train_step": ("own_steps", "## The contract of a `train_step`"),
    "horovod": ("coming_from", "## Horovod"),
    "xla": ("mixed_precision_and_xla", "## XLA"),
    "resume": ("your_script", "## Checkpoints, and how to resume on other devices"),
    "docker": ("install", "## Docker"),
}

READ = set()

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
    outside = re.escape("../" * (page.count("/") + 1))
    source[0] = re.sub(rf"\]\({outside}([^)]+)\)", rf"]({ADDRESSES['Homepage']}/blob/main/\1)", source[0])


def tutorials(app):
    """Returns the names of the tutorials' pages."""
    return sorted(page for page in app.env.found_docs if page.startswith("tutorials/") and page != "tutorials/index")


def link_to_notebook(app, page, source):
    """Puts a link to a tutorial's notebook below its title."""
    if page in tutorials(app):
        link = f'<p><a href="{Path(page).name}.ipynb" download>Download this page as a notebook</a></p>'
        source[0] = source[0].replace("\n", f"\n\n{link}\n", 1)


def write_notebooks(app, error):
    """Writes the tutorials' notebooks beside their pages of the site."""
    if error is None and app.builder.name == "html":
        for page in tutorials(app):
            write_notebook(Path(app.env.doc2path(page)), Path(app.outdir, f"{page}.ipynb"))


def lead_searches(app, page, source):
    """Puts an entry of the index below the headings that searches should find: the search shows these first."""
    for search, (found, heading) in SEARCHES.items():
        if found == page:
            entry = rf"\g<0>\n\n```{{index}} ! {search}\n```"
            source[0] = re.sub(rf"^{re.escape(heading)}$", entry, source[0], flags=re.MULTILINE)


def note_read_pages(app, env, pages):
    """Notes which pages Sphinx reads."""
    READ.update(pages)


def check_searches(app, error):
    """Warns of a search without an entry of the index on its page, or with words that the page's headings lack.

    The index of a site of which Sphinx has read some pages anew lacks entries of the others.
    """
    if error is not None or app.builder.name != "html" or app.env.found_docs != READ:
        return
    index = json.loads(Path(app.outdir, "searchindex.js").read_text(encoding="utf-8")[len("Search.setIndex(") : -1])
    language = app.builder.indexer.lang
    for search, (page, _) in SEARCHES.items():
        number = index["docnames"].index(page)
        is_led = any(found == number and is_main for found, _, is_main in index["indexentries"].get(search, []))
        words = [language.stem(word) for word in language.split(search) if word not in language.stopwords]
        # A number, or a list of numbers.
        lacking = [word for word in words if number not in np.atleast_1d(index["titleterms"].get(word, []))]
        if lacking or not is_led:
            logging.getLogger(__name__).warning("no heading of %s.md is found by a search for '%s'", page, search)


def show_own_arguments(app, kind, name, value, options, signature, returned):
    """Shows the arguments of `__init__`: `__new__`, which Sphinx takes, has those of Keras's classes."""
    if kind != "class":
        return None
    _, *parameters = inspect.signature(value.__init__).parameters.values()
    return str(inspect.Signature([parameter.replace(annotation=parameter.empty) for parameter in parameters])), None


def setup(app):
    """Registers what this file adds to Sphinx."""
    app.connect("source-read", link_to_repository)
    app.connect("source-read", link_to_notebook)
    app.connect("source-read", lead_searches)
    app.connect("env-before-read-docs", note_read_pages)
    app.connect("build-finished", write_notebooks)
    app.connect("build-finished", check_searches)
    app.connect("autodoc-process-signature", show_own_arguments)
