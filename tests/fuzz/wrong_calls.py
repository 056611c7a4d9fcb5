"""Valid calls of the operators with one to three things changed.

A changed call is refused, in one line that names the operator and an argument, or it works, and
then as the reference does. Which of them a change should give is not known here; but torch.ops, the
public function and fake tensors must agree about it. No call changes what it was not given to
write to, or a later call.
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Mapping
from functools import cache
from typing import Any

import ascend_attn_ops as ops
import torch
from ascend_attn_ops._core.device_limits import device_in_force, limits
from support.samples import OPERATORS, Operator, Sample
from support.samples.wrong_call import Product
from torch import Tensor

from .case import Case, Finding
from .comparison import check_against_reference, check_gradients, check_on_meta, check_results
from .copies import Before, Once, as_lists, can_be_read, has_memory, tensors_in, twin
from .outcome import (
    Outcome,
    cannot_be_shown,
    check_dispatcher,
    check_error,
    is_out_of_memory,
    run,
    same_bits,
)
from .value_changes import ANYTHING, changed_value

Random = random.Random

_MOST_ELEMENTS = 12_000
_COMPRESSED = 2048 * 2048  # elements of a mask that may come as None
_FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_PRODUCTS: tuple[Product, ...] = ("A2", "A3", "950", "310P")
_OUT = ("key_cache", "value_cache")


@cache
def _sample(operator: Operator, index: int, dtype: torch.dtype) -> Sample | None:
    """None if it is large."""
    sample = operator.recipes[index].make(dtype)
    sizes = (x.numel() for x in sample.tensors.values())
    return sample if sum(n for n in sizes if n < _COMPRESSED) < _MOST_ELEMENTS else None


def draw(r: Random, operator: Operator) -> Sample:
    """A valid call, with tensors of its own."""
    sample = None
    while sample is None:
        index, dtype = r.randrange(len(operator.recipes)), r.choice(_FLOATS)
        sample = _sample(operator, index, dtype)
    return sample.replace(**twin(sample.arguments))


def _alias(r: Random, arguments: dict[str, Any]) -> None:
    """One argument lies where another does."""
    names = [n for n, x in arguments.items() if isinstance(x, Tensor) and has_memory(x)]
    if len(names) < 2:
        return
    one, other = r.sample(names, 2)
    x, y = arguments[one], arguments[other]
    shift = y.storage_offset() + r.choice((0, 0, 1))
    needed = shift + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True)) + 1
    fits = x.numel() and needed * x.itemsize <= y.untyped_storage().nbytes()
    if fits and not (x.is_inference() or y.is_inference()):
        view = torch.empty(0, dtype=x.dtype)
        view.set_(y.untyped_storage(), shift, x.shape, x.stride())
        arguments[one] = view
    elif y.numel() <= _COMPRESSED:  # a larger one could agree with itself, and be computed with
        arguments[one] = y


def change(
    r: Random, arguments: dict[str, Any], parameters: Mapping[str, inspect.Parameter]
) -> list[str]:
    """One to three changes of a call, in place: what they are called."""
    kinds = []
    for _ in range(r.choice((1, 1, 1, 1, 1, 2, 2, 3))):
        choice = r.randrange(40)
        if choice == 0 and arguments:
            arguments.pop(r.choice(list(arguments)))
            kinds.append("missing")
        elif choice == 1:
            arguments[r.choice(("unknown", "Query", "out", "self"))] = r.choice(ANYTHING)()
            kinds.append("unknown")
        elif choice in (2, 3):
            _alias(r, arguments)
            kinds.append("alias")
        else:
            # Change the arguments of the call more often than its defaults.
            given = [name for name, x in arguments.items() if x is not None]
            name = r.choice(given if given and choice < 36 else list(parameters))
            kind, arguments[name] = changed_value(r, arguments.get(name))
            kinds.append(kind)
    return kinds


def positional(
    r: Random, arguments: dict[str, Any], parameters: Mapping[str, inspect.Parameter]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Some of the arguments by position, as far as they may be and none is left out."""
    rest = dict(arguments)
    args: list[Any] = []
    most = r.randint(0, len(parameters)) if r.randrange(8) else 0
    for name, parameter in parameters.items():
        if len(args) >= most or name not in rest or parameter.kind is parameter.KEYWORD_ONLY:
            break
        args.append(rest.pop(name))
    return tuple(args), rest


