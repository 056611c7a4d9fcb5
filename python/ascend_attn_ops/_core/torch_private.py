"""The private parts of torch that this package uses: no other module imports any.

Each is where torch 2.7.1 to 2.15 have it.
"""
# ruff: noqa: F401

from __future__ import annotations

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
    from torch.utils._pytree import TreeSpec, tree_flatten, tree_map_only, tree_unflatten
except ImportError as error:
    raise ImportError(_MISSING.format(version=torch.__version__, error=error)) from error
