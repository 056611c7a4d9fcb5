"""torch_npu's attention operators on the CPU, by torch_npu's own names; also those of
cann_ops_transformer and of vLLM-Ascend.

It loads when it is used, and replaces nothing before `enable` is called.
"""

from __future__ import annotations

import importlib
import importlib.util
from types import ModuleType
from typing import NamedTuple

import torch

from ascend_attn_ops._core.arguments import first_line
from ascend_attn_ops._core.patches import Patch
from ascend_attn_ops.torch_npu import stand_in as stand_ins
from ascend_attn_ops.torch_npu.schemas import RELEASE, RELEASE_OF_CANN, SCHEMAS
from ascend_attn_ops.torch_npu.table import TABLE
from ascend_attn_ops.torch_npu.translation import Translation, register

__all__ = ["disable", "enable"]

_enabled: Patch | None = None


def enable(*, stand_in: bool = False) -> None:
    """Make ``torch_npu.npu_*`` and ``torch.ops.npu.*`` take tensors that are not on an NPU.

    The operators that this library computes get kernels for the CPU and for fake tensors, with
    gradients where torch_npu has them, and so do DeepSeek's operators in
    ``cann_ops_transformer.ops`` and in vLLM-Ascend's ``torch.ops._C_ascend``. An argument that is
    not computed here is an error that names it. :func:`disable` undoes it.

    Args:
        stand_in: where torch_npu cannot be imported, define the schemas of these operators, and a
            module ``torch_npu`` that has nothing else; the same for ``cann_ops_transformer``, and
            the schemas alone where vLLM-Ascend is not installed. Where they are, no effect.

    Raises:
        ImportError: torch_npu cannot be imported, and no stand-in is wanted.

    Example:
        >>> import torch, ascend_attn_ops.torch_npu
        >>> ascend_attn_ops.torch_npu.enable(stand_in=True)
        >>> import torch_npu
        >>> x = torch.arange(6).view(1, 6, 1, 1).expand(1, 6, 4, 64).bfloat16()
        >>> out, *_ = torch_npu.npu_fusion_attention(0 * x, x, x, 4, "BSND", scale=0.125)
        >>> out[0, 0, 0, 0].item()  # the mean of the values
        2.5
    """
    global _enabled
    if _enabled is not None:
        return
    # Kernels live as long as the libraries that registered them: one for each namespace.
    libraries: dict[str, torch.library.Library] = {}
    with Patch() as patch:
        homes = _homes(stand_in, patch)
        for translation in TABLE:
            namespace = translation.name.partition("::")[0]
            if namespace not in libraries:
                libraries[namespace] = torch.library.Library(namespace, "FRAGMENT")
                patch.on_undo(libraries[namespace]._destroy)
            _add(homes[namespace], libraries[namespace], translation, patch)
    _enabled = patch


def disable() -> None:
    """Undo :func:`enable`: remove the kernels and the modules that it made.

    Operators of the stand-in that were kept in variables must not be called any more. Calling it
    again has no effect.
    """
    global _enabled
    if _enabled is not None:
        _enabled.undo()
        _enabled = None


class _Home(NamedTuple):
    """Where the operators of a namespace are: their module, and whether we define what it lacks."""

    module: ModuleType | None
    ours: bool


def _homes(stand_in: bool, patch: Patch) -> dict[str, _Home]:
    torch_npu = _torch_npu(stand_in, patch)
    cann_ops = "cann_ops_transformer.ops"
    homes = {
        "npu": _Home(torch_npu, isinstance(torch_npu, stand_ins.StandIn)),
        "atb": _Home(torch_npu, True),
        "_C_ascend": _Home(None, stand_in and importlib.util.find_spec("vllm_ascend") is None),
    }
    try:
        homes["cann_ops_transformer"] = _Home(importlib.import_module(cann_ops), False)
    except (ImportError, OSError, RuntimeError):
        module = stand_ins.install(cann_ops, RELEASE_OF_CANN, patch) if stand_in else None
        homes["cann_ops_transformer"] = _Home(module, stand_in)
    return homes


def _torch_npu(stand_in: bool, patch: Patch) -> ModuleType:
    try:
        return importlib.import_module("torch_npu")
    except (ImportError, OSError, RuntimeError) as error:
        if stand_in:
            return stand_ins.install("torch_npu", RELEASE, patch)
        release = ".".join(torch.__version__.split(".")[:2])
        raise ImportError(
            f"ascend_attn_ops.torch_npu: torch_npu cannot be imported ({first_line(error)}): "
            f"install CANN and the torch_npu of torch {release} (pip install --no-deps "
            f"'torch_npu=={release}.*'), or call enable(stand_in=True), which defines its "
            "attention operators without it"
        ) from error


def _add(
    home: _Home, library: torch.library.Library, translation: Translation, patch: Patch
) -> None:
    namespace, _, operator = translation.name.partition("::")
    packet, _, overload = operator.partition(".")
    operators = getattr(torch.ops, namespace)
    if not hasattr(getattr(operators, packet, None), overload or "default"):
        if not home.ours:
            return  # the installed release does not have it
        library.define(operator + SCHEMAS[translation.name])
        if home.module is not None and not overload:
            of_module = getattr(home.module, operator, None)
            patch.set_attribute(home.module, operator, getattr(operators, operator))
            if of_module is not None:
                # This kernel raises the error that says why torch.ops.atb cannot be loaded.
                library.impl(operator, of_module, "PrivateUse1")
    schema = getattr(getattr(operators, packet), overload or "default")._schema
    register(library, translation, schema)
