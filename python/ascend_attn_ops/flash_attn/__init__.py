"""flash-attn's names over the operators, with the signatures of the version that it states.

``from ascend_attn_ops.flash_attn import flash_attn_func`` takes the place of
``from flash_attn import flash_attn_func``, on the CPU and on an NPU; :func:`enable` does so for
programs that are not ours to change.
"""

from __future__ import annotations

import importlib
import sys

from ascend_attn_ops._core.patches import Patch
from ascend_attn_ops.flash_attn import flash_attn_interface
from ascend_attn_ops.flash_attn._varlen_attention import register_flash_attention_impl
from ascend_attn_ops.flash_attn.flash_attn_interface import *  # noqa: F403

__version__ = "2.8.3+ascend"

__all__ = ["disable", "enable", "register_flash_attention_impl"]
__all__ += flash_attn_interface.__all__

_MODULES = ("", ".flash_attn_interface", ".bert_padding", ".layers", ".layers.rotary")
_enabled: Patch | None = None


def enable() -> None:
    """Make ``import flash_attn`` give this module, where flash-attn cannot be imported.

    Then programs and packages written for flash-attn run unchanged. Where flash-attn can be
    imported, and when it is called again, it has no effect. :func:`disable` undoes it.

    Example:
        >>> import ascend_attn_ops.flash_attn
        >>> ascend_attn_ops.flash_attn.enable()
        >>> from flash_attn.bert_padding import pad_input, unpad_input
        >>> import flash_attn
        >>> flash_attn.__version__
        '2.8.3+ascend'
    """
    global _enabled
    if _enabled is not None:
        return
    try:
        importlib.import_module("flash_attn")
    except (ImportError, OSError):
        with Patch() as patch:
            for name in _MODULES:
                module = importlib.import_module(f"{__name__}{name}")
                patch.set_item(sys.modules, f"flash_attn{name}", module)
        _enabled = patch


def disable() -> None:
    """Undo :func:`enable`. Modules that have imported its names keep them."""
    global _enabled
    if _enabled is not None:
        _enabled.undo()
        _enabled = None
