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
    "sphinx.ext.doctest",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinx_design",
    "docstrings",
    "hardware_reports",
    "mathml",
    "operator_pages",
    "public_names",
    "python_blocks",
    "translations",
]

# The specification of an operator stands on the operator's page: _ext/operator_pages.py.
exclude_patterns = ["specification/*_*.md"]

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

myst_enable_extensions = ["colon_fence", "deflist", "dollarmath"]
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
        r"When|(.*\.)?(Comparison|Replayed|Mask)",  # described where they are returned
    )
]

# Examples may take these names for granted. They run under the default device limits, and may print
# text for a reader that the page does not repeat.
doctest_global_setup = """
print = lambda *_: None
import torch
import ascend_attn_ops  # noqa: E402
import ascend_attn_ops as ops
from ascend_attn_ops import *
torch.manual_seed(0)
if not torch.distributed.is_initialized():  # one rank, for the examples of ops.distributed
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
"""

# Internal links only: nothing is fetched.
linkcheck_ignore = [r"https?://.*"]

copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True
