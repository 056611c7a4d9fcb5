"""Imports torch without torch_npu, which torch would load where it is installed.

That fails where there is no CANN. `_library` loads torch_npu later and says why it cannot, and
`simulate` loads it on a CANN that it brings along.
"""

import os
import sys

_VARIABLE = "TORCH_DEVICE_BACKEND_AUTOLOAD"

if "torch" not in sys.modules:
    _before = os.environ.get(_VARIABLE)
    os.environ[_VARIABLE] = "0"
    try:
        import torch  # noqa: F401
    finally:
        del os.environ[_VARIABLE]
        if _before is not None:
            os.environ[_VARIABLE] = _before
