"""Updates of a few rows of a table, against torch's optimizers on sparse gradients."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from weft.config.recipe import OptimizerRecipe
from weft.errors import RecipeError
from weft.run.engine.optimizers import SparseState, check_sparse_support, check_sparse_tables, sparse_step
from weft.techniques.core import SparseRows

TOKENS = [[3, 3, 7], [0, 3, 9], [7, 7, 7]]


def table() -> Tensor:
    return torch.randn(10, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def sparse_gradient(weight: Tensor, tokens: list[int]) -> Tensor:
    embedding = nn.Embedding.from_pretrained(weight.clone(), freeze=False, sparse=True)
    (embedding(torch.tensor(tokens)) ** 3).sum().backward()
    assert embedding.weight.grad is not None
    return embedding.weight.grad


def create_sparse_state(rule: str, table: Tensor) -> SparseState:
    """The states that a rule keeps for a table."""
    names = {"adagrad": ("square_sum",), "adam": ("exp_avg", "exp_avg_sq")}.get(rule, ())
    return SparseState(**{name: torch.zeros_like(table) for name in names})


@pytest.mark.parametrize(
    ("rule", "make"),
    [
        ("sgd", lambda w: torch.optim.SGD(w, lr=0.1)),
        ("adagrad", lambda w: torch.optim.Adagrad(w, lr=0.1, eps=1e-8)),
        ("adam", lambda w: torch.optim.SparseAdam(w, lr=0.1)),
    ],
)
def test_sparse_steps_equal_torch(rule: str, make: Callable[[list[nn.Parameter]], torch.optim.Optimizer]) -> None:
    mine, theirs = table(), nn.Parameter(table())
    state = create_sparse_state(rule, mine)
    optimizer = make([theirs])
    for tokens in TOKENS:
        theirs.grad = sparse_gradient(theirs.detach(), tokens)
        rows = SparseRows.from_gradient(sparse_gradient(mine, tokens) * 4)
        sparse_step(rule, mine, rows, state, learning_rate=0.1, gradient_scale=0.25)  # type: ignore[arg-type]
        with torch.sparse.check_sparse_tensor_invariants():  # torch warns where nobody says whether to check
            optimizer.step()
    torch.testing.assert_close(mine, theirs.detach(), rtol=1e-12, atol=1e-12)


def test_rows_of_several_sources_add_up() -> None:
    parts = [sparse_gradient(table(), tokens) for tokens in TOKENS]
    merged = SparseRows.merge([SparseRows.from_gradient(part) for part in parts])
    whole = sum(part.to_dense() for part in parts)
    assert merged.indices.tolist() == [0, 3, 7, 9]
    assert isinstance(whole, Tensor)
    torch.testing.assert_close(merged.values, whole[merged.indices])


def test_a_rank_without_rows_counts_the_step_and_changes_nothing() -> None:
    weight = table()
    state = create_sparse_state("adam", weight)
    rows = SparseRows(indices=torch.zeros(0, dtype=torch.int64), values=torch.zeros(0, 4, dtype=torch.float64))
    sparse_step("adam", weight, rows, state, learning_rate=0.1)
    assert state.step == 1
    assert torch.equal(weight, table())


@pytest.mark.parametrize(
    ("recipe", "decay", "reason"),
    [
        (OptimizerRecipe(name="adamw"), 0.0, "adamw also moves rows"),
        (OptimizerRecipe(name="sgd", momentum=0.9), 0.0, r"momentum = 0\.9"),
        (OptimizerRecipe(name="sgd", momentum=0.0), 0.1, r"weight_decay = 0\.1"),
    ],
)
def test_optimizers_that_move_other_rows_refuse(recipe: OptimizerRecipe, decay: float, reason: str) -> None:
    with pytest.raises(RecipeError, match=f"embedding.weight has sparse gradients.*{reason}.*sparse=False"):
        check_sparse_support(recipe, "embedding.weight", decay)


def test_plain_sgd_takes_sparse_gradients() -> None:
    check_sparse_support(OptimizerRecipe(name="sgd", momentum=0.0), "embedding.weight", 0.0)


def test_a_rule_of_their_own_lets_tables_stand_beside_any_optimizer() -> None:
    recipe = OptimizerRecipe(name="adamw", sparse_rule="adam")
    check_sparse_tables(recipe, {"embedding.weight": (10, 4)})
    with pytest.raises(RecipeError, match=r'sparse_rule = "adam" would do nothing: no trained nn\.Embedding'):
        check_sparse_tables(recipe, {})
    with pytest.raises(RecipeError, match=r"weight_decay = 0\.1 also moves rows"):
        check_sparse_tables(OptimizerRecipe(weight_decay=0.1, sparse_rule="adam"), {"embedding.weight": (10, 4)})
