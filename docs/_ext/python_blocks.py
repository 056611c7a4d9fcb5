"""Every ```python block of a page is an example, and `sphinx-build -b doctest` runs it.

The blocks of a page share their names, in the order of the page. Code that cannot run here (calls
of other libraries, outlines) is a ```py block: it looks the same and is not run.
"""

from __future__ import annotations

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.transforms import SphinxTransform
from sphinx.util.typing import ExtensionMetadata


class RunPythonBlocks(SphinxTransform):
    default_priority = 500

    def apply(self, **kwargs: object) -> None:
        # The blocks of a Chinese page are those of its English one, which run there.
        chinese = self.env.docname.startswith("zh/")
        for block in self.document.findall(nodes.literal_block):
            if chinese:
                block.attributes.pop("testnodetype", None)
            elif block.get("language") == "python":
                # sphinx.ext.doctest looks for these; docstrings' examples have the same group.
                block["testnodetype"] = "testcode"
                block["groups"] = ["default"]
                block["options"] = {}


def setup(app: Sphinx) -> ExtensionMetadata:
    app.add_transform(RunPythonBlocks)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
