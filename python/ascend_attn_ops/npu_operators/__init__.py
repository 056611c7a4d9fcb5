"""torch_npu's attention operators on the CPU, by torch_npu's own names.

It loads when it is used, and replaces nothing before `enable` is called.
"""

from __future__ import annotations

import importlib
from types import ModuleType

import torch

from ascend_attn_ops._patches import Patch
from ascend_attn_ops.npu_operators import stand_in as stand_ins
from ascend_attn_ops.npu_operators.schemas import SCHEMAS
from ascend_attn_ops.npu_operators.table import TABLE
from ascend_attn_ops.npu_operators.translation import Translation, register

__all__ = ["disable", "enable"]

_enabled: Patch | None = None


def enable(*, stand_in: bool = False) -> None:
    """Make ``torch_npu.npu_*`` and ``torch.ops.npu.*`` take tensors that are not on an NPU.

    The operators that this library computes get kernels for the CPU, for the device "meta" and so
    for fake tensors, with gradients where torch_npu has them. Their kernels for the NPU stay as
    they are. An argument that is not computed here is an error that names it.

    Calling it again has no effect; :func:`disable` undoes it.

    Args:
        stand_in: where torch_npu cannot be imported, define the schemas of these operators, and a
            module ``torch_npu`` that has nothing else. Where it can, no effect.

    Raises:
        ImportError: torch_npu cannot be imported, and no stand-in is wanted.

    Example:
        >>> import torch, ascend_attn_ops.npu_operators
        >>> ascend_attn_ops.npu_operators.enable(stand_in=True)
        >>> import torch_npu
        >>> query, key, value = torch.randn(3, 1, 6, 4, 64, dtype=torch.bfloat16)
        >>> out, *_ = torch_npu.npu_fusion_attention(query, key, value, 4, "BSND", scale=0.125)
        >>> out.shape
        torch.Size([1, 6, 4, 64])
    """
    global _enabled
    if _enabled is not None:
        return
    # Kernels live as long as the libraries that registered them: one for each namespace.
    libraries: dict[str, torch.library.Library] = {}
    with Patch() as patch:
        torch_npu = _torch_npu(stand_in, patch)
        for translation in TABLE:
            namespace = translation.name.partition("::")[0]
            if namespace not in libraries:
                libraries[namespace] = torch.library.Library(namespace, "FRAGMENT")
                patch.on_undo(libraries[namespace]._destroy)
            _add(torch_npu, libraries[namespace], translation, patch)
    _enabled = patch


def disable() -> None:
    """Undo :func:`enable`: remove the kernels and, where it made one, the module ``torch_npu``.

    Operators of the stand-in that were kept in variables must not be called any more. Calling it
    again has no effect.
    """
    global _enabled
    if _enabled is not None:
        _enabled.undo()
        _enabled = None


def _torch_npu(stand_in: bool, patch: Patch) -> ModuleType:
    try:
        return importlib.import_module("torch_npu")
    except (ImportError, OSError, RuntimeError) as error:
        if stand_in:
            return stand_ins.install(patch)
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        release = ".".join(torch.__version__.split(".")[:2])
        raise ImportError(
            f"ascend_attn_ops.npu_operators: torch_npu cannot be imported ({reason}): install "
            f"CANN and the torch_npu of torch {release} (pip install --no-deps "
            f"'torch_npu=={release}.*'), or call enable(stand_in=True), which defines its "
            "attention operators without it"
        ) from error


def _add(
    torch_npu: ModuleType, library: torch.library.Library, translation: Translation, patch: Patch
) -> None:
    namespace, _, operator = translation.name.partition("::")
    operators = getattr(torch.ops, namespace)
    if not hasattr(operators, operator):
        if namespace == "npu" and not isinstance(torch_npu, stand_ins.StandIn):
            return  # this release of torch_npu does not have it
        library.define(operator + SCHEMAS[translation.name])
        of_torch_npu = getattr(torch_npu, operator, None)
        patch.set_attribute(torch_npu, operator, getattr(operators, operator))
        if of_torch_npu is not None:
            # This kernel raises the error that says why torch.ops.atb cannot be loaded.
            library.impl(operator, of_torch_npu, "PrivateUse1")
    register(library, translation, getattr(operators, operator).default._schema)
