"""A public name without documentation on some page is a warning, and so an error of `make docs`."""

from __future__ import annotations

import ascend_attn_ops
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.util import logging
from sphinx.util.typing import ExtensionMetadata

_logger = logging.getLogger(__name__)


def _check(app: Sphinx, env: BuildEnvironment) -> None:
    documented = env.domains.python_domain.objects
    for name in getattr(ascend_attn_ops, "__all__"):  # noqa: B009  # mypy knows no `__getattr__` there
        if f"ascend_attn_ops.{name}" not in documented:
            _logger.warning("ascend_attn_ops.%s is on no page: docs/python.md wants it", name)


def setup(app: Sphinx) -> ExtensionMetadata:
    app.connect("env-check-consistency", _check)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
