"""Tensors between neighbours of a ring of ranks, as pipeline parallelism sends them.

Where ranks share memory the sender copies a tensor into a slot of the receiver, which copies it
out. Where they share none, a thread sends it over connections of the two ranks.
"""

from __future__ import annotations

from torch import Tensor

from tokenyard import validate
from tokenyard.compat.elastic.domains import ALIGNMENT
from tokenyard.compat.elastic.pipes import RECEIVE, SEND, Connections, SharedPipe
from tokenyard.compat.elastic.refusal import heard_by_all
from tokenyard.compat.elastic.shared_block import as_bytes, meet, node_of
from tokenyard.engine.engine import Engine
from tokenyard.errors import CallMismatch
from tokenyard.lifetime import Lifetime
from tokenyard.types import round_up

Pipe = SharedPipe | Connections

_TENSOR = 32  # bytes; V2 rounds tensors up to this


class PipelineCalls(Lifetime):
    """Send and receive between neighbours: rank r and r + 1, and the last and the first."""

    _pipe: Pipe | None = None
    _pipe_sizes: tuple[int, int] = (0, 0)

    def pp_set_config(self, num_max_tensor_bytes: int, num_max_inflight_tensors: int) -> None:
        """How large a tensor may be, and how many a sender may be ahead. All ranks together; what
        was sent before must have been received.
        """
        with self._use as engine:
            sizes = num_max_tensor_bytes, num_max_inflight_tensors
            with heard_by_all(engine, "pp_set_config"):
                validate.integer("num_max_tensor_bytes", sizes[0], at_least=1, at_most=1 << 62)
                validate.integer("num_max_inflight_tensors", sizes[1], at_least=1)
                validate.require(engine.num_ranks > 1, "there is 1 rank, want at least 2")
            names = "num_max_tensor_bytes", "num_max_inflight_tensors"
            meet(engine, "pp_set_config", dict(zip(names, sizes)))
            if self._pipe is None or sizes != self._pipe_sizes:
                self._pipe = self._open_pipe(engine, *sizes)
                self._pipe_sizes = sizes

    def _open_pipe(self, engine: Engine, num_bytes: int, num_slots: int) -> Pipe:
        node = node_of(engine)
        if node is not None:
            return SharedPipe(node, num_bytes, num_slots)
        if isinstance(self._pipe, Connections):
            self._pipe.resize(num_slots)
            return self._pipe
        name = f"{engine.agreement.buffer_id:x}/{engine.agreement.number}"
        return Connections(engine, num_slots, name)

    def pp_send(self, t: Tensor, dst_rank_idx: int, num_sms: int = 0) -> None:
        """Send a contiguous tensor to a neighbour. Returns when t may be changed; waits while
        num_max_inflight_tensors are on their way there.
        """
        with self._use as engine:
            pipe, data = self._checked(engine, SEND, t, "dst_rank_idx", dst_rank_idx)
            pipe.send(data, dst_rank_idx)

    def pp_recv(self, t: Tensor, src_rank_idx: int, num_sms: int = 0) -> None:
        """Receive into a contiguous tensor what a neighbour sent, in the order in which it sent. If
        that has another number of bytes, it is dropped, and this rank raises CallMismatch.
        """
        with self._use as engine:
            pipe, data = self._checked(engine, RECEIVE, t, "src_rank_idx", src_rank_idx)
            num_bytes = pipe.receive(data, src_rank_idx)
            if num_bytes != data.numel():
                raise CallMismatch(
                    f"pp_recv: t has {data.numel()} bytes on rank {engine.rank}, rank "
                    f"{src_rank_idx} sent {num_bytes}",
                    what="bytes",
                )

    def _checked(
        self, engine: Engine, stage: str, t: Tensor, name: str, other: int
    ) -> tuple[Pipe, Tensor]:
        where, size = f"on rank {engine.rank}", engine.num_ranks
        if self._pipe is None:
            raise ValueError(f"{stage}: want pp_set_config first, {where}")
        neighbours = sorted({(engine.rank - 1) % size, (engine.rank + 1) % size})
        if other not in neighbours:
            raise ValueError(f"{stage}: {name} is {other}, want one of {neighbours}, {where}")
        if not isinstance(t, Tensor):
            raise engine.agreement.named(stage, validate.not_a_tensor("t", t))
        device = engine.transport.device
        if not t.is_contiguous() or t.device != device:
            raise ValueError(f"{stage}: want t contiguous and on {device}, {where}")
        if t.nbytes > self._pipe_sizes[0]:
            raise ValueError(
                f"{stage}: t has {t.nbytes} bytes, want at most num_max_tensor_bytes "
                f"({self._pipe_sizes[0]}), {where}"
            )
        return self._pipe, as_bytes(t)

    @staticmethod
    def get_pp_buffer_size_hint(num_max_tensor_bytes: int, num_max_inflight_tensors: int) -> int:
        """Bytes that V2 takes for the slots of two neighbours: a multiple of 2 MB."""
        each = round_up(num_max_tensor_bytes, _TENSOR)
        return round_up(each * num_max_inflight_tensors * 2 * 2, ALIGNMENT)
