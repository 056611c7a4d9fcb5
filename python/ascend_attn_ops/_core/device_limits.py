"""Device limits: which device calls are checked for, and how to change it."""

from __future__ import annotations

import os
from contextlib import ContextDecorator
from typing import Any, Literal, NamedTuple

from torch.compiler import is_compiling

from ascend_attn_ops import _C
from ascend_attn_ops._core.arguments import shown, wrong

Cann = Literal["8.5", "9.0", "9.1"]

VARIABLE = "ASCEND_ATTN_OPS_LIMITS"


class Device(NamedTuple):
    """A product and the version of its CANN, on which limits depend."""

    product: str
    cann: str

    def __str__(self) -> str:
        return f"Ascend {self.product} with CANN {self.cann}"


class limits(ContextDecorator):
    """Check calls in this block against the limits of another device, or of none.

    The block is that of its thread, whose asyncio tasks share it; the last one that is still open
    applies. `set_limits` changes the default instead, without a block.

    The CPU rejects the sizes and dtypes that the NPU would reject. By default calls are checked for
    the NPU in use and its CANN, and without an NPU for Atlas A2 with the newest CANN; the
    environment variable ``ASCEND_ATTN_OPS_LIMITS`` chooses another default for a process: ``A3``,
    ``A2:8.5``, ``none``.

    Args:
        product: ``"A2"``, ``"A3"``, ``"950"`` or ``"310P"``, or the name of one of its SoCs, such
            as ``"910B"`` or ``"Ascend910B2"``. None switches the limits off, for research shapes,
            float32, float64 and gradcheck; mismatched shapes, decreasing lengths and out-of-range
            indices remain errors.
        cann: ``"8.5"``, ``"9.0"`` or ``"9.1"``, the version of CANN. None is the newest, or the one
            that the product names, as in ``"A2:8.5"``.

    Raises:
        TypeError: a product or version is neither a string nor None.
        ValueError: for an unknown product or version.

    Example:
        >>> import torch, ascend_attn_ops
        >>> query = torch.randn(1, 3, 2, 16)
        >>> key = torch.randn(1, 3, 1, 16)
        >>> weights = torch.rand(1, 3, 2)
        >>> with ascend_attn_ops.limits(None):
        ...     indices, _ = ascend_attn_ops.lightning_indexer(query, key, weights, sparse_count=2)
        >>> indices[0, 0, 0].tolist()
        [0, -1]

    The backward pass is checked against the same limits as its forward pass.
    """

    def __init__(self, product: str | None, cann: Cann | None = None) -> None:
        self._override = _C.limits_override_for(*_names("ascend::limits", product, cann))
        self._blocks: list[_C.LimitsBlock] = []

    def __enter__(self) -> None:
        self._blocks.append(_C.begin_limits_block(self._override))

    def __exit__(self, *error: object) -> None:
        # A generator's block may end on another thread than it began on.
        blocks = [x for x in self._blocks if x.is_of_this_thread()] or self._blocks
        block = blocks[-1]
        self._blocks.remove(block)
        block.end()


def set_limits(product: str | None, cann: Cann | None = None) -> None:
    """Check calls outside of :class:`limits` blocks against the limits of another device.

    Arguments and errors are those of :class:`limits`; all threads follow. The environment variable
    ``ASCEND_ATTN_OPS_LIMITS`` sets this default when the package is imported.

    Example:
        >>> import torch, ascend_attn_ops
        >>> x = torch.zeros(1, 3, 2, 16)
        >>> ascend_attn_ops.set_limits(None)
        >>> *_, softmax_sum = ascend_attn_ops.flash_attention_score(x, x, x, layout="BSND")
        >>> softmax_sum[0, 0, 0, 0].item()
        3.0
        >>> ascend_attn_ops.set_limits("A2")
    """
    _C.set_default_limits(*_names("ascend::set_limits", product, cann))


def _names(operator: str, product: str | None, cann: str | None) -> tuple[str | None, str | None]:
    """Return the product and the version, which may stand in one text."""
    for name, x in (("product", product), ("cann", cann)):
        if x is not None and not isinstance(x, str):
            raise wrong(TypeError, operator, name, "a string or None", shown(x))
        if x is not None and any("\ud800" <= character <= "\udfff" for character in x):
            # No text to C++.
            raise wrong(ValueError, operator, name, "a known name", shown(x))
    return (product, cann) if product is None or cann else _split(product)


def _split(text: str) -> tuple[str, str | None]:
    product, _, cann = text.partition(":")
    return product, cann or None


def limits_in_force() -> int | None:
    """Return the limits of this call, for LimitsOfCall; None in compiled code.

    Compiled code checks limits when it is traced.
    """
    return None if is_compiling() else _C.limits_override()


class LimitsOfCall:
    """Check calls in this block, on this thread, as an earlier call was: for its derivatives.

    Args:
        override: limits_in_force() of then.
    """

    def __init__(self, override: int | None) -> None:
        self.override = override

    def __enter__(self) -> None:
        if self.override is not None:
            self.block = _C.begin_limits_block(self.override)

    def __exit__(self, *error: object) -> None:
        if self.override is not None:
            self.block.end()


def parse(text: str) -> Device | None:
    """Return the device of a text such as ``"A3:9.0"`` or ``"A3"``; None of ``"none"``.

    Raises:
        ValueError: for an unknown product or version.
    """
    if text.lower() == "none":
        return None
    return Device(*_C.device_named(*_split(text)))


def device_in_force() -> Device | None:
    """Return the device whose limits apply here; None while limits are off."""
    device = _C.device_in_force()
    return None if device is None else Device(*device)


def table() -> list[dict[str, Any]]:
    """Return the limits of every operator.

    Returns:
        One row per operator with the keys ``operator``, ``aclnn`` (the CANN functions it calls) and
        ``devices``. The latter has an entry for each (product, version of CANN) that has the
        operator: its ``dtypes``, its ``limits``, a list of (quantity, meaning, allowed values), and
        its ``rules``, a list of (argument, what is expected).
    """
    return _C.limits_table()


def apply_environment() -> None:
    """Set the default of this process to what the environment variable says."""
    text = os.environ.get(VARIABLE)
    if not text:
        return
    try:
        device = parse(text)
    except ValueError as error:
        raise ValueError(f"{VARIABLE}={text}: {error}") from None
    _C.set_default_limits(*(device or (None, None)))
