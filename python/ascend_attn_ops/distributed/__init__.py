"""The operators on more than one device."""

from ascend_attn_ops.distributed.dtensor import enable_dtensor

__all__ = ["enable_dtensor"]