_TENSOR_TYPES = ("Tensor", "Optional[Tensor]")


class WrongCalls:
    """A class of cases: of one operator, through torch.ops or its public function."""

    def __init__(self, operator: Operator, public: bool) -> None:
        self.operator, self.public = operator, public
        self.name = operator.name
        self.of_ops = getattr(torch.ops.ascend, self.name)
        self.of_library = getattr(ops, self.name)
        self.function = self.of_library if public else self.of_ops
        self.parameters = inspect.signature(self.of_library).parameters
        self.schema = [x.name for x in operator.overload._schema.arguments]
        # A name that is unknown to one form may be an output of the other.
        self.outputs = (
            [] if public or "out" not in self.of_ops.overloads() else operator.output_names
        )

    def __call__(self, r: Random) -> str:
        sample = draw(r, self.operator)
        arguments = sample.arguments
        if self.public and r.randrange(4):
            for name, x in arguments.items():
                if isinstance(x, Tensor) and x.numel() >= _COMPRESSED:
                    arguments[name] = None
        kinds = change(r, arguments, self.parameters)
        if cannot_be_shown(arguments) or not (self.public or self._torch_can_refuse(arguments)):
            return "left out"
        product: Product | None = None if r.randrange(6) else r.choice(_PRODUCTS)
        try:
            with limits(product):
                label = self._check(r, arguments)
            check_dispatcher()
        except Finding as finding:
            call = ", ".join(f"{n}={shown(x)}" for n, x in arguments.items())
            where = "ops" if self.public else "torch.ops.ascend"
            text = f"{finding} -- {' + '.join(kinds)} under limits {product}, {where}.{self.name}"
            raise Finding(f"{text}({call})") from None
        self._check_later_call()
        return f"{kinds[0]}: {label}"

    def _torch_can_refuse(self, arguments: dict[str, Any]) -> bool:
        """torch's error prints, and so reads, a tensor for which the schema has another type."""
        schema = {x.name: str(x.type) for x in self.of_ops.default._schema.arguments}
        return all(
            can_be_read(x)
            for name, argument in arguments.items()
            if not (isinstance(argument, Tensor) and schema.get(name) in _TENSOR_TYPES)
            for x in tensors_in(argument)
            if has_memory(x)
        )

    def _check(self, r: Random, arguments: dict[str, Any]) -> str:
        args, options = positional(r, arguments, self.parameters)
        copy = twin(arguments)
        before = Before(arguments)
        outcome = run(self.function, args, options)
        if outcome.error is not None:
            written = before.changed()
            if written is not None:
                raise Finding(f"{shown(written)} changed, although it raised {outcome.text}")
            if is_out_of_memory(outcome):
                return "no memory"
            names = {*self.schema, *self.parameters, *self.outputs}
            label = check_error(outcome, arguments, names, not self.public)
        else:
            caches = [arguments.get(name) for name in _OUT] if self.operator.in_place else []
            written = before.changed(x for x in caches if x is not None)
            if written is not None:
                raise Finding(f"{shown(written)} changed")
            label = "worked"
        self._compare(r, outcome, copy, arguments)
        return label

    def _compare(
        self, r: Random, outcome: Outcome, copy: dict[str, Any], arguments: dict[str, Any]
    ) -> None:
        """Compares with other ways to make the same call. No call has used `copy` before."""
        of_schema = all(name in self.schema for name in copy)
        # A function that takes an iterator gives what it gives for its list. torch.ops reads one
        # twice, first to see whether its items are numbers, and finds it empty.
        iterators = [name for name, x in copy.items() if isinstance(x, Once)]
        copy, arguments = as_lists(copy), as_lists(arguments)
        if not self.public:
            copy |= {name: [] for name in iterators}
        if outcome.error is None:
            # Limits of a product may choose another meaning of the modes.
            if of_schema and (device_in_force() is None or not self.operator.in_place):
                given = arguments if self.operator.in_place else None
                check_against_reference(self.operator, twin(copy), outcome, given)
            check_results(self.operator, copy, outcome)
            if not self.operator.in_place and any(x.requires_grad for x in outcome.outputs):
                check_gradients(outcome, arguments)
        of_schema &= not (iterators and outcome.error is not None)
        if of_schema and not self.operator.in_place and r.randrange(2):
            self._check_other_way(outcome, copy)
        if of_schema and not self.public and not self.operator.in_place and r.randrange(2):
            check_on_meta(self.operator, outcome, copy)

    def _check_other_way(self, outcome: Outcome, copy: dict[str, Any]) -> None:
        """The public function accepts what torch.ops does, with the same result or error."""
        if not self._torch_can_refuse(copy):
            return
        flags = [x.name for x in self.operator.overload._schema.arguments if str(x.type) == "bool"]
        if any(copy.get(name, False) is None for name in flags):
            # False for torch.ops; the public function chooses.
            return
        function = self.of_ops if self.public else self.of_library
        other = run(function, (), copy)
        public, through_torch = (outcome, other) if self.public else (other, outcome)
        if is_out_of_memory(public) or is_out_of_memory(through_torch):
            return
        texts = f"{public.text} / {through_torch.text}"
        if "actual_seq_lengths" in texts or "prefix: expected whole" in texts:
            # The public function reads them first, as it takes them in two forms; torch.ops takes
            # an empty tensor of any dtype for lengths, and '' for a list.
            return
        if through_torch.error is None:
            if public.error is not None:
                raise Finding(f"torch.ops accepts what the public function refuses: {public.text}")
            for x, y in zip(public.outputs, through_torch.outputs, strict=True):
                if not has_memory(x) or not has_memory(y):
                    continue
                if not same_bits(x, y):
                    raise Finding("torch.ops and the public function give different bits")
        elif through_torch.of_library and public.of_library and public.text != through_torch.text:
            if " builds it" in through_torch.text:
                return
            mask = copy.get("atten_mask")
            expands = isinstance(mask, Tensor) and not mask.is_nested and 1 in mask.shape
            if expands and "atten_mask: expected shape" in through_torch.text:
                # The public function expands the axes of 1, and may refuse what comes after it.
                return
            raise Finding(f"torch.ops and the public function differ: {texts}")

    def _check_later_call(self) -> None:
        with limits(None):
            if not _later_call_is_good(self.operator):
                raise Finding(f"a later call of {self.name} gives other bits")


