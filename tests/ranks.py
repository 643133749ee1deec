"""Runs a Python program on several ranks of MLX's ring, all of them on this machine."""

import json
import os
import socket
import subprocess
import sys
from contextlib import ExitStack, contextmanager


@contextmanager
def started_ranks(n, *arguments, folder):
    """``n`` processes of ``python arguments``; none is left behind."""
    with ExitStack() as sockets:
        free = [sockets.enter_context(socket.socket()) for _ in range(n)]
        for s in free:
            s.bind(("127.0.0.1", 0))
        hosts = [[f"127.0.0.1:{s.getsockname()[1]}"] for s in free]
    hostfile = folder / "hosts.json"
    hostfile.write_text(json.dumps(hosts))
    processes = []
    with ExitStack() as stack:
        for rank in range(n):
            process = subprocess.Popen(
                [sys.executable, *map(str, arguments)],
                env=os.environ | {"MLX_RANK": str(rank), "MLX_HOSTFILE": str(hostfile)},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            stack.enter_context(process)
            stack.callback(process.kill)  # before the pipes are closed
            processes.append(process)
        yield processes


def run_ranks(n, *arguments, folder, timeout=120):
    """Standard outputs of ``n`` ranks of ``python arguments``, all of which succeed."""
    with started_ranks(n, *arguments, folder=folder) as processes:
        results = [process.communicate(timeout=timeout) for process in processes]
    for process, (_, error) in zip(processes, results, strict=True):
        assert process.returncode == 0, error
    return [out for out, _ in results]
