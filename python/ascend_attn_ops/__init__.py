"""Attention and KV-cache operators for PyTorch on Ascend NPUs, and the same operators on the CPU.

Importing this package registers ``torch.ops.ascend.*``. The functions below are the same operators
with documentation; they run on the CPU, on an NPU (with torch_npu and CANN) and on fake tensors.
"""

import importlib
import pkgutil
from typing import TYPE_CHECKING, Any

# Imports torch, and says why `_C` cannot be loaded here, which all others need.
from ascend_attn_ops import _built_with  # noqa: F401

# isort: split
from ascend_attn_ops import _fake, _flops, _library, _transforms  # noqa: F401

__version__ = "0.1.0"

_library.load()

if TYPE_CHECKING:
    from ascend_attn_ops._public import *  # noqa: F403
    from ascend_attn_ops._public import __all__ as __all__
else:

    def __getattr__(name: str) -> Any:
        """Import a public name, or a module of the package, when it is used."""
        if name in {module.name for module in pkgutil.iter_modules(__path__)} - {"_npu"}:  # noqa: F405
            return importlib.import_module(f"{__name__}.{name}")
        from ascend_attn_ops import _public

        if name not in ("__all__", *_public.__all__):
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return globals().setdefault(name, getattr(_public, name))

    def __dir__() -> list[str]:
        from ascend_attn_ops import _public

        return sorted({*globals(), *_public.__all__})
