"""Finds whether tensor ranks may have parts of the features between the layers of a model that was looked at.

A model's own forward runs with what ranks of a grid do together (products, norms, the embedding) in the places of the
modules that do it, twice without memory: as a whole, where every operator on features is followed (`_feature_flow`),
and on one rank's part.  The second shows where a forward counts features by numbers of its own: it must run the same
operators on the shapes of parts, with the same numbers and the same values of everything that has any.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized
from torch.overrides import handle_torch_function
from torch.utils._pytree import tree_leaves

from weft.analysis.features._compare_parts import compare
from weft.analysis.features._feature_flow import STAND_IN, FeatureWalker, NoPartsError, Parts
from weft.analysis.tensor_split._rehearse import DTYPE
from weft.analysis.trace._events import Event, Trace, Value
from weft.analysis.trace._fused import FUSED, FusedCall
from weft.analysis.trace._modes import BOTH
from weft.analysis.trace._trace import SAMPLES, Unfinished, trace
from weft.errors import PlanError, RecipeError
from weft.model.blueprint import Blueprint, logits_of
from weft.model.families import FeatureWork
from weft.model.losses import token_loss
from weft.model.meta_forward import copy_on_meta, glob_of
from weft.model.plain_layers import is_conv1d, localise
from weft.techniques.tensor.mesh_2d.narrowing import narrowing
from weft.techniques.tensor.mesh_2d.norm_trial import width_of
from weft.techniques.tensor.mesh_2d.own_lookups import looking_up
from weft.techniques.tensor.mesh_2d.roles import Role, cut_of, norm_formula, role_of

if TYPE_CHECKING:
    from weft.analysis.features._find_wholes import Wholes

_FORWARDS = (nn.Linear.forward, nn.Embedding.forward, nn.LayerNorm.forward, nn.RMSNorm.forward)


def look_at_features(blueprint: Blueprint) -> None:
    """Where a model of `transformers` was split by looking at it, see whether its tensor ranks may form a grid.

    Enters into the blueprint why not (`Blueprint.no_features`), empty where they may.  A module of one's own may do in
    its backward what no forward shows.
    """
    if blueprint.has_known_features or not type(blueprint.module).__module__.startswith("transformers."):
        return
    try:
        _look(blueprint)
        blueprint.no_features = ""
    except NoPartsError as problem:
        blueprint.no_features = str(problem)
    except PlanError as problem:
        blueprint.no_features = _first_sentence(str(problem))
    except RecipeError as problem:
        blueprint.no_features = f"its forward could not be followed ({_first_sentence(str(problem))})"
    except Exception as problem:  # a forward may do what no rule of the analysis foresaw
        said = next(iter(str(problem).splitlines()), "")
        blueprint.no_features = f"looking at its forward failed ({type(problem).__name__}: {said})"


def _first_sentence(text: str) -> str:
    return text.splitlines()[0].split(". ")[0].rstrip(".")


def _look(blueprint: Blueprint) -> None:
    if not blueprint.splits:
        raise NoPartsError(blueprint.no_tensor or "nothing says how its layers split")
    if blueprint.loss is not token_loss:
        raise NoPartsError("its loss is another than that of tokens, which knows parts of logits")
    in_fp16: list[NoPartsError] = []
    try:
        _search(blueprint, in_fp16)
    except NoPartsError:
        if not in_fp16:
            raise
        _search(blueprint, None)
        blueprint.no_fp16_grid = str(in_fp16[0])


def _search(blueprint: Blueprint, in_fp16: list[NoPartsError] | None) -> None:
    """Find how the features may be cut.  What stands in the way in fp16 alone is appended; None: do not look at fp16.

    Raises:
        NoPartsError: they may not.
    """
    results, norms, wholes, counts = frozenset[str](), frozenset[str](), frozenset[str](), frozenset[str]()
    cause = NoPartsError()
    while True:
        named = _named(results, norms, wholes, counts)
        try:
            _try(blueprint, {each: tuple(sorted(names)) for each, names in named}, in_fp16)
        except NoPartsError as problem:
            found = _bare_norms(blueprint, problem.module) - norms
            counted = _counted(blueprint, problem, counts) if counts else counts  # what was begun goes on first
            more = frozenset[str]() if found or counted else _alike(blueprint, problem.suspects) - results
            if not (found or counted or more):
                counted = counts or _counted(blueprint, problem, counts)
                cause = cause if problem.is_of_border else problem
                if counted == counts:
                    from weft.analysis.features._find_wholes import to_compute_whole  # most models need none

                    wholes = to_compute_whole(blueprint, problem, cause, wholes)
            results, norms, counts = results | more, norms | found, counted or counts
        else:
            return


def _counted(blueprint: Blueprint, problem: NoPartsError, counts: Collection[str]) -> frozenset[str]:
    """See `to_count_by_parts`."""
    from weft.analysis.features._find_counts import to_count_by_parts  # most models need none

    return to_count_by_parts(blueprint, problem, counts)


def _named(*names: frozenset[str]) -> Iterator[tuple[FeatureWork, frozenset[str]]]:
    kinds: tuple[FeatureWork, ...] = ("results", "norms", "wholes", "counts")
    return ((kind, each) for kind, each in zip(kinds, names, strict=True) if each or kind in ("results", "norms"))


def _alike(blueprint: Blueprint, suspects: Collection[str]) -> frozenset[str]:
    """Where parts that meet are those of products alone, these and their like in other layers."""
    if not suspects:
        return frozenset()
    roles, globs = _roles(blueprint), {glob_of(name) for name in suspects}
    if any(roles[name] != "product" for name in suspects):
        return frozenset()
    return frozenset(name for name, role in roles.items() if role == "product" and glob_of(name) in globs)


def _bare_norms(blueprint: Blueprint, name: str) -> frozenset[str]:
    """Norms without weights, where features met in one, and all of its like."""
    module = blueprint.module.get_submodule(name)
    if not name or next(module.parameters(), None) is not None or norm_formula(module) is None:
        return frozenset()
    return frozenset(other for other, _ in blueprint.module.named_modules() if glob_of(other) == glob_of(name))


def _is_of_any_width(module: nn.Module) -> bool:
    return getattr(module, "weight", None) is None and not hasattr(module, "normalized_shape")


def _try(
    blueprint: Blueprint, features: Mapping[FeatureWork, Sequence[str]], in_fp16: list[NoPartsError] | None
) -> None:
    """See whether ranks may have parts of the features, but for the modules of `features`.  Enters these into the
    blueprint, and with them what reads all features then, and where these meet parts."""
    blueprint.features = features
    roles = _roles(blueprint)
    for name, role in roles.items():
        _check_role(blueprint, name, role)
    whole = _Forward(blueprint, roles, 1)
    walker = whole.followed()
    reads, meets = _work(walker)
    blueprint.features = {**features, "reads": tuple(reads), "meets": tuple(meets), **whole.shared_out()}
    if reads:
        roles = _roles(blueprint)  # norms of all features are like any other module
        walker = _Forward(blueprint, roles, 1).followed()
    _check_ties(blueprint, roles)
    _follow_in(torch.bfloat16, blueprint, roles, _work(walker))
    if in_fp16 is not None:
        try:
            _follow_in(torch.float16, blueprint, roles, _work(walker))
        except NoPartsError as problem:
            in_fp16.append(problem)
            raise
    _note_sizes(blueprint, walker.sizes)
    most = math.gcd(*walker.sizes, *blueprint.divisible.values())
    for parts in sorted({_least_prime(most), most}):  # what a forward does may depend on how small a part is
        come = partial(_come, walker, blueprint, roles, parts)
        try:
            compare(walker, _Forward(blueprint, roles, parts).run_so_far(), parts)
        except NoPartsError as problem:
            problem.come, problem.sizes = come, walker.sizes.keys()
            raise


def _come(
    walker: FeatureWalker,
    blueprint: Blueprint,
    roles: Mapping[str, Role | None],
    parts: int,
    counts: Collection[str],
) -> int:
    """Return how many operators are right on a part where these numbers are divided, too."""
    other = replace(blueprint, features={**blueprint.features, "counts": tuple(sorted(counts))})
    try:
        compare(walker, _Forward(other, roles, parts).run_so_far(), parts)
    except NoPartsError as problem:
        return problem.done
    return len(walker.trace.events)


def _follow_in(
    dtype: torch.dtype, blueprint: Blueprint, roles: Mapping[str, Role | None], work: tuple[list[str], list[str]]
) -> None:
    """See that it is the same in a type of small numbers: some forwards look at all features then."""
    if _work(_Forward(blueprint, roles, 1, dtype).followed()) != work:
        raise NoPartsError("what reads all features depends on its type")


def _work(walker: FeatureWalker) -> tuple[list[str], list[str]]:
    """Norms, products and dropouts that read all features, and modules in which parts meet them."""
    meets = {walker.trace.events[index].module for index in walker.narrowed}
    return sorted(name for name, is_whole in walker.reads.items() if is_whole), sorted(meets)


def _roles(blueprint: Blueprint) -> dict[str, Role | None]:
    found: dict[str, Role | None] = {}
    for name, module in blueprint.module.named_modules(remove_duplicate=False):
        try:
            found[name] = role_of(blueprint, name, module)
        except PlanError as problem:
            raise _in(name, _first_sentence(str(problem))) from problem
    return found


def _check_role(blueprint: Blueprint, name: str, role: Role | None) -> None:
    """Refuse modules whose forward is another than that which ranks of a grid run in its place."""
    module: Any = blueprint.module.get_submodule(name)
    what = f"{name}, a {type(module).__name__},"
    if role in (None, "heads", "alias", "loose") or blueprint.is_computed_whole(name):
        return
    if is_parametrized(module) or any(isinstance(each, Tensor) for each in vars(module).values()):
        raise _in(name, f"{what} computes its weights from others")
    if role == "table":
        if module.max_norm is not None or module.scale_grad_by_freq or module.sparse:
            raise _in(name, f"{what} has options that want all its features on one rank")
        return
    if "forward" in vars(module) and role != "vocabulary":
        raise _in(name, f"{what} was given a forward of its own")
    is_plain = type(module).forward in _FORWARDS or is_conv1d(module) or role == "vocabulary"  # see `looking_up`
    if role == "norm" and not is_plain:
        from weft.techniques.tensor.mesh_2d.norm_trial import formula_by_trial

        is_plain = formula_by_trial(module) is not None
    if role == "product" and not is_plain and isinstance(module, nn.Linear):
        from weft.techniques.tensor.mesh_2d.product_trial import is_product_by_trial

        is_plain = is_product_by_trial(module)
    if role == "norm" and isinstance(module, nn.LayerNorm | nn.RMSNorm):
        is_plain = is_plain and len(module.normalized_shape) == 1
    if not is_plain:
        raise _in(name, f"{what} has a forward of its own")
    rule = blueprint.rule_of(name)
    if role == "product" and rule is not None and rule.kind == "row" and rule.blocks > 1:
        raise _in(name, f"{what} takes its input in {rule.blocks} blocks")


def _in(name: str, reason: str) -> NoPartsError:
    problem = NoPartsError(reason)
    problem.module = name
    return problem


def _check_ties(blueprint: Blueprint, roles: Mapping[str, Role | None]) -> None:
    """Refuse parameters that two modules share and ranks would cut in two ways."""
    cuts: dict[int, tuple[str, Any]] = {}
    for owner, module in blueprint.module.named_modules(remove_duplicate=False):
        for leaf, parameter in module.named_parameters(recurse=False):
            cut = cut_of(blueprint, roles[owner], owner, leaf)
            first, known = cuts.setdefault(id(parameter), (f"{owner}.{leaf}", cut))
            if known != cut:
                raise NoPartsError(f"{owner}.{leaf} and {first} are one parameter, which ranks would cut in two ways")


def _note_sizes(blueprint: Blueprint, sizes: Mapping[int, str]) -> None:
    """Enter into the blueprint what the side must divide that no other named size implies."""
    common = math.gcd(*blueprint.divisible.values())
    if math.gcd(common, *sizes) == 1:
        raise NoPartsError("its sizes have no divisor in common")
    found: dict[str, int] = {}
    for size in sorted(sizes):
        if size % common:
            found[f"features of {sizes[size]}"] = size
            common = math.gcd(common, size)
    blueprint.divisible_features = found


def _least_prime(number: int) -> int:
    return next(each for each in range(2, number + 1) if number % each == 0)


# ── a forward with what ranks do together in the places of modules ────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class _Together:
    """What ranks of a grid do in the place of a module's forward."""

    kind: Role
    module: str
    reads: int
    """Features of a rank's input; of an embedding 0, of a norm without a width −1."""
    makes: int
    """Features of its result."""
    dtype: torch.dtype
    """Type that the model computes in."""
    blocks: int = 1


