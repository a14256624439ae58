"""Stands between an agent and one engine process, so that nothing of it is ever left behind.

Run as a script with one argument, a JSON object (see `Command.order` in `supervised_process`); it
uses the standard library alone, so that it starts in a moment and weighs little. It
- starts the command in a process group of its own, on the cores it is given;
- writes what the command says to a log file that is rotated;
- ends the command when told to (`term` or `kill` on its standard input), and, with all its descendants,
  when its standard input closes: that is, when the agent has ended, however it ended;
- says `pid N` on its standard output at the beginning and `exit CODE` at the end, where CODE is the
  command's exit code, or 128 plus the signal that ended it.
The command itself is killed by the kernel should this process be killed.
"""

import contextlib
import ctypes
import json
import os
import select
import signal
import sys
import time

# Numbers of prctl(2), which Python's library has no names for.
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
_LINUX = sys.platform.startswith("linux")
# How long the last words of a command, and the end of what it left behind, are waited for.
_DRAIN_S = 0.5


def _prctl(option: int, value: int) -> None:
    if _LINUX:
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def descendants(root: int) -> list[int]:
    """Return the processes below `root`, nearest first (Linux; elsewhere none)."""
    parents: dict[int, list[int]] = {}
    for name in os.listdir("/proc") if _LINUX else ():
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as stream:
                # The name of the command may hold anything, brackets included.
                fields = stream.read().rpartition(b")")[2].split()
        except OSError:
            continue
        parents.setdefault(int(fields[1]), []).append(int(name))
    pids: list[int] = []
    level = [root]
    while level:
        level = [child for parent in level for child in parents.get(parent, ())]
        pids += level
    return pids


class RotatingLog:
    """A file that never grows past `max_bytes`; `keep` older ones are kept beside it.

    Every line begins with `mark`.
    """

    def __init__(self, path: str, max_bytes: int, keep: int, mark: str = "") -> None:
        self._path, self._max_bytes, self._keep = path, max_bytes, keep
        self._mark, self._inside = mark.encode(), False
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115  held for as long as we live
        self._size = self._file.tell()

    def write(self, data: bytes) -> None:
        """Add to the file; a full disk loses lines and nothing else."""
        data = self._with_marks(data)
        while data:
            room = self._max_bytes - self._size
            if len(data) <= room:
                piece = data
            else:
                # Lines stay whole, unless one alone is too long.
                piece = data[: data.rfind(b"\n", 0, max(0, room)) + 1]
                if not piece and not self._size:
                    piece = data[: self._max_bytes]
            if not piece:
                self._rotate()
                continue
            with contextlib.suppress(OSError):
                self._file.write(piece)
            self._size += len(piece)
            data = data[len(piece) :]

    def _with_marks(self, data: bytes) -> bytes:
        """Put the mark at the beginning of each line; what comes may begin and end inside one."""
        if not self._mark or not data:
            return data
        ends = data.endswith(b"\n")
        lines = data[:-1] if ends else data
        marked = lines.replace(b"\n", b"\n" + self._mark) + (b"\n" if ends else b"")
        first, self._inside = (b"" if self._inside else self._mark), not ends
        return first + marked

    def close(self) -> None:
        """Write no more."""
        self._file.close()

    def _rotate(self) -> None:
        self._file.close()
        with contextlib.suppress(OSError):
            # The oldest moves first, so that none is overwritten.
            for number in range(self._keep - 1, 0, -1):
                if os.path.exists(f"{self._path}.{number}"):
                    os.replace(f"{self._path}.{number}", f"{self._path}.{number + 1}")
            if self._keep:
                os.replace(self._path, f"{self._path}.1")
        # Emptied even where it could not be moved: the limit on its size comes first.
        self._file = open(self._path, "wb", buffering=0)  # noqa: SIM115
        self._size = 0


