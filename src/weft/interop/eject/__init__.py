"""Writes one readable PyTorch script that trains a recipe under a plan without Weft.  No torch."""

from weft.interop.eject._refuse import check_ejectable as check_ejectable
from weft.interop.eject._script import eject as eject
