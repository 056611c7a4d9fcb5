"""Limits of devices, comparison and records of calls, and a report of what is installed."""

from ascend_attn_ops._core.device_limits import limits, set_limits
from ascend_attn_ops._core.device_limits import table as limits_table
from ascend_attn_ops._core.value_checks import check_values
from ascend_attn_ops.debug.comparison import compare
from ascend_attn_ops.debug.recording import record, replay

__all__ = ["check_values", "compare", "limits", "limits_table", "record", "replay", "set_limits"]
