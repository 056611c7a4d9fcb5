"""The checked mode: the values of tensors are checked before each call."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from ascend_attn_ops import _C

VARIABLE = "ASCEND_ATTN_OPS_CHECK"

_by_environment = False


@contextmanager
def check_values() -> Iterator[None]:
    """Check the values in tensors before each call, to find out what makes NaN on an NPU.

    The CPU checks in every call that indices, slots, blocks and sequence lengths are in range. An
    NPU does not; in this block the host reads these values before each launch and raises the CPU's
    errors. On both, the block also rejects what only the CPU could do: a -1 in a slot of
    ``sparse_indices`` that a gradient reads, an index behind a -1, and a slot that
    ``scatter_pa_kv_cache_`` writes twice.

    Each checked call waits for the device. The environment variable ``ASCEND_ATTN_OPS_CHECK=1``
    checks every call of a process. The block applies to all threads; call ``backward()`` inside it
    to check gradients. Calls in a graph (``torch.npu.NPUGraph``) cannot wait and are not checked.

    Returns:
        A context manager.

    Example:
        >>> import torch, ascend_attn_ops
        >>> keys = torch.randn(2, 1, 64, dtype=torch.bfloat16)
        >>> cache = torch.zeros(4, 16, 1, 64, dtype=torch.bfloat16)
        >>> slots = torch.tensor([5, 63])
        >>> with ascend_attn_ops.check_values():
        ...     ascend_attn_ops.scatter_pa_kv_cache_(keys, cache, slots, keys, cache.clone())
    """
    _C.request_value_checks(1)
    try:
        yield
    finally:
        _C.request_value_checks(-1)


def apply_environment() -> None:
    """Check the values of all calls if the environment variable says so."""
    global _by_environment
    text = os.environ.get(VARIABLE, "")
    if text not in ("", "0", "1"):
        raise ValueError(f"{VARIABLE}={text}: expected 0 or 1")
    wanted = text == "1"
    _C.request_value_checks(wanted - _by_environment)
    _by_environment = wanted
