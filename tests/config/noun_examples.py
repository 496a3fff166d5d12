"""Recipes and plans that the tests of the nouns start from."""

from __future__ import annotations

from weft.config.plan import ModelFacts, Plan
from weft.config.recipe import BatchRecipe, ModelRecipe, PermitRecipe, Recipe, ReferenceShape, RunRecipe
from weft.config.recipe import DecoderShape as DecoderShape
from weft.model.description import facts_of

RECIPE = """\
# A recipe as people write it.
[model]
reference = "decoder"
num_layers = 12
hidden_size = 512
num_heads = 8
num_kv_heads = 4

[data]
train = [
    { source = "stdlib", weight = 1 },
    { source = "more", weight = 0.5 },  # half as often
]

[batch]
global_batch_size = 64

[optimizer]
learning_rate = 3e-4
schedule = "cosine"
warmup_steps = 100

[run]
steps = 1000

[permit]
precision = ["fp32", "bf16"]
"""

PLAN = """\
[mesh]
pipeline = 2
tensor = 2

[data_parallel]
bucket_bytes = 26_214_400

[pipeline_parallel]
cuts = [7]

[microbatch]
size = 4
per_step = 16

[memory]
recompute = "selective"
"""

SMALL = DecoderShape(num_layers=12, hidden_size=512, num_heads=8, num_kv_heads=4)


def recipe_of(shape: ReferenceShape = SMALL, batch: int = 64, permit: PermitRecipe | None = None) -> Recipe:
    return Recipe(
        model=ModelRecipe(shape=shape),
        batch=BatchRecipe(global_batch_size=batch),
        run=RunRecipe(steps=10),
        permit=permit or PermitRecipe(),
    )


def case(plan: Plan, shape: ReferenceShape = SMALL, batch: int = 64) -> tuple[Plan, Recipe, ModelFacts]:
    """Arguments of `check_plan`."""
    recipe = recipe_of(shape, batch)
    return plan, recipe, facts_of(recipe)
