"""Descriptors of processes that do not see each other, by sockets in a folder."""

from __future__ import annotations

import os
import select
import shutil
import signal
import socket
import stat
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tokenyard
from tests.cases.clock import scaled
from tests.cases.programs import run_python
from tokenyard.errors import SharedMemoryError
from tokenyard.shm import attached, processes
from tokenyard.shm.processes import Gone, within
from tokenyard.shm.segment import Segment, attach, why_not_attached
from tokenyard.testing import Exited, Processes

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Linux has descriptors to pass on")
as_root = pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() != 0 or shutil.which("unshare") is None,
    reason="only root may become another user, and needs unshare",
)
NOBODY = 65534

OWNER = """
import os, sys
from tokenyard.shm import processes
from tokenyard.shm.segment import Segment
os.setuid({user})
one = Segment(8192)
one.array()[:] = 7
print(processes.own_address(), *one.told, flush=True)
sys.stdin.readline()
one.close()
print("closed", flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where every user may make files; this process and those that it starts listen there."""
    with tempfile.TemporaryDirectory(prefix="tokenyard-") as name:
        os.chmod(name, 0o1777)
        monkeypatch.setenv("TOKENYARD_SHARED_FOLDER", name)
        yield Path(name)


@contextmanager
def owner(*by: str, user: int = 0) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """A process that has a segment, and what it tells of it."""
    code = OWNER.format(user=user)
    with subprocess.Popen(
        [*by, sys.executable, "-c", code], stdin=-1, stdout=-1, text=True
    ) as process:
        try:
            assert process.stdout is not None
            yield process, [int(word) for word in process.stdout.readline().split()]
        finally:
            process.kill()


def mapped(told: list[int], seconds: float) -> np.ndarray:
    process, fd, num_bytes, identity = told
    return attach(process, fd, num_bytes, identity, within(seconds))


def stopped_within(seconds: float, work: Callable[[], Any]) -> str:
    begin = time.monotonic()
    with pytest.raises(OSError) as caught:
        work()
    assert time.monotonic() - begin < scaled(seconds)
    return str(caught.value)


def test_nobody_waits_to_be_let_in(folder: Path) -> None:
    """Where many wait already, and the one who listens stands still."""
    address = 1 << 62
    ends = [socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(2)]
    ends[0].bind(processes.place(address))
    ends[0].listen(0)
    ends[1].connect(processes.place(address))
    said = stopped_within(2, lambda: mapped([address, 3, 4096, 5], 0.2))
    assert said == "[Errno 110] no answer within 0.2 s"
    for end in ends:
        end.close()


def is_still(victim: int) -> bool:
    """Whether all threads of a process have been stopped, or are dead."""
    with suppress(FileNotFoundError, ProcessLookupError):
        tasks = [one.read_text() for one in Path(f"/proc/{victim}/task").glob("*/stat")]
        return all(one.rsplit(")", 1)[1].split()[0] in "TXZ" for one in tasks)
    return False


