"""`weft comm draw`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from weft.errors import CollectiveError

_MOST_PROCESSES = 4096
_Name = Literal["all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all"]


def draw(
    *,
    algorithm: str,
    collective: _Name = "all_reduce",
    processes: Annotated[int | None, Parameter(show_default=False)] = None,
    cluster: Annotated[str | None, Parameter(show_default=False)] = None,
    nodes: Annotated[str | None, Parameter(show_default=False)] = None,
    root: int = 0,
    pieces: int = 1,
    servers: int = 1,
    output: Annotated[Path | None, Parameter(show_default=False)] = None,
) -> None:
    """Draw who sends what to whom in a collective, round by round.

    Parameters
    ----------
    algorithm
        Such as ring, double_tree, hierarchical+direct; a wrong one gets the list.
    collective
        What the ranks do.
    processes
        Ranks, in the order of their numbers.
    cluster
        Instead of --processes: a cluster.toml or a short name such as 2x4xh100, with one rank per device.
    nodes
        With --processes: ranks of each node, such as 4,4, for hierarchical.
    root
        Rank that broadcasts.
    pieces
        Into which pipelined algorithms cut their part of the buffer.
    servers
        Of parameter_server.
    output
        A .png, .svg or .pdf file to draw to as well.
    """
    from weft.comm.algorithms import arrange, find_algorithm, flat
    from weft.comm.algorithms.drawing import draw_rounds, drawing_lines, play_out
    from weft.config.cluster import resolve_cluster

    name = find_algorithm(algorithm).name
    if (processes is None) == (cluster is None):
        raise CollectiveError("Say over what to draw: either --processes 8, or --cluster cluster.toml (or 2x4xh100).")
    if (processes or 0) > _MOST_PROCESSES:
        raise CollectiveError(f"--processes {processes}: nobody could see that many. Use {_MOST_PROCESSES} or less.")
    if cluster is not None:
        if nodes is not None:
            raise CollectiveError("--nodes goes with --processes: a cluster has nodes of its own. Leave one out.")
        place = arrange(name, resolve_cluster(cluster))
    else:
        place = flat(processes or 0, nodes=_sizes(nodes))
    if output is not None and not output.suffix:
        raise CollectiveError(f"--output {output} names no kind of picture. Use {output}.svg, .png or .pdf.")
    drawing = play_out(name, collective, place, root=root, pieces=pieces, servers=servers)
    if output is not None:
        draw_rounds(drawing, output)
    print("\n".join(drawing_lines(drawing)))
    if output is not None:
        print(f"\npicture   {output}")


def _sizes(text: str | None) -> tuple[int, ...]:
    if text is None:
        return ()
    try:
        return tuple(int(word) for word in text.split(","))
    except ValueError:
        raise CollectiveError(f"--nodes {text}: write the ranks of each node with commas, such as 4,4.") from None
