"""Sizes that a tensor axis might divide, followed through reshapes.

Each dim of an activation is a product of *atoms*, outer first.  A linear layer's output is one atom; viewing it as
(heads, head size) refines it into two.  Atoms that meet in one operator must be divided alike and become one; an
operator that needs all of an atom in one place says so, with a reason.  What is left can be divided.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

Dim = tuple[int, ...]
"""Atoms of one dim, outer first; empty where the dim is followed by nobody and every rank has it whole."""
Factor = tuple[int, int | None]
"""A size, and its atom if it is followed."""


class Atoms:
    def __init__(self) -> None:
        self._above: list[int] = []
        self._sizes: list[int] = []
        self._inside: dict[int, tuple[int, ...]] = {}
        self._reasons: dict[int, str] = {}

    def new(self, size: int) -> int:
        self._above.append(len(self._above))
        self._sizes.append(size)
        return len(self._above) - 1

    def find(self, atom: int) -> int:
        """The one that stands for all atoms that are divided alike."""
        # Union-find with path halving (Tarjan and van Leeuwen 1984).
        while self._above[atom] != atom:
            self._above[atom] = self._above[self._above[atom]]
            atom = self._above[atom]
        return atom

    def size(self, atom: int) -> int:
        return self._sizes[self.find(atom)]

    def leaves(self, dim: Sequence[int]) -> list[int]:
        """Return the atoms that a dim has been refined into, outer first; each as the representative of all that equal
        it."""
        roots = [self.find(atom) for atom in dim]
        return [
            leaf for root in roots for leaf in (self.leaves(self._inside[root]) if root in self._inside else (root,))
        ]

    def reason(self, atom: int) -> str | None:
        """Why it must be whole on every rank; None: it may be divided."""
        return self._reasons.get(self.find(atom))

    def keep_unsplit(self, dim: Sequence[int], reason: str) -> None:
        for leaf in self.leaves(dim):
            self._reasons.setdefault(leaf, reason)

    def _join(self, group: Sequence[int], leaf: int) -> bool:
        if len(group) > 1:
            # Several atoms against one: the one is refined into factors of their sizes, and these join pairwise.
            refined = self.aligned((leaf,), [self.size(atom) for atom in group])
            if refined is None:
                return False
            return all(self._join((atom,), inner[0]) for atom, inner in zip(group, refined, strict=True))
        one, other = self.find(group[0]), self.find(leaf)
        if one != other:
            self._above[one] = other
            # A reason to stay whole holds for all atoms that are divided alike.
            reason = self._reasons.pop(one, None)
            if reason is not None:
                self._reasons.setdefault(other, reason)
        return True

    def unify_dims(self, a: Dim, b: Dim) -> bool:
        """Join two dims of one size, which are divided alike from now on. Return False where their sizes cannot be
        matched."""
        leaves = self.leaves(b)
        mine = self.aligned(a, [self.size(leaf) for leaf in leaves])
        return mine is not None and all(self._join(group, leaf) for group, leaf in zip(mine, leaves, strict=True))

    def aligned(self, dim: Sequence[int], sizes: Sequence[int]) -> list[Dim] | None:
        """Regroup a dim's atoms into consecutive products of `sizes`, refining atoms where needed."""
        factors: list[Factor] = [(self.size(leaf), leaf) for leaf in self.leaves(dim)]
        regrouped = self.regrouped(factors, sizes)
        if regrouped is None:
            return None
        return [tuple(atom for _, atom in group if atom is not None) for group in regrouped]

    def regrouped(self, factors: Sequence[Factor], sizes: Sequence[int]) -> list[list[Factor]] | None:
        """Regroup factors, followed or not, into products of `sizes`; None when a size would cut across factors."""
        rest = list(factors)
        groups: list[list[Factor]] = []
        for size in sizes:
            group: list[Factor] = []
            left = size
            # Both sides are products read from the outside in, as `view` reads them. A factor that is larger than what
            # is left is split in two; one that neither divides nor is divided would be cut across.
            while left > 1:
                if not rest:
                    return None
                first, atom = rest.pop(0)
                if left % first == 0:
                    group.append((first, atom))
                    left //= first
                elif first % left == 0:
                    outer, inner = self._refined(first, atom, left)
                    group.append(outer)
                    rest.insert(0, inner)
                    left = 1
                else:
                    return None
            groups.append(group)
        return None if math.prod(size for size, _ in rest) != 1 else groups

    def _refined(self, size: int, atom: int | None, outer: int) -> tuple[Factor, Factor]:
        if atom is None:
            # Not followed: a size without an atom.
            return (outer, None), (size // outer, None)
        root = self.find(atom)
        made = (self.new(outer), self.new(size // outer))
        self._inside[root] = made
        reason = self._reasons.get(root)
        if reason is not None:
            self._reasons |= dict.fromkeys(made, reason)
        return (outer, made[0]), (size // outer, made[1])
