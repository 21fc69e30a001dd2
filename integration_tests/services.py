"""The HTTP service as a process."""

import os
import re
import resource
import signal
import subprocess
import sys
import threading
from pathlib import Path

ROOT = Path(__file__).parents[1]


class Service:
    """``python -m pipelines.serve`` on a free port."""

    def __init__(self, export, *options, env=None, open_files=None):
        def limit_files():
            resource.setrlimit(resource.RLIMIT_NOFILE, (open_files, open_files))

        command = [sys.executable, "-m", "pipelines.serve", "--export", str(export), "--port", "0", "--threads", "1"]
        self.process = subprocess.Popen(
            [*command, *options],
            cwd=ROOT,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **(env or {})},
            preexec_fn=limit_files if open_files else None,
        )
        self.said, self.url = [], None
        for line in self.process.stderr:
            self.said.append(line)
            if found := re.search(r"running on (http://\S+)", line):
                self.url = found[1]
                break
        assert self.url, "".join(self.said)
        # what it says later must be read, or it would wait for us
        self.reader = threading.Thread(target=lambda: self.said.extend(self.process.stderr), daemon=True)
        self.reader.start()

    @property
    def open_files(self):
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    @property
    def address(self):
        host, _, port = self.url.removeprefix("http://").rpartition(":")
        return host, int(port)

    def stop(self, how=signal.SIGTERM):
        self.process.send_signal(how)
        code = self.process.wait(30)
        self.reader.join(10)
        return code

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