@as_root
def test_a_process_of_another_namespace_lends_what_it_has_open(folder: Path) -> None:
    with owner("unshare", "--pid", "--fork", "--mount-proc", "--kill-child") as (process, told):
        address = told[0]
        (child,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        theirs = mapped(told, scaled(10))
        assert (len(theirs), set(theirs.tolist())) == (8192, {7})
        pidfd = processes.watch(address, within(scaled(10)))
        lives = select.poll()
        lives.register(pidfd, select.POLLIN)
        assert not os.get_inheritable(pidfd)

        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.stdout.readline() == "closed\n"
        with pytest.raises(Gone, match="its owner has closed it"):
            mapped(told, scaled(10))
        assert (theirs == 7).all()

        os.kill(int(child), signal.SIGSTOP)
        while not is_still(int(child)):
            time.sleep(0.001)
        said = stopped_within(2, lambda: mapped(told, 0.2))
        assert said == "[Errno 110] no answer within 0.2 s"
        assert lives.poll(0) == []
        os.kill(int(child), signal.SIGKILL)
        ((_, event),) = lives.poll(scaled(5000))
        assert event & select.POLLIN
        os.close(pidfd)
        with pytest.raises(Gone, match="refused"):
            mapped(told, scaled(10))
        assert folder.joinpath(f"tokenyard-{address:x}").exists()  # which harms nobody


@as_root
def test_each_end_refuses_another_user(folder: Path) -> None:
    one = Segment(4096)
    words = processes.own_address(), one.fd, one.identity
    code = "import os\nfrom tokenyard.shm.segment import why_not_attached as why\nos.setuid({})\n"
    code += f"print(why(10, *{words}))"
    said = run_python("-c", code.format(NOBODY)).stdout
    assert "Permission denied for " in said
    assert "is of user 0, while this one is of user 65534; run all ranks as one user" in said
    assert run_python("-c", code.format(0)).stdout == "None\n"
    one.close()

    with owner(user=NOBODY) as (_, (address, fd, _, identity)):
        reason = why_not_attached(10, address, fd, identity)
        assert reason is not None  # root may connect, and asks who that is
        assert "Operation not permitted for " in reason
        assert "is of user 65534, while this one is of user 0; run all ranks as one user" in reason
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as end:
            end.connect(processes.place(address))
            end.send(struct.pack("q", identity))
            answer, got, *_ = socket.recv_fds(end, 4, 1)
        assert (struct.unpack("i", answer), got) == ((1,), [])  # EPERM


@as_root
def test_a_user_that_a_namespace_does_not_know_is_nobodys_equal(folder: Path) -> None:
    """In a user namespace that knows no user, all are 65534: the process itself, and this one."""
    one = Segment(4096)
    code = "import os\nfrom tokenyard.shm.segment import why_not_attached as why\n"
    code += f"print(os.geteuid(), why(10, *{(processes.own_address(), one.fd, one.identity)}))"
    unshared = ["unshare", "--user", sys.executable, "-c", code]
    said = subprocess.run(unshared, capture_output=True, text=True, timeout=scaled(60), check=True)
    one.close()
    assert said.stdout.startswith(f"{NOBODY} Operation not permitted for ")


def test_its_socket_is_its_users_and_goes_at_exit(folder: Path) -> None:
    code = f"""
import os, stat, threading
from tokenyard.shm import processes
os.environ["TOKENYARD_SHARED_FOLDER"] = ""
assert processes.own_address() == os.getpid() and threading.active_count() == 1
os.environ["TOKENYARD_SHARED_FOLDER"] = {str(folder)!r}
assert processes.own_address() == processes.own_address() > os.getpid()
assert threading.active_count() == 2
print(*(oct(one.stat().st_mode) for one in os.scandir({str(folder)!r})))
"""
    done = run_python("-c", f"import os; os.umask(0)\n{code}")
    assert (done.stdout, done.stderr) == (f"{oct(stat.S_IFSOCK | 0o600)}\n", "")
    assert list(folder.iterdir()) == []


def test_a_forked_child_does_not_answer_for_its_parent(folder: Path) -> None:
    code = """
import os, sys, time
from tokenyard.shm import processes
from tokenyard.shm.segment import Segment
one = Segment(4096)
mine = processes.own_address()
if os.fork() == 0:
    assert processes.own_address() != mine
    print(mine, *one.told, flush=True)
    sys.stdin.readline()
    sys.exit()
time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdin=-1, stdout=-1, text=True) as parent:
        assert parent.stdin is not None
        assert parent.stdout is not None
        told = [int(word) for word in parent.stdout.readline().split()]
        assert len(mapped(told, scaled(10))) == 4096
        parent.kill()
        parent.wait()
        with pytest.raises(Gone, match=r"refused|reset"):
            mapped(told, scaled(10))
        parent.stdin.close()  # the child ends, and takes its own socket along
        assert parent.stdout.read() == ""
    assert [one.name for one in folder.iterdir()] == [f"tokenyard-{told[0]:x}"]


def test_who_asks_nothing_and_who_asks_for_nonsense_hold_nobody_up(folder: Path) -> None:
    one = Segment(4096)
    address = processes.own_address()
    path = processes.place(address)
    ends = [socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(3)]
    for end in ends:
        end.settimeout(scaled(10))
        end.connect(path)
    ends[0].send(b"abc")
    ends[1].send(struct.pack("q", 12345))
    assert ends[0].recv(4) == ends[1].recv(4) == struct.pack("i", 2)  # ENOENT
    assert len(attach(address, *one.told, within(scaled(10)))) == 4096
    assert ends[2].recv(4) == b""
    for end in ends:
        end.close()
    one.close()


class Strike:
    """In the place of `attach`: strikes the owner just before it is asked, and notes what came."""

    def __init__(self, victim: int, number: int) -> None:
        self.victim, self.number, self.real = victim, number, attached.attach
        self.moment, self.met = 0.0, ""

    def __call__(self, *args: Any) -> Any:
        self.moment = self.moment or time.monotonic()
        os.kill(self.victim, self.number)
        while not is_still(self.victim):
            time.sleep(0.001)
        try:
            return self.real(*args)
        except Exception as error:
            self.met = type(error).__name__
            raise

    def end(self) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.victim, signal.SIGKILL)


def struck(group: Any, folder: str, victim: int, number: int) -> tuple[str, Any, str, float]:
    """What rank 0 is told when rank 1 is struck, by which call, and after how long."""
    os.environ["TOKENYARD_SHARED_FOLDER"] = folder
    strike, ids = Strike(victim, number), torch.arange(2).repeat(4096, 1)
    try:
        with tokenyard.Buffer(group, timeout=scaled(1.5)) as buffer:
            for turn in range(12):
                if turn == 2 and group.rank() == 0:
                    attached.attach = strike  # type: ignore[assignment]
                few, weights = ids[: 2**turn], torch.ones(2**turn, 2)
                x = torch.ones(len(few), 512)
                buffer.dispatch(x, topk_idx=few, topk_weights=weights, num_experts=2)
    except tokenyard.PeerError as error:
        return type(error).__name__, error.ranks, strike.met, time.monotonic() - strike.moment
    finally:
        strike.end()
    raise AssertionError("nothing happened")


def struck_where_ranks_may_shrink(group: Any, folder: str, victim: int, number: int) -> Any:
    os.environ["TOKENYARD_SHARED_FOLDER"] = folder
    strike, masks = Strike(victim, number), torch.zeros(2, dtype=torch.int32)
    x, ids = torch.ones(4, 128, dtype=torch.bfloat16), torch.arange(2).repeat(4, 1)
    options: dict[str, Any] = {"low_latency_mode": True, "enable_shrink": True}
    try:
        with tokenyard.Buffer(group, timeout=scaled(1.5), **options) as buffer:
            if group.rank() == 0:
                attached.attach = strike  # type: ignore[assignment]
            for _ in range(3):
                buffer.low_latency_dispatch(x, ids, 4, 2)
            buffer.low_latency_query_mask_buffer(masks)
    finally:
        strike.end()
    return masks.tolist(), strike.met


def run_struck(job: Callable[..., Any], folder: Path, number: int) -> Any:
    with Processes(2, timeout=scaled(60)) as ranks:
        victim = ranks.processes[1].pid
        told, end = ranks.run(job, str(folder), victim, number, may_die=True)
    assert end == Exited(-signal.SIGKILL)
    return told


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_who_is_struck_while_it_is_asked_is_named(folder: Path, number: signal.Signals) -> None:
    kind, culprits, met, seconds = run_struck(struck, folder, number)
    is_dead = number == signal.SIGKILL
    assert (kind, culprits) == ("PeerDied" if is_dead else "PeerTimeout", (1,))
    assert met in (("Gone", "PeerDied") if is_dead else ("PeerTimeout",))
    assert seconds < scaled(1 if is_dead else 4)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_who_is_struck_while_it_is_asked_is_left_out(folder: Path, number: signal.Signals) -> None:
    masks, met = run_struck(struck_where_ranks_may_shrink, folder, number)
    assert masks == [0, 1]
    assert met in ("Gone", "PeerDied", "PeerTimeout")


def test_descriptors_that_run_out_are_an_error_until_there_are_some(folder: Path) -> None:
    lacking = """
import os, resource
most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (64, most))
taken = []
try:
    while True:
        taken.append(os.dup(0))
