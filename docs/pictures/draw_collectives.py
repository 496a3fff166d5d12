"""Draw the pictures of the page on communication from the schedules: `python docs/pictures/draw_collectives.py`."""

from __future__ import annotations

from pathlib import Path

from weft.comm.algorithms import Arrangement, flat
from weft.comm.algorithms.drawing import draw_rounds, play_out
from weft.config.cluster import Collective

FOLDER = Path(__file__).parent
PICTURES: tuple[tuple[str, Collective, Arrangement, int], ...] = (
    ("ring", "all_reduce", flat(4), 1),
    ("double_ring", "all_reduce", flat(4), 1),
    ("tree", "all_reduce", flat(8), 1),
    ("double_tree", "all_reduce", flat(7), 2),
    ("recursive_doubling", "all_reduce", flat(6), 1),
    ("halving_doubling", "all_reduce", flat(8), 1),
    ("direct", "all_reduce", flat(5), 1),
    ("one_shot", "all_reduce", flat(5), 1),
    ("scatter", "broadcast", flat(4), 1),
    ("bruck", "all_to_all", flat(8), 1),
    ("hierarchical", "all_reduce", flat(7, nodes=(4, 3)), 1),
    ("torus", "all_reduce", flat(9, shape=(3, 3)), 1),
    ("parameter_server", "all_reduce", flat(6), 1),
)

if __name__ == "__main__":
    for name, collective, place, pieces in PICTURES:
        servers = 2 if name == "parameter_server" else 1
        drawing = play_out(name, collective, place, pieces=pieces, servers=servers)
        draw_rounds(drawing, FOLDER / f"collective-{name.replace('_', '-')}.png")
