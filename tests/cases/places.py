"""Ranks in a place that is not made for them: what it is, and how they get there."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from tests.cases.clock import scaled
from tests.cases.programs import launched

RANK = """
import os, sys
{before}
import torch, tokenyard
group = tokenyard.local_group()
x, (weights, idx) = torch.ones(4, 8), torch.rand(4, 16).topk(2)
with tokenyard.Buffer(group, timeout=30) as buffer:
    got = buffer.dispatch(x, topk_idx=idx, topk_weights=weights, num_experts=16)
    out = buffer.combine(got.recv_x, got.handle).x
    if out.shape != x.shape or not (out >= 1).all():
        sys.exit("wrong sums")
    print(buffer)
"""

NOBODY = ("setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups")

# A system call fails with this number: a filter that the kernel runs before every call.
SECCOMP = """
import ctypes, struct
def refuse(call, error):
    # load the call's number; if it is this one return the error, else allow
    ends = [(0x06, 0, 0, 0x50000 | error), (0x06, 0, 0, 0x7fff0000)]
    code = [(0x20, 0, 0, 0), (0x15, 0, 1, call), *ends]
    filter = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *one) for one in code))
    given = struct.pack("HxxxxxxP", len(code), ctypes.addressof(filter))
    program = ctypes.create_string_buffer(given)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(38, 1, 0, 0, 0) or libc.prctl(22, 2, ctypes.byref(program)):
        sys.exit("no seccomp here")
"""
MEMFD_CREATE, PIDFD_OPEN, MAY_NOT = 319, 434, 1
SET_DUMPABLE = 4

# No such system is at hand: Linux without what the other lacks stands for it, once torch and Numba,
# which ask where they are, have been imported.
MACOS = """
import signal, socket
import torch.distributed, numba
for module, name in ((os, "memfd_create"), (os, "pidfd_open"), (os, "sched_getaffinity"),
                     (os, "eventfd"), (os, "setns"), (signal, "pidfd_send_signal")):
    if hasattr(module, name):
        delattr(module, name)
sys.platform = "darwin"
"""
WINDOWS = f"""{MACOS}
import mmap
sys.modules["fcntl"] = sys.modules["resource"] = None
for name in ("geteuid", "getuid", "register_at_fork", "sysconf", "killpg"):
    delattr(os, name)
for name in [name for name in dir(mmap) if name.startswith(("PROT_", "MAP_", "MADV_"))]:
    delattr(mmap, name)
