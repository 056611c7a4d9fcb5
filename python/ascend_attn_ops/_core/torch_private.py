"""The private parts of torch that this package uses: no other module imports any.

Each is where torch 2.7.1 to 2.15 have it.
"""
# ruff: noqa: F401

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import torch

_MISSING = (
    "ascend_attn_ops works with torch 2.7.1 to 2.15: torch {version} lacks a private part that "
    "this package needs: {error}"
)

try:
    from torch import _assert_async as assert_async
    from torch._C import _AutoDispatchBelowAutograd as below_autograd
    from torch._C import _DisableAutocast as without_autocast
    from torch._C import _dispatch_has_kernel_for_dispatch_key as has_kernel
    from torch._C._functorch import is_functorch_wrapped_tensor
    from torch._functorch.pyfunctorch import (
        FunctionalizeInterpreter,
        retrieve_current_functorch_interpreter,
    )
    from torch._subclasses.fake_tensor import FakeTensor, is_fake
    from torch._subclasses.functional_tensor import FunctorchFunctionalizeAPI
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._python_dispatch import _disable_current_modes as without_modes
    from torch.utils._pytree import TreeSpec, tree_flatten, tree_map_only, tree_unflatten
except ImportError as error:
    raise ImportError(_MISSING.format(version=torch.__version__, error=error)) from error

if TYPE_CHECKING:
    from torch.distributed._functional_collectives import _are_we_tracing as is_tracing
    from torch.distributed.tensor import _utils as tensor_utils
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
    from torch.distributed.tensor._redistribute import redistribute_local_tensor

# Only ascend_attn_ops.distributed needs these, which load torch.distributed.tensor.
_OF_DISTRIBUTED = {
    "DTensorSpec": "torch.distributed.tensor._dtensor_spec.DTensorSpec",
    "TensorMeta": "torch.distributed.tensor._dtensor_spec.TensorMeta",
    "is_tracing": "torch.distributed._functional_collectives._are_we_tracing",
    "redistribute_local_tensor": "torch.distributed.tensor._redistribute.redistribute_local_tensor",
    # Its ExplicitRedistributionContext is missing in some versions.
    "tensor_utils": "torch.distributed.tensor._utils",
}


def __getattr__(name: str) -> Any:
    if name not in _OF_DISTRIBUTED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, _, attribute = _OF_DISTRIBUTED[name].rpartition(".")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ImportError(_MISSING.format(version=torch.__version__, error=error)) from error