class Supervisor:
    """The loop: orders, output and the end of the command."""

    def __init__(self, order: dict[str, object]) -> None:
        self._command = [str(part) for part in order["command"]]  # type: ignore[attr-defined]
        self._module = order.get("module")
        self._cpus = [int(cpu) for cpu in order["cpus"]]  # type: ignore[attr-defined]
        self._term_s = float(order["term_s"])  # type: ignore[arg-type]
        self._log = RotatingLog(
            str(order["log"]),
            int(order["log_bytes"]),  # type: ignore[call-overload]
            int(order["log_keep"]),  # type: ignore[call-overload]
            str(order["mark"]),
        )
        self._kill_at_s: float | None = None
        self._code: int | None = None
        self._orders = b""

    def run(self) -> int:
        """Start the command, watch it to its end, and return its exit code."""
        # Descendants whose parent has ended become children of this process, where they can be found.
        _prctl(PR_SET_CHILD_SUBREAPER, 1)
        # Signals arrive as bytes of a pipe, so that a single select waits for everything.
        wake_read, wake_write = os.pipe()
        os.set_blocking(wake_write, False)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            # A handler that does nothing: by default these would end the process, or never reach the pipe.
            signal.signal(number, lambda *_: None)
        output, self._pid = self._start()
        self._say(f"pid {self._pid}")
        os.set_blocking(output, False)
        watched = [0, output, wake_read]
        while self._code is None:
            wait_s = (
                None if self._kill_at_s is None else max(0.0, self._kill_at_s - time.monotonic())
            )
            ready, _, _ = select.select(watched, [], [], wait_s)
            if 0 in ready and not self._listen():
                watched.remove(0)
                self.stop()
            if output in ready and not self._copy(output):
                watched.remove(output)
            if wake_read in ready:
                signals = os.read(wake_read, 4096)
                # Any signal but that of a child's end asks to stop.
                if signals.strip(bytes([signal.SIGCHLD])):
                    self.stop()
            self._reap()
            if self._kill_at_s is not None and time.monotonic() >= self._kill_at_s:
                self._kill_all()
                # Should something have survived, it is tried again.
                self._kill_at_s = time.monotonic() + self._term_s
        self._finish(output)
        self._log.close()
        self._say(f"exit {self._code}")
        return self._code

    def _say(self, line: str) -> None:
        with contextlib.suppress(OSError):
            os.write(1, f"{line}\n".encode())

    def stop(self) -> None:
        """Ask the whole group to end, and see to it a little later."""
        self._signal(signal.SIGTERM)
        if self._kill_at_s is None:
            self._kill_at_s = time.monotonic() + self._term_s

    def _start(self) -> tuple[int, int]:
        read, write = os.pipe()
        parent = os.getpid()
        pid = os.fork()
        if pid:
            os.close(write)
            # Set on both sides of the fork: whichever comes first, a signal to the group finds it.
            with contextlib.suppress(OSError):
                os.setpgid(pid, pid)
            return read, pid
        code = 127
        try:
            os.setpgid(0, 0)
            _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            # The parent may have ended before the kernel was told; then nobody would ever end this one.
            if os.getppid() == parent:
                os.close(read)
                code = self._become(write)
        except BaseException as error:  # noqa: BLE001  whatever it is, this process ends here
            os.write(2, f"error: {self._command[0]}: {type(error).__name__}: {error}\n".encode())
        finally:
            # Never back into the loop, which is the parent's.
            os._exit(code)
        raise AssertionError("unreachable")

    def _become(self, output: int) -> int:
        """Turn this process, fresh from the fork, into the command; returns its exit code, if at all."""
        # Nothing of how the supervisor handles signals may reach the command.
        signal.set_wakeup_fd(-1)
        for number in signal.valid_signals():
            with contextlib.suppress(OSError, ValueError):
                signal.signal(number, signal.SIG_DFL)
        if self._cpus and hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, self._cpus)
        nothing = os.open(os.devnull, os.O_RDONLY)
        for source, target in ((nothing, 0), (output, 1), (output, 2)):
            os.dup2(source, target)
        if self._module is None:
            os.execvp(self._command[0], self._command)
        import importlib

        # Python's own ways, as a fresh interpreter would have them: a client that leaves ends no process.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for number in (signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_IGN)
        code = importlib.import_module(str(self._module)).main(self._command[1:])
        sys.stdout.flush()
        sys.stderr.flush()
        return int(code)

    def _listen(self) -> bool:
        """Carry out orders; False once nobody is left to give any."""
        data = os.read(0, 4096)
        if not data:
            return False
        # An order may come in two parts: what has no end yet is kept.
        *orders, self._orders = (self._orders + data).split(b"\n")
        for order in orders:
            if order == b"term":
                self._signal(signal.SIGTERM)
            elif order == b"kill":
                self._kill_all()
        return True

    def _copy(self, output: int) -> bool:
        try:
            data = os.read(output, 65536)
        except BlockingIOError:
            return True
        self._log.write(data)
        return bool(data)

    def _signal(self, number: int) -> None:
        # After its end the number may be another process's.
        if self._code is None:
            with contextlib.suppress(OSError):
                os.killpg(self._pid, number)

    def _kill_all(self) -> None:
        self._signal(signal.SIGKILL)
        for pid in descendants(os.getpid()):
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if not pid:
                    return
                if pid == self._pid:
                    code = os.waitstatus_to_exitcode(status)
                    # A signal is a negative code; shells say 128 plus its number.
                    self._code = code if code >= 0 else 128 - code

    def _finish(self, output: int) -> None:
        """End whatever the command left behind, and keep its last words."""
        end_s = time.monotonic() + _DRAIN_S
        self._kill_all()
        while time.monotonic() < end_s:
            ready, _, _ = select.select([output], [], [], 0.05)
            if not ready or not self._copy(output):
                break
        # Those that are killed may have started others a moment before: look until there are none.
        while descendants(os.getpid()) and time.monotonic() < end_s:
            self._kill_all()
            self._reap()
            time.sleep(0.01)


if __name__ == "__main__":
    sys.exit(Supervisor(json.loads(sys.argv[1])).run())
