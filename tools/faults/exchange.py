"""Faults of what carries rows: fences, memory, liveness, transports, and the low-latency mode."""

from __future__ import annotations

from tools.faults.fault import Fault

_LIVENESS = "shm/liveness.py"
_POOL = "runtime/pool.py"
_PARCELS = "kernels/numba/call/by_expert.py"
_RING = "kernels/numba/ring/"
_CALL = "kernels/numba/call/"

FAULTS = (
    Fault(
        "fence-missing-before-signals",
        "fences",
        "kernels/numba/signals.py",
        "    fence_stores()\n    signals = pointer(outgoing, INT64)",
        "    signals = pointer(outgoing, INT64)",
        first="tests/kernels/test_fences.py",
    ),
    Fault(
        "fence-missing-after-a-scatter",
        "fences",
        "kernels/numba/rows.py",
        "begin, end, streaming, targets.ctypes.data)\n    fence_stores()\n",
        "begin, end, streaming, targets.ctypes.data)\n",
        first="tests/kernels/test_fences.py",
    ),
    Fault(
        "fence-signals-are-not-released",
        "fences",
        "kernels/numba/llvm/atomics.py",
        'builder.store_atomic(args[1], pointer, "release", 8)',
        'builder.store_atomic(args[1], pointer, "monotonic", 8)',
        first="tests/kernels/test_atomics.py",
    ),
    Fault(
        "liveness-does-not-wait-for-busy-ranks",
        "liveness",
        _LIVENESS,
        "deadline, beats = now + self._timeout, self._beats()",
        "beats = self._beats()",
        first="tests/faults/test_busy_ranks.py",
    ),
    Fault(
        "liveness-repeats-the-next-rank",
        "liveness",
        _LIVENESS,
        "kind, culprit = _FAILURES[told % 3], told // 3 - 1",
        "kind, culprit = _FAILURES[told % 3], told // 3",
        first="tests/faults/test_culprits.py",
    ),
    Fault(
        "liveness-names-a-late-rank-by-its-place",
        "liveness",
        _LIVENESS,
        "return Stopped(PeerTimeout, self.names(missing()))",
        "return Stopped(PeerTimeout, tuple(missing()))",
        first="tests/faults/test_peers.py",
    ),
    Fault(
        "liveness-sees-a-death-at-the-deadline",
        "liveness",
        _LIVENESS,
        "if dead_since is not None and now > dead_since + _GRACE:",
        "if dead_since is not None and now > deadline:",
        first="tests/faults/test_peers.py",
    ),
    Fault(
        "pool-lends-what-one-still-holds",
        "pool",
        _POOL,
        "if _num_holders(one) == _ALONE and",
        "if _num_holders(one) <= _ALONE + 1 and",
        first="tests/runtime/test_memory.py",
    ),
    Fault(
        "pool-keeps-its-lock",
        "pool",
        _POOL,
        """            try:
                self._settle()
            finally:
                self._lock.release()
""",
        "            self._settle()\n",
        first="tests/runtime/test_pool.py",
    ),
    Fault(
        "segment-may-be-larger-than-told",
        "segment",
        "shm/segment.py",
        "if os.fstat(mine).st_size != file_bytes(num_bytes):",
        "if os.fstat(mine).st_size < file_bytes(num_bytes):",
        first="tests/shm/test_pages.py",
    ),
    Fault(
        "segment-dropped-first-stays-mapped",
        "segment",
        "shm/attached.py",
        "for number in range(max(seen, drops - NUM_DROPS), drops):",
        "for number in range(max(seen, drops - NUM_DROPS) + 1, drops):",
    ),
    Fault(
        "segment-messages-are-not-copied",
        "segment",
        "shm/mailbox.py",
        "return inbox[:, : message_RM.shape[1]].copy()",
        "return inbox[:, : message_RM.shape[1]]",
        first="tests/transports/test_conformance.py::test_virtual_ranks_that_share_memory",
    ),
    Fault(
        "ring-tail-comes-before-records",
        "ring",
        _RING + "protocol.py",
        "    for _ in range(count):\n        number, row = next_row(call, peer, channel)\n",
        "    store_release(ring + _TAIL, lane[_SENT] + count)\n    for _ in range(count):\n"
        "        number, row = next_row(call, peer, channel)\n",
        first="tests/kernels/test_ring.py",
    ),
    Fault(
        "ring-does-not-wait-for-earlier-calls",
        "ring",
        _RING + "protocol.py",
        "    if lane[_SENT] == lane[_SENT_BEFORE] and not _is_drained(call, peer):\n"
        "        return np.int64(0)\n",
        "",
        first="tests/transports/test_ring.py",
    ),
    Fault(
        "ring-blames-who-gives-no-room",
        "ring",
        _RING + "dispatch.py",
        "return np.flatnonzero(rows if rows.any() else rooms).tolist()",
        "return np.flatnonzero(rooms if rooms.any() else rows).tolist()",
        first="tests/kernels/test_ring.py",
    ),
    Fault(
        "hierarchical-second-chunk-reads-the-first",
        "hierarchical",
        "transports/hierarchical/stream.py",
        "bases_H[hop] = at - int(self._chunks.first_hop[chunk, node]) * self.width",
        "bases_H[hop] = at",
        first="tests/transports/test_hierarchical.py::test_many_chunks",
    ),
    Fault(
        "hierarchical-marks-begin-a-rank-late",
        "hierarchical",
        "transports/hierarchical/route.py",
        "np.ascontiguousarray(self.tally_FR[FACTS:].T)",
        "np.ascontiguousarray(np.roll(self.tally_FR[FACTS:].T, -1, 0))",
        first="tests/transports/test_hierarchical.py::test_virtual_ranks",
    ),
    Fault(
        "low-latency-posts-before-rows-are-there",
        "low latency",
        _CALL + "slots.py",
        "        _fill_block(table, like)\n        send_message(table)\n",
        "        send_message(table)\n        _fill_block(table, like)\n",
        first="tests/low_latency/test_conformance.py",
    ),
    Fault(
        "low-latency-writes-over-what-is-unread",
        "low latency",
        _CALL + "halves.py",
        "await_all(lines[READ], size, epochs[READ], 0,",
        "await_all(lines[READ], size, epochs[READ] - 1, 0,",
        first="tests/low_latency/test_memory.py",
    ),
    Fault(
        "low-latency-combine-wants-the-same-lanes",
        "low latency",
        _CALL + "slot_sums.py",
        "picked[i] = j",
        "picked[i] = i",
        first="tests/kernels/test_low_latency.py",
    ),
    Fault(
        "low-latency-all-ranks-have-as-many-experts",
        "low latency",
        "low_latency/stepwise.py",
        "arrived = (owner * shape.placement.most_experts + local).argsort(stable=True)",
        "arrived = (owner * shape.num_local + local).argsort(stable=True)",
        first="tests/kernels/test_low_latency.py",
    ),
    Fault(
        "low-latency-forgets-a-call-it-owes",
        "low latency",
        "low_latency/shared.py",
        """            elif place.is_posted:  # nobody can call it any more
                place.mailbox.signal(READ)
""",
        "",
        first="tests/low_latency/test_calls.py",
    ),
    Fault(
        "by-expert-pads-what-is-aligned",
        "by expert",
        _PARCELS,
        "end += (per_expert[e] + alignment - 1) // alignment * alignment",
        "end += (per_expert[e] + alignment) // alignment * alignment",
        first="tests/transports/test_by_expert.py::test_ranks_may_align_differently",
    ),
    Fault(
        "by-expert-first-row-of-padding-stays",
        "by expert",
        _PARCELS,
        "_zero(words[at.RESULT] + used * width, (end - used) * width)",
        "_zero(words[at.RESULT] + (used + 1) * width, (end - used - 1) * width)",
        first="tests/transports/test_by_expert.py::test_ranks_may_align_differently",
    ),
    Fault(
        "by-expert-believes-any-expert-of-a-parcel",
        "by expert",
        _PARCELS,
        "if expert >= num_experts or expert < -1:",
        "if expert < -1:",
        first="tests/faults/test_by_expert.py",
    ),
    Fault(
        "by-expert-weighs-whatever-was-asked",
        "by expert",
        "kernels/numba/call/sums.py",
        "factors[count] = weights[i] if words[at.WEIGH] != 0 else 1",
        "factors[count] = weights[i]",
        first="tests/transports/test_by_expert.py::test_virtual_ranks_that_share_memory",
    ),
    Fault(
        "comm-later-note-replaces-the-first",
        "comm",
        "comm/failure_board.py",
        "        if last is not None and last.culprits and last.still_holds:\n            return\n",
        "",
    ),
)
