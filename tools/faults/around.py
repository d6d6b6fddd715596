"""Faults of rounding, of checks, of other shapes of the API, and of other people's libraries."""

from __future__ import annotations

from tools.faults.fault import Fault

_TRANSFORMERS = "integrations/transformers/"
_VLLM = "integrations/vllm/"

FAULTS = (
    Fault(
        "rounding-ties-go-up",
        "rounding",
        "kernels/numba/llvm/vectors.py",
        "up = builder.add(builder.add(bits, splat(I32, 0x7FFF, lanes)), odd)",
        "up = builder.add(bits, splat(I32, 0x8000, lanes))",
        first="tests/kernels/test_kernels.py::test_reduce",
    ),
    Fault(
        "rounding-of-a-node-is-left-out",
        "rounding",
        "kernels/numba/llvm/sums.py",
        """            term = vectors.narrow(
                builder, vectors.load(builder, partial, index, wide, lanes), dtype, lanes
            )
            term = vectors.widen(builder, term, dtype, lanes)
""",
        "            term = vectors.load(builder, partial, index, wide, lanes)\n",
        first="tests/kernels/test_kernels.py::test_reduce",
    ),
    Fault(
        "rounding-doubles-exact-fp8-scales",
        "rounding",
        "kernels/numba/quantize.py",
        "scale = bits_float((bits + _FRACTION) & _INF)",
        "scale = bits_float((bits + _FRACTION + 1) & _INF)",
        first="tests/kernels/test_quantize.py",
    ),
    Fault(
        "align-padding-of-many-has-a-hole",
        "align",
        "kernels/numba/align.py",
        "_fill(entries, at, end, numel)",
        "_fill(entries, at + 1, end, numel)",
        first="tests/kernels/test_align.py",
    ),
    Fault(
        "permute-takes-rows-for-neighbours",
        "permute",
        "kernels/numba/permute.py",
        "y, y_stride = y_MD.data_ptr(), y_MD.stride(0) * size",
        "y, y_stride = y_MD.data_ptr(), hidden * size",
        first="tests/kernels/test_permute.py",
    ),
    Fault(
        "async-goes-on-after-a-failure",
        "async",
        "runtime/events.py",
        "        if self.failure is not None:\n            raise self.failure\n",
        "",
        first="tests/engine/test_async.py",
    ),
    Fault(
        "elastic-last-lane-is-not-compared",
        "elastic",
        "engine/lane_order.py",
        "for ahead in range(1, num_topk):",
        "for ahead in range(1, num_topk - 1):",
    ),
    Fault(
        "elastic-sends-into-a-slot-in-use",
        "elastic",
        "compat/elastic/pipes.py",
        "self._block.wait([2 + here], [to], number + 1 - self._num_slots, SEND)",
        "self._block.wait([2 + here], [to], number - self._num_slots, SEND)",
        first="tests/compat/elastic/test_parts.py",
    ),
    Fault(
        "hybrid-ep-keeps-a-row-past-the-limit",
        "hybrid_ep",
        "compat/hybrid_ep/buffer.py",
        "row_of = row_of.masked_fill(row_of >= limit, -1)",
        "row_of = row_of.masked_fill(row_of > limit, -1)",
    ),
    Fault(
        "transformers-saves-the-first-experts",
        "transformers",
        _TRANSFORMERS + "saving.py",
        "whole[plan.ids] = own",
        "whole[: len(plan.ids)] = own",
        first="tests/integrations/test_transformers.py",
    ),
    Fault(
        "transformers-unrouted-means-the-last-expert",
        "transformers",
        _TRANSFORMERS + "experts.py",
        "local = plan.local_of_expert[topk_idx].masked_fill(topk_idx < 0, -1)",
        "local = plan.local_of_expert[topk_idx]",
        first="tests/integrations/test_transformers_distributed.py",
    ),
    Fault(
        "vllm-map-is-of-another-rank",
        "vLLM",
        _VLLM + "exchange.py",
        "        mine = self.ep_ranks[self.buffer.rank]\n",
        "        mine = self.buffer.rank\n",
    ),
    Fault(
        "vllm-untested-version-is-hooked",
        "vLLM",
        _VLLM + "plugin.py",
        "if not first <= _release(version) < end:",
        "if not first <= _release(version) <= end:",
    ),
    Fault(
        "vllm-hooks-forget-shared-experts",
        "vLLM",
        _VLLM + "hooks.py",
        "return operators.moe_forward_shared if shared else operators.moe_forward",
        "return operators.moe_forward",
    ),
    Fault(
        "vllm-hooks-forget-sequence-parallel",
        "vLLM",
        _VLLM + "hooks.py",
        "_manager().exchange(is_sequence_parallel)",
        "_manager().exchange(False)",
    ),
    Fault(
        "vllm-weighs-rows-twice",
        "vLLM",
        _VLLM + "prepare_finalize.py",
        "not apply_router_weight_on_input, output)",
        "True, output)",
    ),
    Fault(
        "vllm-keeps-global-expert-ids",
        "vLLM",
        _VLLM + "prepare_finalize.py",
        "local_ids = expert_map[topk_ids.long()].masked_fill(topk_ids < 0, -1)",
        "local_ids = (topk_ids % num_local).masked_fill(topk_ids < 0, -1)",
    ),
    Fault(
        "vllm-blames-ranks-while-it-ends",
        "vLLM",
        _VLLM + "watch.py",
        "if dead and not self._end.wait(_CONFIRM):",
        "if dead:",
    ),
    Fault(
        "validation-lets-one-expert-too-many-pass",
        "validation",
        "validate/calls.py",
        "if low < -1 or high >= counted:",
        "if low < -1 or high > counted:",
        first="tests/faults/test_bad_input.py",
    ),
    Fault(
        "validation-names-another-token",
        "validation",
        "validate/calls.py",
        "token, k = divmod(place, topk_idx_TK.shape[1])",
        "token, k = divmod(place, topk_idx_TK.shape[0])",
        first="tests/faults/test_bad_input.py",
    ),
)