del socket.AF_UNIX
sys.platform = "win32"
"""


@dataclass(frozen=True, kw_only=True)
class Place:
    """How ranks are started, and what comes of it."""

    num_ranks: int = 2
    way: str = "1 node, direct"  # how rows travel there
    said: Sequence[str] = ()  # what one of the ranks says, in one line
    by: Callable[[int], Sequence[str]] = lambda rank: ()  # a command that starts a rank
    settings: Mapping[str, str | None] = field(default_factory=dict)
    limit: tuple[int, int] | None = None
    flags: Sequence[str] = ()
    before: str = ""
    fails: bool = False  # on all ranks, and one of them says why


def in_namespace(script: str, *kinds: str) -> Callable[[int], Sequence[str]]:
    """Rank by rank, in namespaces of its own, after a script."""
    kinds = kinds or ("--mount",)
    return lambda rank: ["unshare", *kinds, "sh", "-c", f'{script} && exec "$@"', "sh"]


READ_ONLY = (
    "mount --make-rprivate / && mount -o bind / / && mount -o remount,bind,ro / && "
    'for one in $(cut -d" " -f2 /proc/self/mounts | grep -v "^/proc\\|^/dev\\|^/sys\\|^/$"); do '
    "mount -o remount,bind,ro $one 2>/dev/null; done; true"
)

PLACES = {
    "python -O": Place(flags=["-O"]),
    "python -OO": Place(flags=["-OO"]),
    "another user, who may write nothing": Place(
        by=lambda rank: NOBODY, settings={"HOME": "/nonexistent"}
    ),
    "a read-only root": Place(by=in_namespace(READ_ONLY)),
    "two users": Place(
        by=lambda rank: NOBODY if rank else (),
        settings={"HOME": "/nonexistent"},
        way="2 nodes, hierarchical",
        said=["cannot use its memory", "which is of user 0, while this one is of user 65534"],
    ),
    "two users with a folder": Place(
        by=lambda rank: NOBODY if rank else (),
        settings={"HOME": "/nonexistent", "TOKENYARD_SHARED_FOLDER": "/tmp"},
        way="2 nodes, hierarchical",
        said=["Permission denied for /tmp/", "is of user 0, while this one is of user 65534"],
    ),
    "two containers": Place(
        by=lambda rank: ["unshare", "--pid", "--fork", "--mount-proc"],
        way="2 nodes, hierarchical",
        said=["cannot use its memory", "let ranks share a PID namespace"],
    ),
    "processes are hidden": Place(
        by=lambda rank: [
            *in_namespace("mount -t proc -o hidepid=2 none /proc", "--mount", "--pid", "--fork")(0),
            *NOBODY,
        ],
        settings={"HOME": "/nonexistent"},
        way="2 nodes, hierarchical",
        said=["/proc without hidepid"],
    ),
    "no /proc": Place(
        by=in_namespace("mount -t tmpfs none /proc"),
        way="1 node, collective over gloo",
        said=["ranks cannot share memory", "/proc is not mounted"],
    ),
    "no memfd": Place(
        before=f"{SECCOMP}\nrefuse({MEMFD_CREATE}, {MAY_NOT})",
        way="1 node, collective over gloo",
        said=["ranks cannot share memory", "Operation not permitted"],
    ),
    "connections that close late": Place(
        before=f"{SECCOMP}\nrefuse({MEMFD_CREATE}, {MAY_NOT})\n"
        "from tokenyard.comm import torch_dist\ntorch_dist._LET_GO = 0",
        way="1 node, collective over gloo",
    ),
    "no pidfd": Place(
        before=f"{SECCOMP}\nrefuse({PIDFD_OPEN}, {MAY_NOT})",
        way="1 node, collective over gloo",
        said=["cannot watch the other ranks", "Operation not permitted"],
    ),
    "not to be looked into": Place(
        by=lambda rank: NOBODY,
        settings={"HOME": "/nonexistent"},
        before=f"import ctypes\nctypes.CDLL(None).prctl({SET_DUMPABLE}, 0, 0, 0, 0)",
        way="2 nodes, hierarchical",
        said=["cannot use its memory", "Permission denied", "the same security profile"],
    ),
    "24 threads": Place(
        by=lambda rank: NOBODY,
        settings={"HOME": "/nonexistent"},
        limit=(resource.RLIMIT_NPROC, 24),
    ),
    "2 threads": Place(
        num_ranks=1,
        by=lambda rank: NOBODY,
        settings={"HOME": "/nonexistent"},
        limit=(resource.RLIMIT_NPROC, 2),
        said=["cannot start its threads", "`ulimit -u`"],
        fails=True,
    ),
    "a mock of macOS": Place(before=MACOS, way="1 node, collective over gloo"),
    "a mock of Windows": Place(before=WINDOWS, way="1 node, collective over gloo"),
    "64 descriptors": Place(limit=(resource.RLIMIT_NOFILE, 64)),
    "no file above 0 bytes": Place(
        limit=(resource.RLIMIT_FSIZE, 0),
        way="1 node, collective over gloo",
        said=["ranks cannot share memory", "raise its limit with `ulimit -f`"],
    ),
    "3 GiB of addresses": Place(limit=(resource.RLIMIT_AS, 3 << 30)),
    "no locked memory": Place(limit=(resource.RLIMIT_MEMLOCK, 0)),
    "no home": Place(settings={"HOME": None, "XDG_CACHE_HOME": None, "USER": None}),
    "no folder for temporary files": Place(settings={"TMPDIR": "/nonexistent"}),
    "a plain locale": Place(settings={"LANG": "C", "LC_ALL": "C", "PYTHONUTF8": "0"}),
    "no standard input": Place(before="os.close(0)"),
    "no standard error": Place(before="os.close(2)"),
}


def run(place: Place) -> list[tuple[str, str, int]]:
    """What each of the ranks printed, what it said, and how it ended."""
    ranks = []
    for rank, launch in enumerate(launched(place.num_ranks)):
        settings: dict[str, str | None] = {**os.environ, **launch, **place.settings}
        rank_code = RANK.format(before=place.before)
        command = [*place.by(rank), sys.executable, *place.flags, "-c", rank_code]
        if place.limit is not None:
            what, most = place.limit
            command = ["prlimit", f"--{_LIMITS[what]}={most}", *command]
        ranks.append(
            subprocess.Popen(
                command,
                env={name: value for name, value in settings.items() if value is not None},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    try:
        return [(*rank.communicate(timeout=scaled(150)), rank.returncode) for rank in ranks]
    finally:
        for process in ranks:
            process.kill()
            process.wait()


_LIMITS = {
    resource.RLIMIT_NOFILE: "nofile",
    resource.RLIMIT_FSIZE: "fsize",
    resource.RLIMIT_AS: "as",
    resource.RLIMIT_MEMLOCK: "memlock",
    resource.RLIMIT_NPROC: "nproc",
}


def why_not() -> str | None:
    """Why places cannot be made here."""
    if os.geteuid() != 0:
        return "needs root"
    for tool in ("unshare", "setpriv", "prlimit"):
        if shutil.which(tool) is None:
            return f"needs {tool}"
    done = subprocess.run(
        [*NOBODY, sys.executable, "-c", "import tokenyard"], capture_output=True, check=False
    )
    return None if done.returncode == 0 else "other users cannot read this Python"