def _together(x: Tensor, what: _Together) -> Tensor:
    return handle_torch_function(_together, (x,), x, what)


def _as_event(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> FusedCall:
    x, what = args

    def run() -> Tensor:
        if what.reads < 0:
            return torch.empty(x.shape, dtype=x.dtype, device="meta")
        if what.reads and x.shape[-1] != what.reads:
            raise RuntimeError(f"{what.module} is given {x.shape[-1]} features instead of {what.reads}")
        shape = (*x.shape[:-1], what.makes) if what.reads else (*x.shape, what.makes)
        return torch.empty(shape, dtype=x.dtype if what.reads else what.dtype, device="meta")

    settings = {"kind": what.kind, "module": what.module, "blocks": what.blocks}
    return FusedCall(run=run, name=STAND_IN, operands=(x,), settings=settings)


def _narrowed(parts: int, x: Tensor, dim: int) -> Tensor:
    return handle_torch_function(_narrowed, (x,), parts, x, dim)


def _as_narrowed(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> FusedCall:
    parts, x, dim = args
    return FusedCall(run=lambda: x.chunk(parts, dim)[0], name="narrowed", operands=(x,), settings={})


def _constant(function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> FusedCall | None:
    """A tensor made of numbers, whose values nobody would see again on a device without memory."""
    data = kwargs.get("data", args[-1] if args else None)
    if any(isinstance(leaf, Tensor) for leaf in tree_leaves(data)):
        return None
    return FusedCall(run=lambda: function(*args, **kwargs), name="constant", settings={"data": repr(data)})


_CONSTANTS = (torch.tensor, torch.as_tensor, torch.asarray, Tensor.new_tensor)


class _Forward:
    """A copy of the model for a forward on one of `parts` of the features."""

    def __init__(
        self, blueprint: Blueprint, roles: Mapping[str, Role | None], parts: int, dtype: torch.dtype = DTYPE
    ) -> None:
        self._roles, self._parts, self._dtype, self._features = roles, parts, dtype, blueprint.features
        module = copy_on_meta(blueprint.module).train()
        self._blueprint = replace(blueprint, module=module)
        self._cuts = {
            f"{name}.{leaf}" if name else leaf: cut
            for name, each in module.named_modules(remove_duplicate=False)
            for leaf, _ in each.named_parameters(recurse=False)
            if (cut := cut_of(self._blueprint, roles[name], name, leaf)) is not None
        }
        self._local = {name: self._part(name) for name in self._cuts} if parts > 1 else {}
        for name, role in roles.items():
            if role in ("product", "norm", "vocabulary"):
                each: Any = module.get_submodule(name)
                stand_in = partial(_stand_in_forward, self._stand_in(name, role, each))
                each.forward = looking_up(each, stand_in) if role == "vocabulary" else stand_in
        module.forward = partial(_logits_forward, module.forward)
        for name in blueprint.features.get("meets", ()) if parts > 1 else ():
            each = module.get_submodule(name)
            each.forward = narrowing(each.forward, parts, partial(_narrowed, parts))
        if parts > 1:
            localise(module, blueprint, parts, is_grid=True)
        self._wholes = self._compute_whole(blueprint) if blueprint.features.get("wholes") else None

    def _compute_whole(self, blueprint: Blueprint) -> Wholes:
        from weft.analysis.features._find_wholes import Wholes  # most models need none

        return Wholes(blueprint, self._blueprint.module, self._parts)

    def shared_out(self) -> Mapping[FeatureWork, Sequence[str]]:
        """Of modules that are computed whole, those of whose result ranks go on with parts; once they have run."""
        return {} if self._wholes is None else {"shares": self._wholes.shared_out()}

    def run(self, *, samples: int = SAMPLES, reads: bool = True) -> Trace:
        """Run it in training and in evaluation."""
        made = {function: partial(_constant, function) for function in _CONSTANTS}
        fused = {**FUSED, **made, _together: _as_event, _narrowed: _as_narrowed}
        fused |= {} if self._wholes is None else self._wholes.fused
        settings: Mapping[str, Any] = {"fused": fused, "reads": reads, "modes": BOTH, "samples": samples}
        return trace(self._blueprint, self._dtype, self._local, loss=False, **settings)

    def run_so_far(self) -> tuple[Trace | Unfinished, Sequence[Event]]:
        """Run it; where it raises, return what it had done until then."""
        try:
            found = self.run()
        except Unfinished as problem:
            return problem, problem.events
        return found, found.events

    def followed(self) -> FeatureWalker:
        """Run it, and follow its features.  Raises NoPartsError where they meet."""
        found = self.run()
        read = {name for name in self._cuts if self._roles[name.rpartition(".")[0]] in ("table", "loose")}
        shapes = {name: tuple(each.shape) for name, each in self._blueprint.module.named_parameters()}
        own: dict[int, str] = {}
        parts: dict[Value, Parts] = {}
        for storage, names in found.parameters.items():
            if read.intersection(names):
                shape, cut = shapes[names[0]], self._cuts[names[0]]
                strides = torch.empty(shape, device="meta").stride()
                parts[Value(storage, 0, shape, strides, self._dtype)] = Parts(cut.dim, cut.blocks)
            elif names[0] in self._cuts:
                own[storage] = names[0]
        dropouts = frozenset(name for name in self._roles if self._blueprint.kind_of(name) == "heads")
        results = frozenset(self._features.get("results", ()))
        walker = FeatureWalker(found, self._blueprint.module, own, parts, dropouts, results)
        walker.run()
        if self._wholes is not None:
            self._wholes.check_samples(self.run(samples=self._wholes.samples, reads=False))
        return walker

    def _stand_in(self, name: str, role: Role, module: Any) -> _Together:
        rule, parts = self._blueprint.rule_of(name), self._parts
        if role == "vocabulary":
            return _Together(role, name, 0, module.embedding_dim // parts, self._dtype)
        if role == "norm":
            width = -1 if _is_of_any_width(module) else width_of(module) // parts
            return _Together(role, name, width, width, self._dtype)
        weight: Tensor = module.weight
        makes, reads = weight.shape[::-1] if is_conv1d(module) else weight.shape
        blocks = rule.blocks if rule is not None and rule.kind == "column" else 1
        reads = reads if name in self._features.get("reads", ()) else reads // parts
        makes = makes if name in self._features.get("results", ()) else makes // parts
        return _Together(role, name, reads, makes, self._dtype, blocks)

    def _part(self, name: str) -> Tensor:
        cut, whole = self._cuts[name], self._blueprint.module.get_parameter(name)
        dims = range(whole.dim()) if cut.is_matrix else (cut.dim,)
        shape = [size // self._parts if dim in dims else size for dim, size in enumerate(whole.shape)]
        return nn.Parameter(torch.empty(shape, dtype=DTYPE, device="meta"), requires_grad=whole.requires_grad)


def _stand_in_forward(what: _Together, input: Tensor) -> Tensor:
    return _together(input, what)


def _logits_forward(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Only what the loss reads."""
    return logits_of(forward(*args, **kwargs))
