"""`python -m ascend_attn_check`: whether a device does what ascend_attn_ops expects of it.

`samples` has calls of every operator; the tests run them too. Each section of the check is a module
with a function `probes`, and every probe runs in a child process (`child.py`), which `runner.py`
restarts when a probe has ended or stopped it.
"""
