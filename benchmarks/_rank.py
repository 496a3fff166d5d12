"""One rank of a contender: builds its training, then runs as many steps as each line of its input says.

`python -m benchmarks._rank module:function '{"setting": …}'`; the function takes the settings and returns
`step(index) -> loss`.  Answers go to standard output as lines of JSON, whatever libraries print goes to standard error.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import resource
import sys
import time


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    target, settings = sys.argv[1], json.loads(sys.argv[2])
    module, _, function = target.partition(":")
    import torch

    torch.set_num_threads(int(settings.get("threads", 1)))
    step = getattr(importlib.import_module(module), function)(settings)
    print(json.dumps({"ready": True}), file=answers, flush=True)
    done = 0
    for line in sys.stdin:
        seconds: list[float] = []
        cpu_seconds: list[float] = []
        losses: list[float] = []
        gc.collect()
        for _ in range(int(line)):
            start, cpu_start = time.perf_counter(), time.process_time()
            losses.append(float(step(done)))
            seconds.append(time.perf_counter() - start)
            cpu_seconds.append(time.process_time() - cpu_start)
            done += 1
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        answer = {"seconds": seconds, "cpu_seconds": cpu_seconds, "losses": losses, "peak_bytes": peak}
        print(json.dumps(answer), file=answers, flush=True)
    os._exit(0)  # libraries that wait for one another at exit are not what is measured


if __name__ == "__main__":
    main()
