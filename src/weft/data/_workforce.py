"""Share shards out among helper processes."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from weft.data._child import describe_exit, end_child, start_child
from weft.data._corpus import ShardRecord
from weft.data._progress import Progress
from weft.data._shards import ShardTask, finished_shard, write_shard
from weft.data._tokenizer import load_tokenizer
from weft.errors import DataError

_MOST_WORKERS = 16
_ATTEMPTS = 2


class Workforce:
    """The shards of one preparation, done and to do.

    One thread waits for each helper process.  They share the task queue, the list of helpers, and `_advance`.
    """

    def __init__(self, tasks: Sequence[ShardTask], tokenizer: Path, progress: Progress, lock: int) -> None:
        self._tasks = tasks
        self._tokenizer = tokenizer
        self._progress = progress
        self._folder_lock = lock
        self._total = sum(task.num_bytes for task in tasks)
        self._done = 0
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._helpers: list[_Helper] = []

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
            records.update(self._run_helpers(todo, count))
        self._progress("tokens", self._total, self._total)
        return [records[task.index] for task in self._tasks]

    def _run_helpers(self, todo: Sequence[ShardTask], count: int) -> dict[int, ShardRecord]:
        tasks: queue.SimpleQueue[ShardTask] = queue.SimpleQueue()
        for task in todo:
            tasks.put(task)
        records: dict[int, ShardRecord] = {}
        # Helpers are started here, not in their threads: a process started by a thread may not outlive it everywhere.
        self._helpers = [_Helper(self._tokenizer, self._folder_lock) for _ in range(count)]
        with ThreadPoolExecutor(count) as threads:
            try:
                waiting = [threads.submit(self._serve, helper, tasks, records) for helper in self._helpers]
                for future in waiting:
                    future.result()
            finally:
                self._stopped.set()
                for helper in self._helpers:
                    helper.kill()
        for helper in self._helpers:
            helper.close()
        return records

    def _serve(self, helper: _Helper, tasks: queue.SimpleQueue[ShardTask], records: dict[int, ShardRecord]) -> None:
        try:
            while not self._stopped.is_set():
                task = tasks.get_nowait()
                records[task.index] = self._attempt(helper, task)
        except queue.Empty:
            return
        except BaseException:
            self._stopped.set()
            raise

    def _attempt(self, helper: _Helper, task: ShardTask) -> ShardRecord:
        for attempt in range(1, _ATTEMPTS + 1):
            record = helper.run(task, self._advance)
            if record is not None:
                return record
            if self._stopped.is_set():
                break
            if attempt < _ATTEMPTS:
                helper.restart()
        raise DataError(
            f"The process that tokenized shard {task.index} ({task.segments[0].path} …) {helper.ending()}, "
            f"{_ATTEMPTS} times. Start again (finished shards are kept), with fewer workers if memory was short."
        )

    def _advance(self, count: int) -> None:
        with self._lock:
            self._done = min(self._done + count, self._total)
            if self._done < self._total:
                self._progress("tokens", self._done, self._total)


class _Helper:
    """One helper process, served by one thread."""

    def __init__(self, tokenizer: Path, lock: int) -> None:
        self._tokenizer = tokenizer
        self._folder_lock = lock
        self._child = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        # The processes are the parallelism; the tokenizer's own threads would only compete with them.
        environment = {"RAYON_NUM_THREADS": "1"}
        arguments, descriptors = [str(self._tokenizer)], [self._folder_lock]
        return start_child("_shards", arguments, descriptors=descriptors, environment=environment, piped=True)

    def run(self, task: ShardTask, advance: Callable[[int], None]) -> ShardRecord | None:
        """Return the shard's record, or None when the process died."""
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        try:
            self._child.stdin.write(task.to_json().encode() + b"\n")
            self._child.stdin.flush()
        except BrokenPipeError:
            return None
        for line in self._child.stdout:
            message: dict[str, Any] = json.loads(line)
            if "error" in message:
                raise DataError(message["error"])
            if "record" in message:
                return ShardRecord(**message["record"])
            advance(message["bytes"])
        return None

    def restart(self) -> None:
        self.close()
        self._child = self._start()

    def ending(self) -> str:
        return describe_exit(self._child.poll())

    def kill(self) -> None:
        """End the process at once; the thread that reads from it then sees the end of its output."""
        self._child.kill()

    def close(self) -> None:
        end_child(self._child)
