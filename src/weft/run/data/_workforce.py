"""Share shards out among helper processes: fresh interpreters that tokenize, and say how far they are in JSON lines.

They are neither forked (torch's threads would not survive it) nor multiprocessing's spawn (which runs the user's script
again).  They are in a session of their own, so that a terminal's Ctrl-C reaches the parent alone, and the system kills
them with their parent.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from weft.config.document import plain
from weft.errors import DataError
from weft.run.data._corpus import ShardRecord
from weft.run.data._progress import Progress
from weft.run.data._shards import ShardTask, finished_shard, write_shard
from weft.run.data._tokenizer import load_tokenizer

_MOST_WORKERS = 16
_ATTEMPTS = 2
_BOOT = (
    "import sys; sys.path.insert(0, sys.argv[1]); "
    "from weft.process import die_with; die_with(int(sys.argv[2])); "
    "from weft.run.data._shards import main; main(sys.argv[3])"
)


class WorkerProcesses:
    """The shards of one preparation, done and to do.

    One thread waits for each helper process.  They share `_advance` and the list of processes.
    """

    def __init__(self, tasks: Sequence[ShardTask], tokenizer: Path, progress: Progress, lock: int) -> None:
        self._tasks = tasks
        self._tokenizer = tokenizer
        self._progress = progress
        self._folder_lock = lock
        self._total = sum(task.num_bytes for task in tasks)
        self._done = 0
        self._lock = threading.Lock()
        self._stopped = False
        self._helpers: list[subprocess.Popen[bytes]] = []

    def run(self, workers: int | None) -> list[ShardRecord]:
        """Finish all shards and return their records in order.

        Raises:
            DataError: A document cannot be read, or a helper died twice on one shard.
        """
        records = {task.index: record for task in self._tasks if (record := finished_shard(task)) is not None}
        self._advance(sum(task.num_bytes for task in self._tasks if task.index in records))
        todo = [task for task in self._tasks if task.index not in records]
        count = min(len(todo), workers if workers is not None else min(os.cpu_count() or 1, _MOST_WORKERS))
        if count <= 1:
            tokenizer = load_tokenizer(self._tokenizer)
            for task in todo:
                records[task.index] = write_shard(task, tokenizer, self._advance)
        else:
            with ThreadPoolExecutor(count) as threads:
                try:
                    # Every count-th shard: neighbours are of one file, and so equally hard; interleaved shares end
                    # together.
                    shares = [threads.submit(self._finish, todo[at::count]) for at in range(count)]
                    for share in as_completed(shares):
                        records.update(share.result())
                finally:
                    self._stop()
        self._progress("tokens", self._total, self._total)
        return [records[task.index] for task in self._tasks]

    def _finish(self, tasks: Sequence[ShardTask]) -> dict[int, ShardRecord]:
        """Let a helper do these tasks; one that dies is followed by another, which does what is left."""
        records: dict[int, ShardRecord] = {}
        left, deaths = list(tasks), 0
        while left and not self._stopped:
            before = len(records)
            code = self._attempt(left, records)
            # Only deaths without a finished shard in between count: a long preparation may lose several helpers.
            deaths = deaths + 1 if len(records) == before else 1
            left = [task for task in tasks if task.index not in records]
            if left and deaths == _ATTEMPTS and not self._stopped:
                raise DataError(
                    f"The process that tokenized shard {left[0].index} ({left[0].segments[0].path} …) "
                    f"{_describe_exit(code)}, {_ATTEMPTS} times. Start again (finished shards are kept), with fewer "
                    f"workers if memory was short."
                )
        return records

    def _attempt(self, tasks: Sequence[ShardTask], records: dict[int, ShardRecord]) -> int:
        """Run one helper to its end, and return its status."""
        root = str(Path(__file__).resolve().parents[2])
        # -P: a file in the working directory must not stand in for a module.
        command = [sys.executable, "-P", "-c", _BOOT, root, str(os.getpid()), str(self._tokenizer)]
        # Tasks go in by a file: a pipe could fill up while this thread has not begun to read the other one.
        with tempfile.TemporaryFile() as orders:
            orders.write(b"".join(json.dumps(plain(task)).encode() + b"\n" for task in tasks))
            orders.seek(0)
            helper = subprocess.Popen(
                command,
                stdin=orders,
                stdout=subprocess.PIPE,
                pass_fds=(self._folder_lock,),
                # The processes are the parallelism; the tokenizer's own threads would only compete with them.
                env={**os.environ, "RAYON_NUM_THREADS": "1"},
                start_new_session=True,
            )
        with helper:
            with self._lock:
                self._helpers.append(helper)
                if self._stopped:  # `_stop` came between the start of the process and this line
                    helper.kill()
            assert helper.stdout is not None
            for line in helper.stdout:
                message: dict[str, Any] = json.loads(line)
                if "error" in message:
                    raise DataError(message["error"])
                if "record" in message:
                    records[message["index"]] = ShardRecord(**message["record"])
                else:
                    self._advance(message["bytes"])
        return helper.returncode

    def _stop(self) -> None:
        """End all helpers at once; the threads that read from them then see the end of their output."""
        with self._lock:
            self._stopped = True
            for helper in self._helpers:
                helper.kill()

    def _advance(self, count: int) -> None:
        with self._lock:
            self._done = min(self._done + count, self._total)
            if self._done < self._total:
                self._progress("tokens", self._done, self._total)


def _describe_exit(code: int) -> str:
    if code < 0:
        name = signal.Signals(-code).name
        return f"was killed by {name}" + (" (out of memory?)" if -code == signal.SIGKILL else "")
    return f"ended with status {code}"
