"""A profile from a model's weights alone, where its forward cannot be run without data."""

from __future__ import annotations

from torch import nn

from weft.analysis._holding import holding_of
from weft.analysis.facts import facts_of_blueprint
from weft.model.blueprint import Blueprint
from weft.model.profile import Block, Operator, Profile


def describe_weights(blueprint: Blueprint) -> Profile:
    """Return the profile of a model of one block, whose every token (or sample) goes through every module once.

    Model states are counted exactly.  What a forward keeps is its matrices' inputs, which is less than the truth; so
    plans are compared by it, and whether one fits beside its activations only a step tells.
    """
    counted: set[int] = set()
    operators = [
        _operator(name, module, counted)
        for name, module in blueprint.module.named_modules()
        if any(True for _ in module.parameters(recurse=False))
    ]
    widths = [operator.n for operator in operators if operator.kind == "matmul"]
    empty = Block(name="empty", operators=(), entry_elements_per_token=0.0)
    return Profile(
        name=type(blueprint.module).__name__,
        sequence_length=blueprint.sequence_length or 1,
        stem=empty,
        blocks=(Block(name="model", operators=tuple(operators), entry_elements_per_token=0.0),),
        tail=empty,
        hidden_size=max(widths, default=1),
        facts=facts_of_blueprint(blueprint).limited("blocks", "its forward cannot be described"),
        **holding_of(blueprint.module),
    )


def _operator(name: str, module: nn.Module, counted: set[int]) -> Operator:
    """A module's own parameters, tied ones at their first use: matrices multiply, tables are read, others scale."""
    own = {id(parameter): parameter for parameter in module.parameters(recurse=False)}
    parameters = sum(parameter.numel() for key, parameter in own.items() if key not in counted)
    counted |= own.keys()
    widest = max(own.values(), key=lambda parameter: parameter.numel())
    if widest.dim() < 2:
        return Operator(
            name=name or "model",
            kind="elementwise",
            parameters=parameters,
            elements_moved_per_token=2 * widest.numel(),
            kept_elements_per_token=widest.numel(),
        )
    if isinstance(module, nn.Embedding | nn.EmbeddingBag):
        width = module.embedding_dim
        return Operator(name=name, kind="gather", parameters=parameters, elements_moved_per_token=2 * width)
    n, k = widest.shape[0], widest.numel() // widest.shape[0]
    return Operator(name=name or "model", kind="matmul", n=n, k=k, parameters=parameters, kept_elements_per_token=k)
