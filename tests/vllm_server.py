"""Servers of vLLM, started as a user starts them."""

import os
import signal
import subprocess
import sys
import time
import urllib.request
from contextlib import suppress
from pathlib import Path

from tests.ports import reserved_ports
from whet.base.scratch import Scratch

COMMAND = (
    "--enable-scale-out --logprobs-mode processed_logprobs --enable-prompt-tokens-details --generation-config vllm "
    "--dtype float32 --max-model-len 512 --enforce-eager --host 127.0.0.1"
)


class Vllm:
    """A server's process. ``url`` answers once it is created. A server of a ``port`` can be started again there."""

    def __init__(self, folder: Path, log: Path, *options: str, port: int | None = None) -> None:
        self.port = port or reserved_ports(1)[0]
        self.url = f"http://127.0.0.1:{self.port}"
        self.scratch = Scratch("server")
        settings = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        settings["TMPDIR"] = str(self.scratch.path)  # vLLM leaves sockets and files behind
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)]
        with log.open("wb") as written:
            self.process = subprocess.Popen(
                [*command, "--port", str(self.port), *COMMAND.split(), *options],
                env={**os.environ, **settings},
                stdout=written,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        ends = time.monotonic() + 600
        while time.monotonic() < ends and self.process.poll() is None:
            with suppress(OSError):
                urllib.request.urlopen(f"{self.url}/health", timeout=60).close()
                return
            time.sleep(0.5)
        self.close()
        raise TimeoutError(log.read_text()[-3000:])

    def kill(self) -> None:
        """Kill it with its engine's processes, as a machine that loses power does."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def close(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.scratch.remove()
