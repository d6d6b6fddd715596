"""Clusters and models by name.

GPU clusters take from H800, where the cost model was fitted (`fitted`), the overhead and the part
of the manufacturer's rates that kernels reach. Rates of others are therefore predictions. CPU
clusters are assumptions: replace them by what you measured.
"""

from __future__ import annotations

from tokenyard.planner.cost import Cluster, Model

# Fitted to DeepEP V1's published tables by `python -m tools.fit_cost`.
OVERHEAD = 26.2e-6
NODE_RATE = 153.8e9
NETWORK_RATE = 43.7e9
# What manufacturers give for one direction of H800's NVLink and of its adapter.
_H800_NODE, _H800_NETWORK = 200e9, 50e9


def _gpus(name: str, ranks_per_node: int, node: float, network: float, what: str) -> Cluster:
    """A cluster of GPUs, from bytes a second that makers give for one direction of their links."""
    return Cluster(
        name=name,
        ranks_per_node=ranks_per_node,
        node_rate=node * NODE_RATE / _H800_NODE,
        network_rate=network * NETWORK_RATE / _H800_NETWORK,
        overhead=OVERHEAD,
        source=what,
    )


def _cpus(name: str, network: float, what: str) -> Cluster:
    ranks = 4  # of a node, which share one adapter
    return Cluster(
        name=name,
        ranks_per_node=ranks,
        node_rate=5e9,
        network_rate=0.8 * network / ranks,
        overhead=200e-6,
        by_pair=False,
        source=f"{what}; 4 ranks a node; copies at 5 GB/s, TCP at 80 % and 200 us are assumptions",
    )


CLUSTERS = {
    one.name: one
    for one in (
        _gpus("h800", 8, _H800_NODE, _H800_NETWORK, "NVLink 200 GB/s, CX7 400 Gbit/s; fitted"),
        _gpus("h100", 8, 450e9, 50e9, "NVLink 450 GB/s, CX7 400 Gbit/s; scaled from H800"),
        _gpus("gb200", 72, 900e9, 50e9, "NVLink 900 GB/s, CX7 400 Gbit/s; scaled from H800"),
        _gpus("mi300x", 8, 448e9, 50e9, "xGMI 7 x 64 GB/s, 400 Gbit/s; scaled from H800"),
        _cpus("cpu-100gbe", 12.5e9, "100 Gbit/s Ethernet"),
        _cpus("cpu-10gbe", 1.25e9, "10 Gbit/s Ethernet"),
    )
}

MODELS = {
    one.name: one
    for one in (
        Model(
            name="deepseek-v3",
            hidden=7168,
            num_experts=256,
            num_topk=8,
            intermediate=2048,
            num_layers=58,
            num_groups=8,
            num_topk_groups=4,
            source="config.json of deepseek-ai/DeepSeek-V3",
        ),
        Model(
            name="qwen3-235b-a22b",
            hidden=4096,
            num_experts=128,
            num_topk=8,
            intermediate=1536,
            num_layers=94,
            source="config.json of Qwen/Qwen3-235B-A22B",
        ),
        Model(
            name="mixtral-8x7b",
            hidden=4096,
            num_experts=8,
            num_topk=2,
            intermediate=14336,
            num_layers=32,
            source="config.json of mistralai/Mixtral-8x7B-v0.1",
        ),
        Model(
            name="mixtral-8x22b",
            hidden=6144,
            num_experts=8,
            num_topk=2,
            intermediate=16384,
            num_layers=56,
            source="config.json of mistralai/Mixtral-8x22B-v0.1",
        ),
        Model(
            name="glm-4.5",
            hidden=5120,
            num_experts=160,
            num_topk=8,
            intermediate=1536,
            num_layers=89,
            source="config.json of zai-org/GLM-4.5",
        ),
        Model(
            name="kimi-k2",
            hidden=7168,
            num_experts=384,
            num_topk=8,
            intermediate=2048,
            num_layers=60,
            source="config.json of moonshotai/Kimi-K2-Instruct",
        ),
    )
}


def cluster_of(name: str) -> Cluster:
    if name not in CLUSTERS:
        raise ValueError(f"unknown cluster {name!r}; available: {', '.join(CLUSTERS)}")
    return CLUSTERS[name]


def model_of(name: str) -> Model:
    if name not in MODELS:
        raise ValueError(f"unknown model {name!r}; available: {', '.join(MODELS)}")
    return MODELS[name]
