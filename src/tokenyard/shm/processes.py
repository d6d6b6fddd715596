"""How ranks of one machine reach each other's processes.

What stands for a process in the words that ranks tell each other is its *process address*, one
int64. By default that is its pid, and its descriptors are found in /proc/<pid>/fd. Containers hide
their processes from each other; there TOKENYARD_SHARED_FOLDER names a folder that they share, and
the address is a random number, which no other process ever has: that of a socket in the folder. A
thread of the process serves its open segments there, and a pidfd, by which its death is seen.

Each end asks the kernel which user the other one is, and there are no answers for another user. A
socket that a killed process left behind refuses whoever comes.
"""

from __future__ import annotations

import atexit
import errno
import logging
import os
import secrets
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import Any

from tokenyard.runtime import variables

_log = logging.getLogger("tokenyard")
_ITSELF = 0  # asks for a pidfd, where else the identity of a segment is
_LATE = 1.0  # seconds after which a process that connected and asked nothing is sent away
_NO_DESCRIPTOR = 0.01  # seconds until a thread that has none left looks again

# Calls step() until it returns 0. Raises an error if that takes too long.
Wait = Callable[[Callable[[], int]], None]


# Segments of this process whose descriptors are open, by identity.
own_segments: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_listening: dict[str, socket.socket] = {}  # by path


class Gone(OSError):
    """A peer's segment no longer exists: its owner has closed it, or has died."""


def label(identity: int) -> str:
    """What a segment's file is called."""
    return f"tokenyard-{identity:x}"


def own_address() -> int:
    """The process address of this process."""
    folder = variables.read("TOKENYARD_SHARED_FOLDER")
    return _listen(folder) if folder else os.getpid()


def is_in_folder(process: int) -> bool:
    """Whether a process listens in a shared folder (no pid has so many bits)."""
    return process >> 32 > 0


def place(process: int) -> str:
    """Where this process finds another: what is there belongs to the user of that process."""
    if is_in_folder(process):
        return os.path.join(variables.read("TOKENYARD_SHARED_FOLDER"), f"tokenyard-{process:x}")
    return f"/proc/{process}"


def within(seconds: float) -> Wait:
    """Wait for so long, then raise TimeoutError."""

    def wait(step: Callable[[], int]) -> None:
        deadline = time.monotonic() + seconds
        while step():
            if time.monotonic() > deadline:
                raise TimeoutError(errno.ETIMEDOUT, f"no answer within {seconds:g} s")
            time.sleep(1e-4)

    return wait


def open_segment(process: int, fd: int, identity: int, wait: Wait) -> int:
    """A descriptor of a peer's segment. Raises Gone if there is no such segment, or no process."""
    if is_in_folder(process):
        return _checked(_ask(process, identity, wait), identity)
    theirs = f"/proc/{process}/fd/{fd}"
    try:
        if not _is_of(theirs, identity):  # checked first: opening a socket, say, would fail
            raise Gone("another file has its descriptor")
        return _checked(os.open(theirs, os.O_RDWR | os.O_CLOEXEC), identity)
    except (FileNotFoundError, ProcessLookupError) as error:
        raise Gone(str(error)) from error


def watch(process: int, wait: Wait) -> int:
    """A pidfd of a process, which can be read when that has died."""
    return _ask(process, _ITSELF, wait) if is_in_folder(process) else os.pidfd_open(process)


def _is_of(link: str, identity: int) -> bool:
    return os.readlink(link) == f"/memfd:{label(identity)} (deleted)"


def _checked(mine: int, identity: int) -> int:
    """A descriptor of this process, if it is that of a segment. Closes it and raises Gone if not:
    its number may have been given to another file just before this process got it.
    """
    good = False
    try:
        good = _is_of(f"/proc/self/fd/{mine}", identity)
    finally:
        if not good:
            os.close(mine)
    if not good:
        raise Gone("another file has its descriptor by now")
    return mine


