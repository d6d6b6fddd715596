"""Checks of numbers, switches and Config, and the words that messages are made of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tokenyard.types import Config

# Rows and counts are int32. Experts and SMs (two a channel) cost every call memory on every rank,
# so a slip of the keyboard must not reach an allocation.
MOST = 2**31 - 1
MOST_EXPERTS = 2**20
_MOST_SMS = 2**12
_MOST_SLACK = 10
# More than any kernel wants. With far more, padding alone would not fit offsets of int32.
_MOST_ALIGNED = 1 << 16


def require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def kind(value: Any) -> str:
    """
    >>> kind(None), kind(3), kind([])
    ('None', 'an int', 'a list')
    """
    if value is None:
        return "None"
    word = type(value).__name__
    return f"{'an' if word[0] in 'aeiouAEIOU' else 'a'} {word}"


def names(dtypes: Sequence[torch.dtype]) -> str:
    return ", ".join(map(name, dtypes))


def integer(what: str, value: Any, *, at_least: int, at_most: int = MOST) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"{what} is {value!r}, want an integer")
    if value < at_least:
        raise ValueError(f"{what} is {value}, want at least {at_least}")
    if value > at_most:
        raise ValueError(f"{what} is {value}, want at most {at_most}")
    return value


def alignment(value: Any) -> int:
    return integer("expert_alignment", value, at_least=1, at_most=_MOST_ALIGNED)


def tag(value: Any) -> int:
    return integer("tag", value, at_least=-1)


def switch(what: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise ValueError(f"{what} is {value!r}, want True or False")


def num_experts(value: Any, owned: int | None) -> int:
    """`owned` is the number of experts in placement=, if one was given."""
    integer("num_experts", value, at_least=1, at_most=MOST_EXPERTS)
    if owned is not None and value != owned:
        raise ValueError(f"num_experts is {value}, want {owned}, the length of placement=")
    return value


def balance(value: Any) -> float:
    """The slack: "exact" is none."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if value != "exact" and not (is_number and 0 <= value <= _MOST_SLACK):
        raise ValueError(f"balance is {value!r}, want 'exact' or the slack, 0 to {_MOST_SLACK}")
    return 0.0 if value == "exact" else float(value)


def ranks_per_node(value: Any, num_ranks: int) -> None:
    if not isinstance(value, (list, tuple)):
        integer("ranks_per_node", value, at_least=1)
        require(
            value <= num_ranks,
            f"ranks_per_node is {value}, want at most {num_ranks}, the ranks of the group",
        )
        return
    for node, size in enumerate(value):
        integer(f"ranks_per_node[{node}]", size, at_least=1)
    require(
        sum(value) == num_ranks,
        f"ranks_per_node is {list(value)}, {sum(value)} ranks in all, want {num_ranks}",
    )


def config(value: Any) -> Config:
    if not isinstance(value, Config):
        raise ValueError(f"config is {kind(value)}, want a tokenyard.Config")
    num_sms = integer("config.num_sms", value.num_sms, at_least=2, at_most=_MOST_SMS)
    if num_sms % 2:
        raise ValueError(f"config.num_sms is {num_sms}, want an even number")
    for which, send, recv in (
        ("nvl", value.num_max_nvl_chunked_send_tokens, value.num_max_nvl_chunked_recv_tokens),
        ("rdma", value.num_max_rdma_chunked_send_tokens, value.num_max_rdma_chunked_recv_tokens),
    ):
        integer(f"config.num_max_{which}_chunked_send_tokens", send, at_least=1)
        integer(f"config.num_max_{which}_chunked_recv_tokens", recv, at_least=1)
        if send >= recv:
            raise ValueError(
                f"config.num_max_{which}_chunked_send_tokens is {send}, want less than "
                f"num_max_{which}_chunked_recv_tokens ({recv})"
            )
    return value
