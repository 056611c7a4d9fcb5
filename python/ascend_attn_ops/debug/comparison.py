"""Compare the operators with float64 on the CPU while a program runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ascend_attn_ops._core.arguments import check_count, check_number, refuse_traces, shown, wrong

if TYPE_CHECKING:
    from ascend_attn_ops.debug.comparing import Comparison

_NAME = "ascend_attn_ops.compare"


@contextmanager
def compare(every: int = 1, rtol: float | None = None) -> Iterator[Comparison]:
    """Compare each call of an operator in the block with the reference, in float64 on the CPU.

    The program goes on with the device's outputs. ``backward()`` in the block is compared as well,
    each gradient operator given what it was given. Top-k selections are compared as sets, up to
    scores that differ by less than their rounding.

    A compared call waits for the device, copies its arguments to the host, and computes there
    what may take a thousand times as long: use small sizes, or `every`. Calls of more than
    2 x 10^10 operations are counted and not compared. Nothing is done outside of the block.

    Args:
        every: compare every n-th call of each operator.
        rtol: None holds each element to the bounds of docs/specification/tolerances.md. A number
            allows that much of the largest element of an output.

    Returns:
        A context manager that yields a `Comparison`, with ``calls``, ``compared`` and ``skipped``
        (counts by operator) and ``differences`` (with ``operator``, ``number``, ``place`` and
        ``text``). Printed, it is a table.

    Raises:
        TypeError, ValueError: `every` is not a number above 0, `rtol` not one of at least 0.
        RuntimeError: the block is entered, or an operator called, in a graph's capture, or the
            block is traced by torch.compile.

    Example:
        >>> import torch, ascend_attn_ops
        >>> query = torch.randn(1, 6, 4, 64, dtype=torch.bfloat16)
        >>> key, value = torch.randn(2, 1, 9, 2, 64, dtype=torch.bfloat16)
        >>> with ascend_attn_ops.compare() as report:
        ...     out, *_ = ascend_attn_ops.flash_attention_score(
        ...         query, key, value, num_heads=4, layout="BSND", sparse_mode=3)
        >>> report.compared["flash_attention_score"], report.differences
        (1, [])
    """
    refuse_traces(_NAME)
    every = check_count(_NAME, "every", every, 1)
    if rtol is not None:
        check_number(_NAME, "rtol", rtol)
        rtol = float(rtol)
        if not rtol >= 0:
            raise wrong(ValueError, _NAME, "rtol", "None or a number of at least 0", shown(rtol))
    # Imported when used: the samples take as long as the package.
    from ascend_attn_ops.debug.comparing import Comparing, Comparison

    report = Comparison()
    with Comparing(_NAME, report, every, rtol):
        yield report
