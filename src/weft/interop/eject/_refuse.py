"""Refuses recipes and plans that cannot be ejected, with the reasons."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from weft.config.document import format_value
from weft.config.plan import Plan
from weft.config.recipe import DecoderShape, Recipe, read_hf_config
from weft.errors import PlanError, RecipeError
from weft.model.description import description_of, facts_of
from weft.model.families import family_of
from weft.techniques.check import runnability
from weft.techniques.registry import unsupported_in_script

_SPLIT_LAYERS = {
    *("model.embed_tokens", "lm_head"),
    *(f"model.layers.*.self_attn.{name}_proj" for name in "qkvo"),
    *(f"model.layers.*.mlp.{name}_proj" for name in ("gate", "up", "down")),
}
"""Layers of transformers that the fragments split."""
_CAUSAL = ("ForCausalLM", "LMHeadModel")


def check_ejectable(recipe: Recipe, plan: Plan) -> None:
    """Raise unless a plain script can train this recipe under this plan to the same losses.

    Raises:
        RecipeError: for settings of the recipe, one sentence each; PlanError: for those of the plan.
    """
    # The recipe first: a plan may fail only because of a model that no script could train.
    if reasons := list(recipe_refusals(recipe)):
        raise RecipeError("\n".join(["This recipe cannot be ejected:", *reasons]))
    if reasons := [*runnability(plan), *plan_refusals(recipe, plan)]:
        raise PlanError("\n".join(["This plan cannot be ejected:", *reasons]))


def recipe_refusals(recipe: Recipe) -> Iterator[str]:
    """Yield why a recipe has no plain script."""
    model, optimizer = recipe.model, recipe.optimizer
    if model.shape is not None and not isinstance(model.shape, DecoderShape):
        yield (
            f'model.reference = "{model.reference}": only decoders are written out. Use reference = "decoder", or '
            f"model.factory with a language model of your own."
        )
    if isinstance(model.shape, DecoderShape) and model.shape.num_experts:
        yield f"model.num_experts = {model.shape.num_experts}: the script has dense feed-forward layers only. Use 0."
    if model.loss not in (None, "tokens"):
        yield f'model.loss = "{model.loss}": the script knows the loss over tokens only. Leave it out.'
    if recipe.data.documents == "isolated":
        yield 'data.documents = "isolated": the script does not pass document borders. Use "packed".'
    if any(source.source == "digits" for source in recipe.data.train):
        yield 'data.train has the source "digits": the script reads token shards. Use text.'
    if model.freeze:
        yield f"model.freeze = {format_value(list(model.freeze))}: the script trains every parameter. Leave it out."
    if optimizer.name not in ("adamw", "sgd"):
        yield f'optimizer.name = "{optimizer.name}": plain torch has none of the same kind. Use "adamw" or "sgd".'
    if optimizer.groups:
        yield "optimizer.groups: the script has one group that decays and one that does not. Leave them out."
    if optimizer.sparse_rule is not None:
        yield f'optimizer.sparse_rule = "{optimizer.sparse_rule}": the script has dense gradients only. Leave it out.'
    if model.hf is not None:
        yield from _hf_refusals(model.hf, read_hf_config(model.hf))


def _hf_refusals(path: str, config: Mapping[str, object]) -> Iterator[str]:
    architectures = config.get("architectures") or ()
    family = family_of(str(config.get("model_type")))
    named = "MaskedLM" in str(architectures)
    masked = named if architectures else family is not None and family.task == "masked_lm"
    if masked:
        yield f'model.hf = "{path}": a masked language model; the script asks for the next token. Use a causal one.'
    first = str(next(iter(architectures), "")) if isinstance(architectures, list | tuple) else ""
    if first and not masked and not first.endswith(_CAUSAL):
        yield f'model.hf = "{path}": the script does not know the loss of a {first}. Use a causal language model.'


def plan_refusals(recipe: Recipe, plan: Plan) -> Iterator[str]:
    """Yield why a plan that can be run has no plain script."""
    yield from plan.compute.unsupported_in_script()
    yield from unsupported_in_script(plan)
    yield from _order_refusals(plan)
    yield from _model_refusals(recipe, plan)


def _order_refusals(plan: Plan) -> Iterator[str]:
    mesh = plan.mesh
    order = [axis for axis in mesh.order if getattr(mesh, axis) > 1 and axis != "expert"]
    data = [order.index(axis) for axis in ("replicate", "shard") if axis in order]
    # `fully_shard` takes (replicate, shard) as one two-dimensional mesh, which must be contiguous in the order of
    # ranks.
    if len(data) == 2 and data[1] - data[0] != 1:
        yield "plan.mesh.order puts replicate and shard apart or shard first: the script needs them side by side."
    if plan.data_parallel.shards_gradients and "tensor" in order and data and order.index("tensor") < data[-1]:
        yield "plan.mesh.order has tensor outside the data axes, where `fully_shard` cannot cut. Put tensor last."


def _has_known_layers(recipe: Recipe) -> bool:
    """Whether the model can be cut, and just the layers split that the fragments name, with no norm on their heads."""
    known = description_of(recipe)
    if known is None or known.tables.cut is None or known.sizes is None:
        return False
    split = {rule.match for rule in known.tables.split if rule.divides}
    return split == _SPLIT_LAYERS and known.sizes.qk_norm == "none"


def _model_refusals(recipe: Recipe, plan: Plan) -> Iterator[str]:
    mesh, model, data_parallel = plan.mesh, recipe.model, plan.data_parallel
    splits = mesh.tensor > 1 or mesh.pipeline > 1
    length, sequence = facts_of(recipe).sequence_length, plan.tensor_parallel.sequence
    if mesh.tensor > 1 and model.split:
        yield "model.split: the script splits layers as Weft's own table says. Leave it out, or use tensor = 1."
    if sequence and (model.hf is not None or length is None or length % mesh.tensor):
        yield (
            f"plan.tensor_parallel.sequence = true needs the decoder and a sequence_length that {mesh.tensor} divides. "
            f"Use false."
        )
    if model.factory is not None and (splits or plan.memory.recomputes or plan.compute.compile):
        yield f'model.factory = "{model.factory}": the script does not know its layers. Use data axes alone.'
    if model.hf is None:
        return
    config = read_hf_config(model.hf)
    if (splits or data_parallel.shards_gradients) and not _has_known_layers(recipe):
        kind = config.get("model_type")
        yield f'model.hf = "{model.hf}": of a {kind} the script does not know the layers. Use zero = 1 and data axes.'
    biased = [name for name in ("attention_bias", "mlp_bias") if config.get(name)]
    if mesh.tensor > 1 and biased:
        yield (
            f"{biased[0]} with a tensor axis: biases behind row layers are whole on every rank, and the script's "
            f"gradient norm would count them {mesh.tensor} times. Use tensor = 1."
        )
    if plan.memory.recomputes or plan.compute.compile:
        yield "plan.memory.recompute and plan.compute.compile are for the decoder here. Use none and false."
    if mesh.pipeline > 1 and data_parallel.shards_gradients and mesh.data > 1:
        yield f"plan.{data_parallel.zero_setting} with stages of a Hugging Face model. Use zero = 1."
    if mesh.pipeline > 1 and plan.tensor_parallel.sequence:
        yield "plan.tensor_parallel.sequence = true with stages of a Hugging Face model. Use false."
