"""Imports torch without torch_npu, which an installed torch_npu would otherwise join.

torch_npu cannot be imported before the simulated CANN is loaded.
"""

import os
import sys

AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"

if "torch" not in sys.modules and os.environ.get("CANN_SIM_SOC") is None:
    _before = os.environ.get(AUTOLOAD)
    os.environ[AUTOLOAD] = "0"
    try:
        import torch  # noqa: F401
    finally:
        del os.environ[AUTOLOAD]
        if _before is not None:
            os.environ[AUTOLOAD] = _before
