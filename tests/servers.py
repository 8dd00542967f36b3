"""A real Redis server for tests, on a socket in a temporary directory, and a proxy that fails as it is told."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import redis


def find_server() -> str:
    """The program that `make test` puts beside the environment, or the system's."""
    beside = Path(sys.prefix, "redis", "redis-server")
    found = str(beside) if beside.exists() else shutil.which("redis-server") or shutil.which("valkey-server")
    assert found, "no redis-server: run `make test`, or install redis-server"
    return found


def free_port() -> int:
    with socket.socket() as some:
        some.bind(("127.0.0.1", 0))
        return int(some.getsockname()[1])


class RedisServer:
    """Runs until `stop`; may be started again. Further options are the server's own."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.folder = folder
        self.url = f"unix://{folder}/redis.sock"
        self._options = options
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        where = ["--port", "0", "--unixsocket", f"{self.folder}/redis.sock", "--dir", str(self.folder)]
        command = [find_server(), *where, "--save", "", "--appendonly", "no", *self._options]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        for _ in range(200):
            try:
                with redis.Redis.from_url(self.url) as client:
                    client.ping()
                return
            except redis.AuthenticationError:
                return
            except redis.RedisError:
                time.sleep(0.02)
        raise AssertionError("redis-server does not answer")

    @property
    def client(self) -> redis.Redis:
        return redis.Redis.from_url(self.url)

    def stop(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()


class Proxy:
    """Passes bytes between a store and the server, and fails as it is told."""

    def __init__(self, server: RedisServer, folder: Path) -> None:
        self.path = folder / "proxy.sock"
        self.url = f"unix://{self.path}"
        self.budget: int | None = None  # bytes of answers until the connection breaks
        self.stall = False
        self._target = server.url.removeprefix("unix://")
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(self.path))
        self._listener.listen()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            far = socket.socket(socket.AF_UNIX)
            far.connect(self._target)
            threading.Thread(target=self._pump, args=(near, far, False), daemon=True).start()
            threading.Thread(target=self._pump, args=(far, near, True), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, answers: bool) -> None:
        try:
            while data := source.recv(1 << 16):
                while answers and self.stall:
                    time.sleep(0.01)
                if answers and self.budget is not None:
                    data, self.budget = data[: self.budget], max(0, self.budget - len(data))
                sink.sendall(data)
                if answers and self.budget == 0:
                    break
        except OSError:
            pass
        for end in (source, sink):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._listener.close()
