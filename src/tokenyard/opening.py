"""How a Buffer begins: ranks connect, and agree on who is where before anything else is built."""

from __future__ import annotations

import hashlib
import secrets
import socket
from typing import Any

import numpy as np
from torch import Tensor

from tokenyard import kernels as kernel_sets
from tokenyard import validate
from tokenyard.agreement import STAGES, Agreement, Call, Terms
from tokenyard.engine import Engine
from tokenyard.streams import streams_for
from tokenyard.topology import Placement, Topology
from tokenyard.transports import (
    CollectiveTransport,
    check_name,
    connect,
    open_transport,
    why_not_shared,
)


def open_engine(
    group: Any,
    *,
    num_nvl_bytes: int,
    num_channels: int,
    transport: str,
    kernels: str,
    ranks_per_node: int | None,
    timeout: float,
    placement: Tensor | None,
) -> Engine:
    """The engine of a new Buffer. Bad options on one rank raise on all of them."""
    sane = isinstance(timeout, (int, float)) and 0 < timeout <= 1e6
    communicator = connect(group, timeout if sane else 30.0)
    rank, size, device = communicator.rank, communicator.size, communicator.device
    # The first meeting needs no fast kernels, and must take place even if `kernels` is wrong.
    plain = kernel_sets.load("reference")
    first = Agreement(CollectiveTransport(communicator, plain, node_of_rank=[0] * size))

    def prepare() -> tuple[kernel_sets.Kernels, Placement | None]:
        validate.require(sane, f"timeout is {timeout!r}, want seconds above 0, at most 1e6")
        if ranks_per_node is not None:
            validate.integer("ranks_per_node", ranks_per_node, at_least=1)
        kernel_set = kernel_sets.pick(kernels, device.type)
        check_name(transport)
        validate.integer("num_nvl_bytes", num_nvl_bytes, at_least=0, at_most=2**50)
        if placement is None:
            return kernel_set, None
        return kernel_set, Placement(validate.placement(placement, size).to(device), size)

    def terms(made: tuple[kernel_sets.Kernels, Placement | None]) -> Terms:
        kernel_set, placed = made
        where = None if placed is None else placed.rank_of_expert.tolist()
        rings = (num_nvl_bytes, num_channels) if transport == "ring" else None
        options = _digest(repr((transport, rings, ranks_per_node, where)))
        alone = why_not_shared(kernel_set) is not None
        mine = np.array([[_machine(), secrets.randbits(62), alone]] * size, np.int64)
        return Terms(Call(stage=STAGES.index("Buffer"), options=options), payload=mine)

    (kernel_set, placed), agreed = first.agree("Buffer", prepare, terms)
    told = agreed.payload
    if ranks_per_node is None:
        topology = Topology.from_marks(told[:, 0].tolist())
    else:
        topology = Topology.even(size, ranks_per_node)
    shared_id, own_id = int(told[0, 1]), int(told[rank, 1])
    apart = None
    if len(set(told[:, 0].tolist())) > 1:
        apart = "ranks are on several machines"
    elif told[:, 2].any():
        culprit = int(told[:, 2].argmax())
        own = why_not_shared(kernel_set)
        apart = own if culprit == rank else f"rank {culprit} cannot share memory"
    opened = open_transport(
        transport,
        communicator,
        kernel_set,
        topology.node_of_rank,
        apart,
        timeout=timeout,
        num_bytes=num_nvl_bytes,
        num_channels=num_channels,
    )
    agreement, streams = Agreement(opened, shared_id), streams_for(device)
    return Engine(opened, kernel_set, agreement, topology, placed, own_id, device, streams)


def _machine() -> int:
    """The same on ranks of one machine, and on no other: a digest of the kernel's boot id."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return _digest(file.read())
    except OSError:
        return _digest(socket.gethostname())


def _digest(text: str) -> int:
    """A non-negative int64 that tells texts apart."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1
