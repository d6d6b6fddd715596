"""Arguments that forks of DeepEP have added to low-latency calls: which mean nothing here.

Callers pass them by name, and some look for a name in the signature to learn whether a fork can do
something. So the signatures do not have them, and `check` looks at those that are given: it accepts
what leaves the result as it is, and refuses what would change it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# By name: what is wanted instead, where anything but None, False or 0 would change the result.
_DISPATCH: Mapping[str, str | None] = {
    "use_nvfp4": "want use_fp8, or rows in their own dtype: there is no cast to NVFP4",
    "x_global_scale": "want None: it is a scale of NVFP4, to which there is no cast",
    "pertoken_quant": "want False: FP8 has a scale for each 128 elements of a row",
    "x_scales": "want None: low_latency_dispatch casts rows itself",
    "align_fp8_quantization": "want False: scales are those of DeepEP's own cast",
    "opt_level": None,  # how fast, not what
}
_COMBINE: Mapping[str, str | None] = {
    "overlap": None,
    "num_sms": None,
    "opt_level": None,
    # Blocks of x that a kernel marks as written. On CPU all of x is written before the call.
    "packed_recv_count": None,
    "comp_signal": None,
    "block_m": None,
    "threshold": None,
    "src_signals": None,
    "src_signal_expect_value": None,
}
_SIGNALS = ("comp_signal", "src_signals")


def check_dispatch(given: Mapping[str, Any]) -> str | None:
    """What is wrong with these arguments, if anything. Raises TypeError if no fork has them."""
    return _check("low_latency_dispatch", _DISPATCH, given)


def check_combine(given: Mapping[str, Any], x: Any) -> str | None:
    """What is wrong with these arguments of a combine of x, if anything."""
    wrong = _check("low_latency_combine", _COMBINE, given)
    on_device = getattr(getattr(x, "device", None), "type", "cpu") != "cpu"
    for name in _SIGNALS:
        if on_device and _is_on(given.get(name)):
            return f"{name} is given, want None: combine waits for no signal of a kernel"
    return wrong


def _check(call: str, known: Mapping[str, str | None], given: Mapping[str, Any]) -> str | None:
    for name, value in given.items():
        if name not in known:
            raise TypeError(f"{call}() got an unexpected keyword argument {name!r}")
        wanted = known[name]
        if wanted is not None and _is_on(value):
            shown = repr(value) if isinstance(value, (bool, int, float)) else "given"
            return f"{name} is {shown}, {wanted}"
    return None


def _is_on(value: Any) -> bool:
    return not (value is None or value is False or (type(value) is int and value == 0))
