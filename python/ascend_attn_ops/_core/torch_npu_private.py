"""The private parts of torch_npu that this package uses: no other module imports any."""

from __future__ import annotations

from typing import Any


def graph_handlers() -> dict[str, Any]:
    """Return the handlers by which `NPUGraph.update` changes calls; torch_npu 2.13 has them."""
    try:
        from torch_npu.npu._npugraph_handlers import npugraph_handler  # type: ignore[import-not-found]
    except ImportError:
        return {}
    handlers: dict[str, Any] = getattr(npugraph_handler, "_NPU_GRAPH_OP_HANDLERS", {})
    return handlers
