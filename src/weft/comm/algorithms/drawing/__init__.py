"""Collectives played out round by round, and their pictures: no rank of a training needs them."""

from weft.comm.algorithms.drawing._picture import draw_rounds as draw_rounds
from weft.comm.algorithms.drawing._rounds import Drawing as Drawing
from weft.comm.algorithms.drawing._rounds import Flight as Flight
from weft.comm.algorithms.drawing._rounds import drawing_lines as drawing_lines
from weft.comm.algorithms.drawing._rounds import play_out as play_out
