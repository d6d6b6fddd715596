"""Faults of the compiled calls, step by step, and of what gets a call going."""

from __future__ import annotations

from tools.faults.fault import Fault

_DISPATCH = "kernels/numba/exchange/dispatch.py"
_COMBINE = "kernels/numba/exchange/combine.py"
_NODES = "kernels/numba/between_nodes/"

FAULTS = (
    Fault(
        "compiled-count-is-not-reset",
        "compiled calls",
        _DISPATCH,
        "    for r in range(size):\n        taken[r] = 0\n",
        "    for r in range(1, size):\n        taken[r] = 0\n",
    ),
    Fault(
        "compiled-post-takes-experts-in-order",
        "compiled calls",
        _DISPATCH,
        "told[1 + i] = pairs[experts[r * most + i]]",
        "told[1 + i] = pairs[min(r * most + i, num_experts)]",
    ),
    Fault(
        "compiled-hear-believes-any-count",
        "compiled calls",
        _DISPATCH,
        "if count < 0 or count > tokens[r]:",
        "if count < 0:",
    ),
    Fault(
        "compiled-find-takes-a-small-block",
        "compiled calls",
        _DISPATCH,
        "if needed > room or room > 2 * _size_class(needed):",
        "if room > 2 * _size_class(needed):",
    ),
    Fault(
        "compiled-write-uses-own-row-count",
        "compiled calls",
        _DISPATCH,
        "target += column_bytes(rows[r], 4 * num_topk)",
        "target += column_bytes(rows[words[at.RANK]], 4 * num_topk)",
    ),
    Fault(
        "compiled-localise-keeps-weights-of-others",
        "compiled calls",
        _DISPATCH,
        "        if here < 0:\n            weights[i] = 0.0",
        "        if expert < 0:\n            weights[i] = 0.0",
    ),
    Fault(
        "compiled-load-is-of-the-last-rank",
        "statistics",
        _DISPATCH,
        "load[i] += told[i]",
        "load[i] = told[i]",
    ),
    Fault(
        "compiled-same-call-ignores-worst-tokens",
        "compiled calls",
        "kernels/numba/exchange/protocol.py",
        "return told[say.WORST] == 0",
        "return True",
    ),
    Fault(
        "compiled-offer-forgets-where-rows-begin",
        "compiled calls",
        _COMBINE,
        "= begin + before * row_bytes\n        before",
        "= before * row_bytes\n        before",
    ),
    Fault(
        "compiled-copy-leaves-out-a-rank",
        "compiled calls",
        _COMBINE,
        "        if r < rank:\n            before += sent[r * size + rank]\n        total",
        "        if r <= rank:\n            before += sent[r * size + rank]\n        total",
    ),
    Fault(
        "compiled-sum-from-the-last-rank",
        "order",
        _COMBINE,
        "for c in range(starts[t], starts[t + 1]):",
        "for c in range(starts[t + 1] - 1, starts[t] - 1, -1):",
    ),
    Fault(
        "compiled-combine-leaves-before-others-read",
        "compiled calls",
        _COMBINE,
        "    if not passes(table, at.SUMMED, READ):\n        return verdict(LATE, READ)\n",
        "",
    ),
    Fault(
        "compiled-plans-outlive-a-placement",
        "compiled calls",
        "engine/plans.py",
        "    def forget(self) -> None:\n        self._known.clear()",
        "    def forget(self) -> None:\n        self._known.copy()",
    ),
    Fault(
        "compiled-dispatch-overtakes-the-thread",
        "async",
        "engine/compiled.py",
        "and topk_weights.is_cpu\n            and self._engine.worker.pending is None\n",
        "and topk_weights.is_cpu\n",
    ),
    Fault(
        "nodes-take-writes-past-the-result",
        "compiled calls",
        _NODES + "dispatch.py",
        "                if row == end:\n                    return verdict(at.STRAY, s)\n",
        "",
    ),
    Fault(
        "layout-counts-256-tokens-in-a-byte",
        "layout",
        "kernels/numba/layout.py",
        "    room = 255\n    for t in range(num_tokens):",
        "    room = 256\n    for t in range(num_tokens):",
    ),
    Fault(
        "layout-lanes-leave-slots-behind",
        "layout",
        "kernels/numba/layout.py",
        "ranks[later], slots[later] = ranks[later + 1], slots[later + 1]",
        "ranks[later] = ranks[later + 1]",
    ),
    Fault(
        "layout-triton-forgets-earlier-blocks",
        "layout",
        "kernels/triton/layout.py",
        "first = tl.sum(before, 0) + tl.cumsum(copies, 0) - copies",
        "first = tl.cumsum(copies, 0) - copies",
    ),
    Fault(
        "agreement-goes-on-by-its-own-number",
        "agreement",
        "engine/agreement.py",
        "self.number = int(answer[:, at.NUMBER].max()) + 1",
        "self.number = self.number + 1",
    ),
    Fault(
        "agreement-swaps-who-differs",
        "agreement",
        "engine/agreement.py",
        "raise differ(stage, term, (self._rank, own), (rank, theirs))",
        "raise differ(stage, term, (rank, own), (self._rank, theirs))",
    ),
    Fault(
        "agreement-stays-engaged-after-bad-input",
        "agreement",
        "engine/agreement.py",
        "        self.engaged = False\n        if own is not None:",
        "        if own is not None:",
    ),
)
