"""Check what works on this machine: `python -m ascend_attn_ops check`."""