except OSError:
    pass
"""
    with owner() as (_, told):
        code = f"""
from tokenyard.shm.processes import within
from tokenyard.shm.segment import SharedMemoryError, attach
{lacking}
for _ in range(2):
    try:
        attach(*{told}, within(10))
    except SharedMemoryError as error:
        print(error)
    os.close(taken.pop())
"""
        done = run_python("-c", code)
    assert done.stdout.count("raise its limit with `ulimit -n`\n") == 2, done

    code = f"""
import sys
from tokenyard.shm.processes import own_address
from tokenyard.shm.segment import Segment
one = Segment(4096)
print(own_address(), *one.told, flush=True)
{lacking}
print("lacks", flush=True)
sys.stdin.readline()
for _ in range(4):
    os.close(taken.pop())
print("has some", flush=True)
sys.stdin.readline()
"""
    with subprocess.Popen([sys.executable, "-c", code], stdin=-1, stdout=-1, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        told = [int(word) for word in process.stdout.readline().split()]
        assert process.stdout.readline() == "lacks\n"
        # If it could accept, it says why it cannot answer.
        match = r"its owner cannot give it: Too many open|no answer within"
        with pytest.raises((SharedMemoryError, TimeoutError), match=match):
            mapped(told, 1)
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.stdout.readline() == "has some\n"
        assert len(mapped(told, scaled(10))) == 4096
        process.stdin.close()
