"""What the doctor says of places that are not made for ranks: the right thing, and what helps."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.cases.clock import scaled
from tests.cases.places import MAY_NOT, MEMFD_CREATE, PIDFD_OPEN, SECCOMP, why_not
from tokenyard.runtime import limits as memory_limits
from tokenyard.runtime import network as runtime_network
from tokenyard.tools import doctor
from tokenyard.tools.cli.app import COMMANDS
from tokenyard.tools.cli.group import make_app
from tokenyard.tools.doctor import gpus, limits, memory, network, processor, trial, versions
from tokenyard.tools.doctor.findings import BAD, OK, WARN, Finding

NOT_HERE = why_not()
CGROUPS = Path("/sys/fs/cgroup/memory")
CODE = """
import os, sys
{before}
from tokenyard.tools.cli.app import main
main(["doctor", "--json", *sys.argv[1:]])
"""


def run(*options: str, before: str = "", by: tuple[str, ...] = ()) -> tuple[int, list[Any]]:
    """The exit code of the doctor in a place, and its findings."""
    command = [*by, sys.executable, "-c", CODE.format(before=before), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=scaled(250), check=False)
    assert done.stdout, done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, [Finding(**one) for one in json.loads(done.stdout)["findings"]]


def one_of(found: list[Finding], part: str, level: str) -> Finding:
    return next(one for one in found if (one.part, one.level) == (part, level))


@pytest.mark.slow
@pytest.mark.processes
def test_without_permission_to_make_memory() -> None:
    code, found = run(before=f"{SECCOMP}\nrefuse({MEMFD_CREATE}, {MAY_NOT})")
    shared = one_of(found, memory.PART, BAD)
    assert code == 1
    assert "Operation not permitted" in shared.what
    assert "allow memfd_create in the container's seccomp profile" in shared.advice
    chosen = one_of(found, trial.PART, WARN)
    assert "1 node, collective over gloo" in chosen.what
    assert "ranks cannot share memory" in chosen.advice


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.skipif(NOT_HERE is not None, reason=str(NOT_HERE))
def test_without_a_route() -> None:
    by = ("unshare", "--net", "sh", "-c", 'ip link set lo up; exec "$@"', "sh")
    code, found = run("--quick", by=by)
    assert code == 0
    alone = one_of(found, network.PART, WARN)
    assert "no interface but the loopback" in alone.what
    assert "--network host" in alone.advice


@contextmanager
def small_cgroup(num_bytes: int) -> Iterator[Path]:
    folder = CGROUPS / f"tokenyard-doctor-{os.getpid()}"
    folder.mkdir()
    try:
        (folder / "memory.limit_in_bytes").write_text(str(num_bytes))
        yield folder
    finally:
        folder.rmdir()


@pytest.mark.processes
@pytest.mark.skipif(not os.access(CGROUPS, os.W_OK), reason="needs root and cgroup v1")
def test_with_little_memory() -> None:
    with small_cgroup(1200 << 20) as folder:
        into = f"open('{folder}/cgroup.procs', 'w').write(str(os.getpid()))"
        code, found = run("--quick", before=into)
    little = one_of(found, memory.PART, WARN)
    assert code == 0
    assert "as its cgroup has it" in little.what
    assert "docker run --memory" in little.advice
    assert "tokenyard size" in little.advice


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.skipif(NOT_HERE is not None, reason=str(NOT_HERE))
@pytest.mark.parametrize(
    "place",
    [
        (("unshare", "--net"), "", network.PART, BAD, "not even the loopback", "ip link set lo up"),
        (("prlimit", "--fsize=0"), "", limits.PART, BAD, "shared memory, of at most", "ulimit -f"),
        (("prlimit", "--nofile=64"), "", limits.PART, WARN, "open files", "ulimit -n 4096"),
        (
            (),
            f"{SECCOMP}\nrefuse({PIDFD_OPEN}, {MAY_NOT})",
            memory.PART,
            BAD,
            "cannot watch each other",
            "allow pidfd_open",
        ),
    ],
    ids=["no network", "no files", "few descriptors", "no pidfd"],
)
def test_places(place: tuple[tuple[str, ...], str, str, str, str, str]) -> None:
    by, before, part, level, what, advice = place
    code, found = run(before=before, by=by)
    assert code == any(one.level == BAD for one in found)
    told = [one for one in found if (one.part, one.level) == (part, level)]
    assert any(what in one.what and advice in one.advice for one in told), found


def test_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    def parts(*findings: Finding) -> None:
        monkeypatch.setattr(doctor, "PARTS", {"one": lambda: iter(findings)})

    good = Finding(OK, "a part", "all is well")
    parts(good, Finding(WARN, "a part", "it is slow", "do that"))
    app, runner = make_app(COMMANDS), CliRunner()
    said = runner.invoke(app, ["doctor", "--quick"])
    assert (said.exit_code, said.stderr.count("\n")) == (0, 1)
    assert said.stdout == (
        "a part\n  ok   all is well\n  warn it is slow\n       -> do that\n\n"
        "1 ok, 1 to look at, 0 bad\n"
    )
    parts(good, Finding(BAD, "a part", "it fails"))
    said = runner.invoke(app, ["doctor", "--quick", "--json"])
    assert said.exit_code == 1
    assert json.loads(said.stdout)["counts"] == {"ok": 1, "warn": 0, "bad": 1}


def test_nothing_is_tried_without_a_network(monkeypatch: pytest.MonkeyPatch) -> None:
    bad = Finding(BAD, network.PART, "no interface is up")
    monkeypatch.setattr(doctor, "PARTS", {network.PART: lambda: iter([bad])})
    assert [one.part for one in doctor.examine()] == [network.PART, trial.PART]


def test_here() -> None:
    """Every part finds something, and says what it is."""
    for name, look in doctor.PARTS.items():
        found = list(look())
        assert found, name
        assert all(one.part == name and one.what for one in found)
        assert all(one.advice for one in found if one.level != OK)


@pytest.mark.parametrize(
    "left, level, advice",
    [(64 << 20, BAD, "raise it"), (1 << 30, WARN, "raise it"), (8 << 30, OK, "")],
)
def test_memory_that_is_left(
    monkeypatch: pytest.MonkeyPatch, left: int, level: str, advice: str
) -> None:
    monkeypatch.setattr(memory_limits, "available", lambda: left)
    monkeypatch.setattr(memory, "_of_machine", lambda: 16 << 30)
    (found,) = memory._left()
    assert found.level == level
    assert found.advice.startswith(advice)


def test_ranks_that_do_not_see_each_other() -> None:
    """As a trial tells it: rank 1 warns, and both take two nodes."""
    buffer = "<tokenyard.Buffer rank 0 of 2 on 2 nodes, hierarchical>"
    why = "rank 1 is on the machine of rank 0 and cannot use its memory: /proc without hidepid"
    chosen = (logging.INFO, "transport: hierarchical, since ranks are on 2 nodes")
    (said,) = trial.judge(buffer, [chosen, (logging.WARNING, why)])
    assert said.level == WARN
    assert "take: 2 nodes, hierarchical, since ranks are on 2 nodes" in said.what
    assert said.advice == why


def test_limits() -> None:
    assert [one.level for one in limits._files(64)] == [WARN]
    assert [one.level for one in limits._files(None)] == [OK]
    assert [one.level for one in limits._threads(24)] == [WARN]
    assert [one.level for one in limits._sizes(0, 3 << 30)] == [BAD, WARN]
    assert not list(limits._sizes(None, None))


def test_cores_that_a_cgroup_grants(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processor, "_quota", lambda: 0.5)
    (found,) = processor._cores()
    assert found.level == WARN
    assert "its cgroup grants 0.5" in found.what
    assert "OMP_NUM_THREADS" in found.advice


def test_quotas(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = tmp_path / "cpu.max", tmp_path / "cpu.cfs_quota_us"
    monkeypatch.setattr(processor, "_QUOTAS", (str(first), str(second)))
    assert processor._quota() is None
    second.write_text("-1")
    (tmp_path / "cpu.cfs_period_us").write_text("100000")
    assert processor._quota() is None
    second.write_text("150000")
    assert processor._quota() == 1.5
    first.write_text("max 100000")
    assert processor._quota() is None
    first.write_text("200000 100000")
    assert processor._quota() == 2


def test_memory_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for node, cores in enumerate(("0-31", "32-63")):
        (tmp_path / f"node{node}").mkdir()
        (tmp_path / f"node{node}" / "cpulist").write_text(cores)
    monkeypatch.setattr(processor, "_NODES", tmp_path)
    (found,) = processor._memory_nodes()
    assert found.what == "2 memory nodes (NUMA), node0: cores 0-31; node1: cores 32-63"
    assert "numactl" in found.advice


def test_huge_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processor, "_HUGE", tmp_path)
    (tmp_path / "enabled").write_text("always madvise [never]")
    (found,) = processor._huge_pages()
    assert (found.level, "madvise >" in found.advice) == (WARN, True)


def gloo(monkeypatch: pytest.MonkeyPatch, name: str | None, address: str | None) -> Finding:
    """What is said of gloo on a host with lo and eth0, whose name has this address."""
    found = {"lo": ("127.0.0.1", True, True), "eth0": ("10.0.0.7", False, True)}

    def resolve(*_: Any) -> Any:
        if address is None:
            raise OSError(1, "unknown")
        return [(0, 0, 0, "", (address, 0))]

    monkeypatch.setattr(runtime_network, "interfaces", lambda: found)
    monkeypatch.setattr(runtime_network.socket, "getaddrinfo", resolve)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    if name is not None:
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", name)
    monkeypatch.setattr(network, "_has_default_route", lambda: True)
    (said,) = network.look()
    return said


def test_the_interface_of_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    assert gloo(monkeypatch, None, "10.0.0.7").what.startswith("gloo uses eth0: ")
    assert gloo(monkeypatch, "eth0", None).level == OK
    for address in ("127.0.1.1", "10.0.0.8", None):
        said = gloo(monkeypatch, None, address)
        assert said.level == WARN
        assert said.advice == "for several machines set GLOO_SOCKET_IFNAME=eth0"
    said = gloo(monkeypatch, "eth1", "10.0.0.7")
    assert said.level == BAD
    assert said.advice == "set GLOO_SOCKET_IFNAME to one of lo, eth0"


def test_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus.shutil, "which", lambda name: None)
    (said,) = gpus.look()
    assert (said.level, "there is no nvidia-smi" in said.what) == (OK, True)
    matrix = ["      GPU0  GPU1", "GPU0  X  SYS", "GPU1 SYS X"]
    answers = {"topo": matrix, "--query-gpu=name,memory.total": ["A, 80 GB", "A, 80 GB"]}
    monkeypatch.setattr(gpus.shutil, "which", lambda name: name)
    monkeypatch.setattr(gpus, "_ask", lambda tool, what, *rest: answers[what])
    monkeypatch.setattr(gpus.torch.version, "cuda", None)
    assert [one.level for one in gpus.look()] == [OK, WARN, WARN]


def test_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions.importlib.metadata, "requires", lambda name: ["torch>=99.1"])
    bad = [one for one in versions.look() if one.level == BAD]
    assert len(bad) == 1
    assert "want >=99.1" in bad[0].what
    assert "pip install 'torch>=99.1'" in bad[0].advice
