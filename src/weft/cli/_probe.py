"""`weft probe`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from weft.cli._options import write_output
from weft.errors import ClusterError

if TYPE_CHECKING:
    from weft.config.cluster import Cluster


def probe(
    *,
    output: Path | None = None,
    processes: int | None = None,
    seconds: float = 150.0,
    precision: Annotated[tuple[str, ...], Parameter(negative=())] = (),
) -> None:
    """Measure this machine, or the nodes of a job, and describe them as a cluster for weft plan --cluster.

    It measures matrix products, attention, memory, one transformer block, and collectives, for several numbers of
    processes and threads; every figure is written with its spread. Nothing else should run meanwhile. To measure a
    job's nodes, start it on all of them: torchrun ... --no-python weft probe, or weft launch -n 4 -m weft.cli probe.

    On CPUs it also measures which algorithm suits each collective, for 2, 4, ... processes, and keeps these tables in
    ~/.cache/weft/collectives/ for plans with data_parallel.algorithm = "measured"; weft comm explain shows them.

    Parameters
    ----------
    output
        File for the cluster, such as cluster.toml; by default it is printed, and on one machine also kept in
        ~/.cache/weft/machines/ for weft train and weft plan.
    processes
        How many processes to start here; by default one per device, and twice the cores where these are few.
    seconds
        For the measurements; choices of collectives (0.4 of it at most) and starting the processes come on top.
    precision
        Of matrix products, such as bf16. May be given again; by default fp32 and bf16, on accelerators fp16 too.
    """
    if processes is not None and processes < 1:
        raise ClusterError(f"--processes {processes} is too small: use 1 or more.")
    if not seconds > 0:
        raise ClusterError(f"--seconds {seconds:g} must be above 0.")
    if output is not None and output.is_dir():
        raise ClusterError(f"--output {output} is a folder. Name a file in it, such as {output / 'cluster.toml'}.")
    if output is not None and not output.parent.is_dir():
        raise ClusterError(f"{output} cannot be written: there is no folder {output.parent}. Create it first.")
    from weft.comm.algorithms import ChoiceTable, keep_table
    from weft.config.cluster import dump_cluster
    from weft.run.probe import probe as measure

    tables: list[ChoiceTable] = []
    cluster = measure(processes=processes, budget_seconds=seconds, precisions=precision, keep=tables.append)
    if cluster is None:  # another rank of the job writes
        return
    text = dump_cluster(cluster, header=["measured by weft probe"])
    _write(text, cluster, output)
    for table in tables:
        path = keep_table(table)
        print(f"choices of {table.members} ranks kept in {path}", file=sys.stderr)


def _write(text: str, cluster: Cluster, output: Path | None) -> None:
    """Print a cluster, and keep it where it is this machine; or write it to a file."""
    from weft.config.cluster import keep_machine

    if output is None:
        print(text, end="")
        if cluster.num_nodes == 1:
            print(f"kept in {keep_machine(cluster)}; plans for this machine use it", file=sys.stderr)
        return
    write_output(output, text, ClusterError)
    print(f"{cluster.summary}\nwritten to {output}; next: weft plan RECIPE --cluster {output}", file=sys.stderr)
