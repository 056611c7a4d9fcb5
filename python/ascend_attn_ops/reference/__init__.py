"""Each operator in plain torch: the executable specification.

Slow, written from docs/specification alone, independently of the kernels, and without checks of the
arguments other than the range of `sparse_indices`. The references compute in fp64 for fp64 inputs
and in fp32 otherwise. They take the arguments of torch.ops.ascend.<name>.
"""

import importlib
import pkgutil

from . import operators
from .declaration import REFERENCES

for module in pkgutil.iter_modules(operators.__path__, f"{operators.__name__}."):
    importlib.import_module(module.name)
globals().update(REFERENCES)
