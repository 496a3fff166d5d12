"""Forwards on the meta device, which take no memory: for analysis, and for finding what a forward draws."""

from weft.model.meta_forward._fast_path import without_fast_path as without_fast_path
from weft.model.meta_forward._names import glob_of as glob_of
from weft.model.meta_forward._names import globs_of as globs_of
from weft.model.meta_forward._on_trial import on_trial as on_trial
from weft.model.meta_forward._one_device import OneDevice as OneDevice
from weft.model.meta_forward._stand_in import StandInMode as StandInMode
from weft.model.meta_forward._stand_in import StandIns as StandIns
from weft.model.meta_forward._stand_in import copy_on_meta as copy_on_meta
