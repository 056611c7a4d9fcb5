"""Sphinx configuration. `make docs` builds the site from this checkout alone, without a network."""

from __future__ import annotations

import sys
from pathlib import Path

DOCS = Path(__file__).parent
sys.path[:0] = map(str, [DOCS / "_ext", DOCS.parent / "python", DOCS.parent / "simulation"])

import ascend_attn_ops  # noqa: E402

project = "ascend_attn_ops"
author = "the ascend_attn_ops authors"
project_copyright = author
release = version = ascend_attn_ops.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "docstrings",
    "mathml",
    "pages_of_site",
    "translations",
]

html_theme = "furo"
html_title = f"ascend_attn_ops {release}"
templates_path = ["_templates"]
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_math_renderer = "mathml"
html_copy_source = False
# The theme's own, and the switch of languages.
html_sidebars = {
    "**": [
        "sidebar/brand.html",
        "sidebar/search.html",
        "sidebar/language.html",
        "sidebar/scroll-start.html",
        "sidebar/navigation.html",
        "sidebar/scroll-end.html",
    ]
}
html_theme_options = {"navigation_with_keys": True}

myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3
# A formula in a table cell or a sentence is written with dollars; a price is not to be expected.
myst_dmath_double_inline = True

autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_member_order = "bysource"
python_use_unqualified_type_names = True
# One parameter a line: the signatures have up to 24.
maximum_signature_line_length = 80
# Backticks in a docstring mark code.
default_role = "literal"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
# Several arguments may share an entry ("query, key: ..."), and what is returned is said in prose.
napoleon_use_param = False
napoleon_use_keyword = False
napoleon_custom_sections = ["Returns", "Errors"]

# Every reference must resolve, but for the names of other projects: their inventories would have to
# be fetched.
nitpicky = True
nitpick_ignore_regex = [
    (
        "py:.*",
        r"(ProcessGroup|torch|collections|pathlib|typing|nn)\..*|Tensor|Sequence|Any|Path|"
        r"When|(.*\.)?(Comparison|Replayed|Mask|Rows)",  # described where they are returned
    )
]

copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True
