"""Device limits: which product calls are checked for, and how to change it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

from ascend_attn_ops import _C

Product = Literal["A2", "A3", "950", "310P"]


@contextmanager
def limits(product: Product | None) -> Iterator[None]:
    """Check calls in this block, on this thread, against the limits of another product, or of none.

    The CPU rejects the sizes and dtypes that the NPU would reject, so that CI without a device
    predicts the device. The default product is that of the NPU in use, or Atlas A2 without one.

    Args:
        product: ``"A2"``, ``"A3"``, ``"950"`` or ``"310P"``. None switches the limits off, for
            research shapes, float32, float64 and gradcheck; mismatched shapes, decreasing lengths
            and out-of-range indices remain errors.

    Raises:
        ValueError: for an unknown product.

    Example:
        >>> import torch, ascend_attn_ops
        >>> query = torch.randn(1, 3, 2, 16)
        >>> key = torch.randn(1, 3, 1, 16)
        >>> weights = torch.rand(1, 3, 2)
        >>> with ascend_attn_ops.limits(None):
        ...     indices, _ = ascend_attn_ops.lightning_indexer(query, key, weights, sparse_count=2)
        >>> indices.shape
        torch.Size([1, 3, 1, 2])

    The backward pass is checked against the same limits as its forward pass.
    """
    saved = _C.limits_override()
    _C.set_limits(product)
    try:
        yield
    finally:
        _C.restore_limits(saved)


def product_in_force() -> str | None:
    """Return the product whose limits apply on this thread; None while limits are off."""
    return _C.product_in_force()


def table() -> list[dict[str, Any]]:
    """Return the limits of every operator.

    Returns:
        One row per operator with the keys ``operator``, ``aclnn`` (the CANN functions it calls) and
        ``variants``. Each variant has the ``products`` that share it, their ``dtypes``, and their
        ``limits``: a list of (quantity, meaning, allowed values).
    """
    return _C.limits_table()