@cache
def _known(operator: Operator) -> tuple[Sample, tuple[Tensor, ...]]:
    sample = operator.small_sample()
    return sample, _outputs(operator, sample)


def _outputs(operator: Operator, sample: Sample) -> tuple[Tensor, ...]:
    if not operator.in_place:
        return sample.call(torch.ops.ascend)
    copy = sample.replace(**twin(sample.arguments))
    copy.call(torch.ops.ascend)
    return tuple(copy.tensors[name] for name in _OUT if name in copy.tensors)


def _later_call_is_good(operator: Operator) -> bool:
    sample, expected = _known(operator)
    return all(map(same_bits, _outputs(operator, sample), expected))


def shown(x: object) -> str:
    if isinstance(x, Tensor):
        what = "" if type(x) is Tensor else f" {type(x).__name__}"
        if x.layout is not torch.strided or x.is_nested:
            return f"<{x.dtype} {x.layout} nested={x.is_nested}>"
        where = "" if has_memory(x) else f" on {x.device}"
        return f"<{x.dtype} {list(x.shape)} strides {list(x.stride())}{where}{what}>"
    if isinstance(x, Once):
        return f"iter({shown(x.items)})"
    text = f"[{', '.join(map(shown, x[:9]))}]" if isinstance(x, (list, tuple)) else repr(x)
    return text if len(text) < 80 else f"{text[:80]}..."


def _cases() -> dict[str, Case]:
    cases: dict[str, Case] = {}
    for operator in OPERATORS.values():
        cases[f"wrong/{operator.name}"] = WrongCalls(operator, public=False)
        cases[f"wrong/public/{operator.name}"] = WrongCalls(operator, public=True)
    return cases


CASES: dict[str, Case] = _cases()
