"""Attention and KV-cache operators for PyTorch on Ascend NPUs, and the same operators on the CPU.

Importing this package registers ``torch.ops.ascend.*``. The functions below are the same operators
with documentation; they run on the CPU, on an NPU (with torch_npu and CANN) and on fake tensors.
"""

import importlib
from typing import TYPE_CHECKING, Any

# Imports torch, and says why `_C` cannot be loaded here, which all others need.
from ascend_attn_ops._core import built_with as _built_with  # noqa: F401

# isort: split
from ascend_attn_ops._core import fake as _fake  # noqa: F401
from ascend_attn_ops._core import flops as _flops  # noqa: F401
from ascend_attn_ops._core import library as _library
from ascend_attn_ops._core import transforms as _transforms  # noqa: F401

__version__ = "0.1.0"

_library.load()

if TYPE_CHECKING:
    from ascend_attn_ops.debug import *  # noqa: F403
    from ascend_attn_ops.nn import *  # noqa: F403
    from ascend_attn_ops.ops import *  # noqa: F403
else:
    # Their public names are names of this package as well.
    _WITH_NAMES = ("ops", "nn", "debug")
    _FOLDERS = (*_WITH_NAMES, "distributed", "flash_attn", "reference", "torch_npu", "transformers")
    # They need no name at the top: `ascend_attn_ops.ops` has the gradients.
    _NOT_LISTED = ("limits_table", "replay", "sparse_lightning_indexer_grad_kl_loss")

    def __getattr__(name: str) -> Any:
        """Import a public name, or a folder of the package, when it is used."""
        if name in _FOLDERS:
            return importlib.import_module(f"{__name__}.{name}")
        if name == "__all__":
            return _public_names()
        for folder in _WITH_NAMES:
            module = importlib.import_module(f"{__name__}.{folder}")
            if name in module.__all__:
                return globals().setdefault(name, getattr(module, name))
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__() -> list[str]:
        return sorted(["__version__", *_FOLDERS, *_public_names()])

    def _public_names() -> list[str]:
        modules = [importlib.import_module(f"{__name__}.{folder}") for folder in _WITH_NAMES]
        names = (name for module in modules for name in module.__all__)
        return sorted(x for x in names if not x.endswith("_grad") and x not in _NOT_LISTED)
