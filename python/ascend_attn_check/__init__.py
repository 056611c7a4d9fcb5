"""`python -m ascend_attn_check`: whether a device does what this library expects of it.

`samples` and `bounds` say what is right; the tests use them too. Each section of the check is a
module with a function `probes`, and every probe runs in a child process (`child.py`), which
`runner.py` restarts when a probe has ended or stopped it.
"""
