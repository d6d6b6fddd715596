"""Engram: a table that lies on all ranks, of which each fetches the entries that it needs.

Where ranks share memory each holds its own entries, and the others read them there. Where they
share none, every rank keeps the whole table: a fetch is one rank's own business, as in V2.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tokenyard import validate
from tokenyard.compat.elastic.dispatch import by_column
from tokenyard.compat.elastic.domains import ALIGNMENT
from tokenyard.compat.elastic.refusal import heard_by_all
from tokenyard.compat.elastic.shared_block import SharedBlock, meet, node_of
from tokenyard.engine.engine import Engine
from tokenyard.engine.gather import all_gather
from tokenyard.lifetime import Lifetime
from tokenyard.types import ROW_DTYPES, SCALE_DTYPES, Config, round_up

_STAGE = "engram_write"
_ENTRY = 32  # bytes; V2 rounds entries up to this
_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)

Fetched = tuple[Tensor, Tensor | None]


class _Table:
    """The entries of all ranks, as bytes: [entries, bytes of one] of each rank."""

    def __init__(self, of_rank: list[Tensor], dtype: torch.dtype, sf: Tensor | None) -> None:
        self._of_rank, self._dtype, self._sf = of_rank, dtype, sf
        self.num_each, self._width = of_rank[0].shape

    @property
    def num_entries(self) -> int:
        return self.num_each * len(self._of_rank)

    def fetch(self, indices: Tensor, by_columns: bool) -> Fetched:
        (num_tokens, num_entries), flat = indices.shape, indices.reshape(-1).long()
        owner = flat // max(self.num_each, 1)
        got = self._of_rank[0].new_empty(len(flat), self._width)
        for rank, entries in enumerate(self._of_rank):
            wanted = (owner == rank).nonzero()[:, 0]
            got[wanted] = entries[flat[wanted] - rank * self.num_each]
        data = got.view(num_tokens, num_entries * self._width).view(self._dtype)
        if self._sf is None:
            return data, None
        sf = self._sf[flat].view(num_tokens, num_entries * self._sf.shape[1])
        return data, by_column(sf) if by_columns else sf


class EngramCalls(Lifetime):
    """A table over all ranks: written together, fetched by any rank at any time."""

    _table: _Table | None = None
    _table_block: SharedBlock | None = None

    def engram_write(self, storage: Tensor, sf: Tensor | None = None) -> None:
        """This rank's entries [n, D], the same n and D on all ranks: entry i lies on rank i // n.

        FP8 entries come with the scales of all ranks' entries, sf [R * n, S] in float32 or int32,
        which every rank keeps. All ranks together; fetches before it have ended everywhere.
        """
        with self._use as engine:
            with heard_by_all(engine, _STAGE):
                rows = validate.rows(
                    "storage",
                    storage,
                    num_rows="entries",
                    dtypes=ROW_DTYPES,
                    device=engine.transport.device,
                )
                kept = _scales(sf, rows, engine)
            num_entries, hidden = rows.shape
            terms = {"entries": num_entries, "hidden size": hidden}
            terms["dtype (by its number)"] = ROW_DTYPES.index(rows.dtype)
            meet(engine, _STAGE, terms)
            of_rank = self._spread(engine, rows.view(torch.uint8))
            self._table = _Table(of_rank, rows.dtype, kept)

    def _spread(self, engine: Engine, rows: Tensor) -> list[Tensor]:
        node = node_of(engine)
        if node is None:
            everything = all_gather(engine, rows, None, Config())[0]
            return list(everything.split(len(rows))) if len(rows) else [rows] * engine.num_ranks
        block = self._table_block
        if block is None or block.num_bytes < rows.numel():
            block = self._table_block = SharedBlock(node, 0, rows.numel(), _STAGE)
        block.memory[engine.rank][: rows.numel()] = rows.flatten()
        meet(engine, _STAGE, {})  # entries are there on all ranks
        return [one[: rows.numel()].view(rows.shape) for one in block.memory]

    def engram_fetch(
        self, indices: Tensor, num_qps: int = 0, use_tma_aligned_col_major_sf: bool = False
    ) -> Callable[[], Fetched]:
        """Fetch the entries indices [T, K], int32 or int64. What this returns gives (data
        [T, K * D], sf [T, K * S] or None), a token's entries side by side. Other ranks need not
        call. num_qps has no use here.
        """
        with self._use as engine:
            table = self._table
            if table is None:
                raise ValueError(f"no table yet, want engram_write first, on rank {engine.rank}")
            wanted = validate.tensor(
                "indices",
                indices,
                shape=("tokens", "entries"),
                dtypes=(torch.int32, torch.int64),
                device=engine.transport.device,
            )
            outside = (wanted < 0) | (wanted >= table.num_entries)
            if outside.any():
                token, k = outside.nonzero()[0].tolist()
                raise ValueError(
                    f"indices[{token}, {k}] is {int(wanted[token, k])}, want "
                    f"0..{table.num_entries - 1}, on rank {engine.rank}"
                )
            fetched = table.fetch(wanted, use_tma_aligned_col_major_sf)
        return lambda: fetched

    @staticmethod
    def get_engram_storage_size_hint(
        num_entries: int,
        hidden: int,
        num_max_tokens_per_rank: int,
        dtype: torch.dtype = torch.bfloat16,
    ) -> tuple[int, int]:
        """Bytes that V2 takes for what is fetched, and for a rank's entries: multiples of 2 MB."""
        entry = round_up(hidden * dtype.itemsize, _ENTRY)
        return (
            round_up(entry * num_max_tokens_per_rank, ALIGNMENT),
            round_up(entry * num_entries, ALIGNMENT),
        )


def _scales(sf: Tensor | None, rows: Tensor, engine: Engine) -> Tensor | None:
    is_fp8 = rows.dtype in _FP8
    if sf is None:
        validate.require(not is_fp8, "sf is None, want the scales of all entries of FP8 storage")
        return None
    validate.require(is_fp8, f"sf given for storage of {validate.name(rows.dtype)}, want None")
    shape = (len(rows) * engine.num_ranks, "scales")
    kept = validate.tensor("sf", sf, shape=shape, dtypes=SCALE_DTYPES, device=rows.device)
    return kept.clone()  # the user may change his own
