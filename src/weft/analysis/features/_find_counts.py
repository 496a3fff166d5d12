"""Numbers by which the modules of a model count features, where no table of one dimension divides them.

A forward on a part of the features stops, or does something else, where it counts them by a number of its own: a width
that it asserts, the heads of a layer that no rule splits.  Such a number is divided if the forward then comes further.
Nothing is trusted for that: all that it computes in the end is compared with the whole (`_compare_parts`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from weft.analysis.features._feature_flow import NoPartsError
from weft.model.blueprint import Blueprint
from weft.model.localising import numbers_of
from weft.model.meta_forward import glob_of
from weft.model.plain_layers import is_conv1d, is_linear


def to_count_by_parts(blueprint: Blueprint, problem: NoPartsError, counts: Collection[str]) -> frozenset[str]:
    """Return `counts` and the number, of all modules that are alike, with which a forward on a part comes furthest, as
    `module:attribute`; empty where none helps, or nothing was compared."""
    if problem.come is None:
        return frozenset()
    best, most = frozenset[str](), problem.done
    for module, attribute, value in _candidates(blueprint, problem):
        more = frozenset(counts) | _alike(blueprint, module, attribute, value)
        if len(more) > len(counts) and (done := problem.come(more)) > most:
            best, most = more, done
    return best


def _candidates(blueprint: Blueprint, problem: NoPartsError) -> Iterator[tuple[str, str, int]]:
    """Numbers that are sizes of what ranks have parts of, in the module where it stopped and in those around it."""
    name = problem.place
    while name:
        module = blueprint.module.get_submodule(name)
        known = not is_linear(module) and not is_conv1d(module) and not blueprint.is_computed_whole(name)
        for attribute, value in numbers_of(module) if known else ():
            if value in problem.sizes and "." not in attribute:
                yield name, attribute, value
        name = name.rpartition(".")[0]


def _alike(blueprint: Blueprint, name: str, attribute: str, value: int) -> frozenset[str]:
    """The number in each module of the same place and kind that has the same one."""
    root, glob = blueprint.module, glob_of(name)
    kind = type(root.get_submodule(name))
    alike = [(other, each) for other, each in root.named_modules() if glob_of(other) == glob and type(each) is kind]
    return frozenset(f"{other}:{attribute}" for other, each in alike if dict(numbers_of(each)).get(attribute) == value)
