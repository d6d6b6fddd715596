"""Published figures of exchanges on GPUs, as facts: what the cost model is compared with.

They come from the projects' own pages. None was measured here, and none may stand beside a time of
a CPU as if the two were comparable.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Figure:
    """Dispatch and combine at one number of ranks."""

    source: str
    cluster: str  # the preset that stands for it
    mode: str
    num_ranks: int
    num_tokens: int
    dispatch: float
    combine: float
    unit: str  # "us", or "GB/s" of rows on the link that the source calls the bottleneck
    fp8: bool = True
    groups: bool = False  # do tokens choose four groups first, one a node?


def _table(figures: dict[int, tuple[float, float]], **same: object) -> list[Figure]:
    return [
        Figure(num_ranks=ranks, dispatch=out, combine=back, **same)  # type: ignore[arg-type]
        for ranks, (out, back) in figures.items()
    ]


LOW_LATENCY = _table(
    {
        8: (77, 114),
        16: (118, 195),
        32: (155, 273),
        64: (173, 314),
        128: (192, 369),
        256: (194, 360),
    },
    source="DeepEP V1, low latency",
    cluster="h800",
    mode="low_latency",
    num_tokens=128,
    unit="us",
)

NORMAL = _table(
    {8: (153, 158), 16: (43, 43), 32: (58, 57), 64: (51, 50)},
    source="DeepEP V1, normal",
    cluster="h800",
    mode="normal",
    num_tokens=4096,
    unit="GB/s",
    groups=True,
)

# Not fitted: they show how far a preset is from what others measured with other kernels.
ELSEWHERE = [
    *_table(
        {8: (320, 319)},
        source="UCCL-EP, H200 and EFA",
        cluster="h100",
        mode="normal",
        num_tokens=4096,
        unit="GB/s",
        groups=True,
    ),
    *_table(
        {8: (31.7, 38.1), 64: (41.6, 44.5)},
        source="TensorRT-LLM, batch 128",
        cluster="gb200",
        mode="normal",
        num_tokens=128,
        unit="us",
        fp8=False,
    ),
    *_table(
        {8: (311.8, 322.6), 64: (399.2, 372.1)},
        source="TensorRT-LLM, batch 2048",
        cluster="gb200",
        mode="normal",
        num_tokens=2048,
        unit="us",
        fp8=False,
    ),
]
