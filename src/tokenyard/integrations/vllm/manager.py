"""vLLM's all-to-all manager over Buffers.

Layers whose router runs outside the experts kernel take an `Exchange` from it and send each token
where its experts are (prepare_finalize.py). The other calls are those of vLLM's own managers, for
kernels that route by themselves: there every rank gets every token, and sums come back.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor
from vllm.config import get_current_vllm_config
from vllm.distributed import get_pcp_group
from vllm.distributed.device_communicators.base_device_communicator import All2AllManagerBase
from vllm.logger import init_logger

from tokenyard.integrations.vllm import balance, metrics, settings
from tokenyard.integrations.vllm.exchange import Exchange
from tokenyard.integrations.vllm.watch import Watch
from tokenyard.results import Handle

_log = init_logger("vllm.plugins.tokenyard")


class TokenyardAll2AllManager(All2AllManagerBase):
    def __init__(self, cpu_group: Any, tcp_store_group: Any = None) -> None:
        super().__init__(cpu_group, tcp_store_group)
        if get_pcp_group().world_size > 1:
            raise NotImplementedError("tokenyard has no prefill context parallelism, want size 1")
        self._settings = settings.read()
        model = get_current_vllm_config().model_config
        self._dtype = model.dtype
        if model.quantization is not None:
            balance.refuse(f"weights are quantised ({model.quantization})")
            self._settings = replace(self._settings, balance=None)
        self._exchanges: dict[bool, Exchange] = {}
        self._watches: list[Watch] = []
        self._gathered: Handle | None = None  # of the tokens that all ranks have got

    def exchange(self, is_sequence_parallel: bool) -> Exchange:
        """The exchange between ranks with tokens of their own: all, or with TP only those of one TP
        rank. All ranks make it together, when it is first asked for.
        """
        num_tp = self.tp_group.world_size
        everyone = is_sequence_parallel or num_tp == 1
        if everyone not in self._exchanges:
            first, step = (0, 1) if everyone else (self.tp_group.rank_in_group, num_tp)
            made = Exchange(
                self.cpu_group if everyone else self.dp_group.cpu_group,
                range(first, self.world_size, step),
                self.world_size,
                self._settings,
            )
            _log.info("Expert parallel tokens travel through %r", made.buffer)
            if made.buffer.balance is not None:
                _log.info("Ranks of a node share experts, with slack %s", made.buffer.balance)
            made.warm_up(self._dtype)
            self._exchanges[everyone] = made
            publish = metrics.show(made.buffer, _log)
            self._watches.append(Watch(made.buffer, _log, publish))
        return self._exchanges[everyone]

    def dispatch_router_logits(
        self,
        hidden_states: Tensor,
        router_logits: Tensor,
        is_sequence_parallel: bool = False,
        extra_tensors: list[Tensor] | None = None,
    ) -> Any:
        x, logits, *extra = self._gather(
            [hidden_states, router_logits, *(extra_tensors or ())], is_sequence_parallel
        )
        return (x, logits) if extra_tensors is None else (x, logits, extra)

    def dispatch(
        self,
        hidden_states: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        is_sequence_parallel: bool = False,
        extra_tensors: list[Tensor] | None = None,
    ) -> Any:
        x, weights, ids, *extra = self._gather(
            [hidden_states, topk_weights, topk_ids, *(extra_tensors or ())], is_sequence_parallel
        )
        return (x, weights, ids) if extra_tensors is None else (x, weights, ids, extra)

    def combine(self, hidden_states: Tensor, is_sequence_parallel: bool = False) -> Tensor:
        """Each token's sum over ranks, on the rank that it came from."""
        handle, self._gathered = self._gathered, None
        if handle is None:
            raise ValueError("combine without a dispatch before it")
        buffer = self.exchange(is_sequence_parallel).buffer
        return buffer.combine(hidden_states.contiguous(), handle).x

    def explain(self, stage: str, error: RuntimeError) -> RuntimeError:
        """Which rank's death an error of torch.distributed comes from, if we can tell."""
        for one in self._exchanges.values():
            return one.buffer.explain(stage, error)
        return error

    def destroy(self) -> None:
        for watch in self._watches:
            watch.stop()
        exchanges, self._exchanges = self._exchanges, {}
        for one in exchanges.values():
            one.buffer.close()

    def _gather(self, tensors: list[Tensor], is_sequence_parallel: bool) -> list[Tensor]:
        gathered, self._gathered = self.exchange(is_sequence_parallel).gather(tensors)
        return gathered