def _ask(process: int, wanted: int, wait: Wait) -> int:
    """A descriptor that the process serves."""
    left, answer, got = 2, b"", list[tuple[int, int, bytes]]()

    def step() -> int:
        nonlocal left, answer, got
        with suppress(BlockingIOError):  # it has many to answer, or is busy
            if left == 2:
                end.connect(place(process))
                _check_user(end)
                end.send(struct.pack("q", wanted))
                left = 1
            if left == 1:
                # Not recv_fds, which drops this flag.
                answer, got, *_ = end.recvmsg(4, socket.CMSG_LEN(4), socket.MSG_CMSG_CLOEXEC)
                left = 0
        return left

    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as end:
        end.setblocking(False)
        try:
            wait(step)
        except (FileNotFoundError, ConnectionError) as error:
            raise Gone(str(error)) from error
    if not answer:
        raise Gone("its process has ended")
    (number,) = struct.unpack("i", answer)
    if number in (errno.ENOENT, errno.EBADF):
        raise Gone("its owner has closed it")
    if number == errno.EPERM:
        raise PermissionError(number, os.strerror(number))
    if number:
        raise OSError(errno.EREMOTEIO, f"its owner cannot give it: {os.strerror(number)}")
    if not got:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    return int(struct.unpack("i", got[0][2])[0])


def _check_user(end: socket.socket) -> None:
    """Raise PermissionError unless the process at the other end is of this one's user."""
    told = end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    _, user, _ = struct.unpack("iIi", told)
    if user != os.geteuid() or _stands_for_strangers(user):
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))


def _stands_for_strangers(user: int) -> bool:
    """Whether it is what this process's user namespace calls users that it does not know."""
    with open("/proc/sys/kernel/overflowuid") as stranger, open("/proc/self/uid_map") as known:
        return user == int(stranger.read()) and known.read().split() != ["0", "0", "4294967295"]


@cache
def _listen(folder: str) -> int:
    """Listen in this folder from now on: the process address that says so, or the pid if it cannot
    be done.
    """
    address = secrets.randbits(62) | 1 << 62
    path = place(address)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        os.fchmod(listener.fileno(), 0o600)  # its file has no other mode at any time
        listener.bind(path)
        listener.listen(socket.SOMAXCONN)
        name = "tokenyard-descriptors"
        threading.Thread(target=_serve, args=(listener,), daemon=True, name=name).start()
    except (OSError, RuntimeError) as error:  # RuntimeError: a limit on threads
        _log.warning(
            "TOKENYARD_SHARED_FOLDER=%s: this rank cannot listen there (%s), so ranks whose "
            "processes it does not see count as other nodes",
            folder,
            error,
        )
        listener.close()
        with suppress(OSError):
            os.unlink(path)
        return os.getpid()
    _listening[path] = listener
    os.register_at_fork(after_in_child=_let_go)
    return address


@atexit.register
def _remove() -> None:
    for path in _listening:
        with suppress(OSError):
            os.unlink(path)


def _let_go() -> None:
    """In a forked child: the sockets are the parent's."""
    for listener in _listening.values():
        listener.close()
    _listening.clear()
    _listen.cache_clear()


def _serve(listener: socket.socket) -> None:
    while True:
        try:
            asker, _ = listener.accept()
        except OSError:  # no descriptor is left
            time.sleep(_NO_DESCRIPTOR)
            continue
        with asker, suppress(OSError):
            asker.settimeout(_LATE)
            _answer(asker)


def _answer(asker: socket.socket) -> None:
    question = asker.recv(8)
    number, mine = 0, []
    try:
        _check_user(asker)
        mine.append(_wanted(*struct.unpack("q", question)))
    except (OSError, struct.error) as error:
        number = getattr(error, "errno", None) or errno.ENOENT
    try:
        socket.send_fds(asker, [struct.pack("i", number)], mine)
    finally:
        for fd in mine:
            os.close(fd)


def _wanted(identity: int) -> int:
    if identity == _ITSELF:
        return os.pidfd_open(os.getpid())
    segment = own_segments.get(identity)
    if segment is None:
        raise FileNotFoundError(errno.ENOENT, "closed")
    return _checked(os.dup(segment.fd), identity)  # it may be closed at this moment
