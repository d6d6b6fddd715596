"""FP8 by groups of 128: eight-bit values, and a scale for each group that undoes the cast.

The names are those of DeepEP's tests and examples. `Buffer.dispatch` takes the pair
(values, scales) as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from operator import attrgetter

import torch
from torch import Tensor
from torch.nn import Parameter

from tokenyard import validate
from tokenyard.kernels import pick
from tokenyard.validate import held
from tokenyard.wire.fp8 import GROUP, PER_WORD

_FROM = (torch.bfloat16, torch.float16, torch.float32)
_SCALES = (torch.float32, torch.int32)

# All properties of a tensor that are checked, read in one step. The plan of a form that has passed
# is kept, since checking and planning take longer than casting a token.
_form = attrgetter("__class__", "shape", "dtype", "layout", "device")
_Form = tuple[type, torch.Size, torch.dtype, torch.layout, torch.device]
_KEPT_PLANS = 1024


def per_token_cast_to_fp8(
    x: Tensor, *, round_scale: bool = False, use_ue8m0: bool = False, kernels: str = "auto"
) -> tuple[Tensor, Tensor]:
    """Values [tokens, hidden] in float8_e4m3fn, and scales [tokens, hidden / 128] in float32.

    A group's scale is its largest magnitude (at least 1e-4) divided by 448, the largest number of
    the format. `round_scale` rounds scales up to powers of two. `use_ue8m0` keeps their exponents
    alone, four in an int32: [tokens, hidden / 512].

    x is bfloat16, float16 or float32, in any strides. The bits are those that torch's own
    operations give. No gradient flows.

    >>> values, scales = per_token_cast_to_fp8(torch.tensor([[7.0, 3.5, -1.0] + [0.0] * 125]))
    >>> values[0, :3].tolist(), scales.tolist()  # 7 / 448 is a 64th
    ([448.0, 224.0, -64.0], [[0.015625]])
    """
    try:
        form = _form(x)
    except AttributeError:
        raise validate.not_a_tensor("x", x) from None
    return _plan_to_fp8(form, round_scale, use_ue8m0, kernels)(held("x", x).contiguous())


def per_token_cast_back(x_fp8: Tensor, x_scales: Tensor, *, kernels: str = "auto") -> Tensor:
    """bfloat16 [tokens, hidden]: each value times its group's scale, in float32, then rounded.

    Scales are float32, or int32 with four UE8M0 exponents each, in any strides.

    >>> values = torch.tensor([[448.0, 224.0, -64.0] + [0.0] * 125]).to(torch.float8_e4m3fn)
    >>> per_token_cast_back(values, torch.tensor([[0.015625]]))[0, :3].tolist()
    [7.0, 3.5, -1.0]
    """
    try:
        form, scales_form = _form(x_fp8), _form(x_scales)
    except AttributeError:
        no_tensor = ("x_scales", x_scales) if isinstance(x_fp8, Tensor) else ("x_fp8", x_fp8)
        raise validate.not_a_tensor(*no_tensor) from None
    cast_back = _plan_from_fp8(form, scales_form, kernels)
    return cast_back(held("x_fp8", x_fp8).contiguous(), held("x_scales", x_scales).contiguous())


@lru_cache(_KEPT_PLANS)
def _plan_to_fp8(
    form: _Form, round_scale: bool, use_ue8m0: bool, kernels: str
) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    num_rows, hidden = _check_rows("x", form, _FROM)
    if use_ue8m0:
        validate.require(
            round_scale, "use_ue8m0 is True with round_scale=False, want round_scale=True"
        )
        _check_packing("x", hidden)
    _, _, dtype, _, device = form
    return pick(kernels, device.type).plan_to_fp8(num_rows, hidden, dtype, round_scale, use_ue8m0)


@lru_cache(_KEPT_PLANS)
def _plan_from_fp8(
    form: _Form, scales_form: _Form, kernels: str
) -> Callable[[Tensor, Tensor], Tensor]:
    num_rows, hidden = _check_rows("x_fp8", form, (torch.float8_e4m3fn,))
    num_scales = hidden // GROUP
    device, (_, _, scale_dtype, _, scale_device) = form[-1], scales_form
    use_ue8m0 = scale_dtype == torch.int32
    if use_ue8m0:
        _check_packing("x_fp8", hidden)
        num_scales //= PER_WORD
    _check_form("x_scales", scales_form, (num_rows, num_scales), _SCALES)
    validate.require(
        scale_device == device, f"x_scales is on device {scale_device}, want x_fp8's, {device}"
    )
    return pick(kernels, device.type).plan_from_fp8(num_rows, hidden, use_ue8m0)


def _check_rows(what: str, form: _Form, dtypes: Sequence[torch.dtype]) -> torch.Size:
    _check_form(what, form, ("tokens", "hidden"), dtypes)
    shape = form[1]
    validate.require(
        shape[1] % GROUP == 0, f"{what} has hidden size {shape[1]}, want a multiple of {GROUP}"
    )
    return shape


def _check_form(
    what: str, form: _Form, shape: Sequence[int | str], dtypes: Sequence[torch.dtype]
) -> None:
    kind, got, dtype, layout, _ = form
    # Kernels take addresses, and other subclasses may have no memory of their own.
    validate.require(
        kind in (Tensor, Parameter), f"{what} has type {kind.__name__}, want torch.Tensor"
    )
    validate.form(what, got, dtype, layout, shape=shape, dtypes=dtypes)


def _check_packing(what: str, hidden: int) -> None:
    validate.require(
        hidden % (GROUP * PER_WORD) == 0,
        f"{what} has hidden size {hidden}, want a multiple of {GROUP * PER_WORD}, since UE8M0 "
        "scales come in fours",
    )
