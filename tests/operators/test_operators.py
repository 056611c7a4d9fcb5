"""Every operator has all that an operator needs: what is missing has its name here.

The generic tests run over the records of ascend_attn_check.samples; these start from what is
registered.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from ascend_attn_ops import _C, ops, reference
from ascend_attn_ops._core.device_limits import table
from ascend_attn_ops.reference.bounds import BOUNDS
from support import registered
from support.checkout import ROOT
from support.samples import OPERATORS, RECIPES, WRONG_CALLS

REGISTERED = sorted(name for name in registered.OPERATORS if not name.startswith("_"))


def has_kernel(key: str) -> Callable[[str], bool]:
    """In every overload; `list`, for every key, calls the first one."""

    def has(name: str) -> bool:
        return all(
            torch._C._dispatch_has_kernel_for_dispatch_key(
                f"ascend::{name}.{overload}".removesuffix("."), key
            )
            for overload in registered.overloads()[name] - {"list"}
        )

    return has


def has_wrong_calls(name: str) -> bool:
    return any(row.operator.name == name for row in WRONG_CALLS)


def has_limits(name: str) -> bool:
    return any(row["operator"] == name for row in table())


def has_device_samples(name: str) -> bool:
    """Whether a sample passes the limits of the default device.

    Operators that work in place have tests of their own.
    """
    record = OPERATORS[name]
    return record.in_place or any(recipe.on_device for recipe in record.recipes)


def is_listed(name: str) -> bool:
    """A gradient operator stands in the row of its forward, if it has one."""
    listed = (ROOT / "docs/operators/index.md").read_text()
    return any(f"\n| [`{row}`](" in listed for row in (name, name.removesuffix("_grad")))


def is_differentiated_or_refuses(name: str) -> bool:
    """Gradient operators aside, whose own derivative no one has."""
    record = OPERATORS[name]
    return record.gradient is not None or record.inference_only or name.endswith("_grad")


NEEDS: dict[str, Callable[[str], bool]] = {
    "samples: a record in a module of ascend_attn_check.samples": OPERATORS.__contains__,
    "wrong calls: rows in a module of tests/support/samples": has_wrong_calls,
    "a sample within the device's limits": has_device_samples,
    "a gradient in its record, or inference_only": is_differentiated_or_refuses,
    "bounds: a line in ascend_attn_ops.reference.bounds": BOUNDS.__contains__,
    "a reference": lambda name: hasattr(reference, name),
    "a public function": ops.__all__.__contains__,
    "a row in docs/operators/index.md": is_listed,
    "a fast path from Python": _C.direct_calls.__contains__,
    "a row in the table of limits": has_limits,
    **{f"a kernel for {key}": has_kernel(key) for key in ("CPU", "Meta", "Autograd")},
}


@pytest.mark.parametrize("need", NEEDS)
def test_every_operator_has(need: str) -> None:
    missing = [name for name in REGISTERED if not NEEDS[need](name)]
    assert not missing, f"without {need}: {', '.join(missing)}"


def test_every_record_is_an_operator() -> None:
    assert sorted(OPERATORS) == REGISTERED


def test_inference_only_is_what_the_library_says() -> None:
    stated = {name for name, record in OPERATORS.items() if record.inference_only}
    assert stated == set(_C.inference_operators)


def test_limits_name_every_aclnn_function() -> None:
    for row in table():
        assert row["aclnn"], row["operator"]
        assert all(function.startswith("aclnn") for function in row["aclnn"]), row


def test_names_are_unique() -> None:
    """Samples have unique ids, so that a failing test says which one."""
    ids = [recipe.id for recipe in RECIPES]
    assert len(ids) == len(set(ids))
