"""Variables of the environment: each one that tokenyard reads is in these tables, and is read here.

`docs/guide/operating.md` says what tokenyard's own mean. One that is set, and empty, counts as not
set: so compose files and charts leave those that they have no value for.
"""

from __future__ import annotations

import os

# What each says where it is not set.
OURS = {
    "TOKENYARD_TIMEOUT": "30",
    "TOKENYARD_PROGRESS": "1",
    "TOKENYARD_TRACE": "",
    "TOKENYARD_RECORD": "",
    "TOKENYARD_RECORD_EVERY": "1",
    "TOKENYARD_SHARED_FOLDER": "",
    "TOKENYARD_GUARD": "0",
    "TOKENYARD_VLLM": "1",
    "TOKENYARD_VLLM_TRANSPORT": "auto",
    "TOKENYARD_VLLM_BALANCE": "",
}
# Those of launchers, of gloo, Triton, Prometheus and terminals.
OTHERS = {
    "RANK": "0",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "1",
    "WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "8361",
    "OMPI_COMM_WORLD_RANK": "0",
    "OMPI_COMM_WORLD_SIZE": "1",
    "PMI_RANK": "0",
    "PMI_SIZE": "1",
    "PALS_RANKID": "0",
    "PALS_SIZE": "1",
    "JSM_NAMESPACE_RANK": "0",
    "JSM_NAMESPACE_SIZE": "1",
    "FLUX_TASK_RANK": "0",
    "FLUX_JOB_SIZE": "1",
    "SLURM_PROCID": "0",
    "SLURM_STEP_NUM_TASKS": "1",
    "SLURM_STEP_NODELIST": "",
    "SLURM_JOB_ID": "0",
    "SLURM_STEP_ID": "0",
    "LWS_WORKER_INDEX": "0",
    "LWS_GROUP_SIZE": "1",
    "LWS_LEADER_ADDRESS": "",
    "JOB_COMPLETION_INDEX": "0",
    "GLOO_SOCKET_IFNAME": "",
    "TRITON_INTERPRET": "0",
    "PROMETHEUS_MULTIPROC_DIR": "",
    "COLUMNS": "",
}


def read(name: str) -> str:
    return os.environ.get(name) or (OURS[name] if name in OURS else OTHERS[name])


def number(name: str, at_least: int = 0) -> int:
    """What it says, if that is a whole number. Raises ValueError if not."""
    given = read(name)
    if not given.isdecimal() or int(given) < at_least:
        raise ValueError(f"{name} is {given!r}, want a whole number of at least {at_least}")
    return int(given)


def is_set(name: str) -> bool:
    return bool(os.environ.get(name))
