"""Attention that is written out, read as a call: what it computes, and what of it is refused."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from itertools import product
from random import Random

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.model.attention.written import AttentionReader

SAMPLES, HEADS, TOKENS, SIZE = 2, 3, 7, 4
TRIANGLE = torch.ones(16, 16, dtype=torch.bool).tril()
BAND = TRIANGLE & torch.ones(16, 16, dtype=torch.bool).triu(-3)
Step = Callable[[Tensor], Tensor]


class Refused(Exception):
    """What a reader did not understand."""


def refused(place: str, what: str) -> Exception:
    return Refused(f"{place} {what}")


def drawn(*lead: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    made = (torch.randn(*lead, TOKENS, SIZE, generator=generator, dtype=torch.float64) for _ in range(3))
    query, key, value = (each.requires_grad_() for each in made)
    return query, key, value


def corner(mask: Tensor) -> Tensor:
    return mask[:TOKENS, :TOKENS]


def least(scores: Tensor) -> Tensor:
    return torch.tensor(torch.finfo(scores.dtype).min, dtype=scores.dtype, device=scores.device)


def gated(scores: Tensor) -> Tensor:
    gate = TRIANGLE.double()[None, None, :TOKENS, :TOKENS]
    return scores * gate + -1e4 * (1 - gate)


PRODUCTS: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "at": lambda q, k: q @ k.transpose(-1, -2),
    "matmul": lambda q, k: torch.matmul(q, k.mT),
    "method": lambda q, k: q.matmul(k.transpose(2, 3)),
    "scaled before": lambda q, k: (q * 0.5) @ k.transpose(-1, -2),
}
IN_ONE_DIM: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "bmm": lambda q, k: torch.bmm(q, k.transpose(1, 2)),
    "baddbmm": lambda q, k: torch.baddbmm(
        torch.zeros(q.shape[0], TOKENS, TOKENS, dtype=q.dtype), q, k.transpose(1, 2), beta=1.0, alpha=0.5
    ),
    "baddbmm of nothing": lambda q, k: torch.baddbmm(
        torch.empty(q.shape[0], TOKENS, TOKENS, dtype=q.dtype), q, k.transpose(1, 2), beta=0, alpha=0.25
    ),
}
SCALES: Mapping[str, Step] = {
    "none": lambda s: s,
    "times": lambda s: s * 0.7,
    "number first": lambda s: 0.7 * s,
    "divided": lambda s: s / math.sqrt(SIZE),
    "by a tensor of one number": lambda s: s / torch.tensor(2.0),
}
MASKS: Mapping[str, Step] = {
    "none": lambda s: s,
    "where": lambda s: torch.where(corner(TRIANGLE), s, least(s)),
    "where the other way": lambda s: torch.where(~corner(TRIANGLE), torch.finfo(s.dtype).min, s),
    "method where": lambda s: s.where(corner(TRIANGLE), -1e9),
    "fill": lambda s: s.masked_fill(~corner(TRIANGLE), -math.inf),
    "added": lambda s: s + torch.zeros(TOKENS, TOKENS, dtype=s.dtype).masked_fill(~corner(TRIANGLE), -1e9),
    "gate": gated,
    "window": lambda s: s.masked_fill(~corner(BAND), -math.inf),
    "nothing": lambda s: s + torch.zeros(1, 1, TOKENS, TOKENS, dtype=s.dtype),
    "no less": lambda s: torch.max(
        s.masked_fill(~corner(TRIANGLE), torch.finfo(s.dtype).min),
        torch.full((), torch.finfo(s.dtype).min, dtype=s.dtype),
    ),
}
SOFTMAXES: Mapping[str, Step] = {
    "function": lambda s: F.softmax(s, dim=-1),
    "method": lambda s: s.softmax(-1),
    "module": nn.Softmax(dim=-1),
    "wide": lambda s: torch.softmax(s, -1, dtype=torch.float64).to(s.dtype),
    "by place": lambda s: s.softmax(s.dim() - 1),
}


def mixed(form: Callable[[Tensor, Tensor, Tensor], Tensor], *lead: int, read: bool) -> tuple[Tensor, ...]:
    """A form's result and its gradients."""
    query, key, value = drawn(*lead)
    reader = AttentionReader(TOKENS, causal=False, refused=refused)
    if read:
        with reader:
            made = form(query, key, value)
        assert reader.has_begun
        assert type(made) is Tensor
    else:
        made = form(query, key, value)
    weights = torch.linspace(-1, 1, made.numel(), dtype=made.dtype).view(made.shape)
    return made.detach(), *torch.autograd.grad((made * weights).sum(), (query, key, value))


def forms() -> list[tuple[str, str, str, str]]:
    every = list(product(PRODUCTS | IN_ONE_DIM, SCALES, MASKS, SOFTMAXES))
    return Random(0).sample(every, 40) + [("matmul", "divided", mask, "function") for mask in MASKS]


@pytest.mark.parametrize("names", forms(), ids="-".join)
def test_what_is_read_is_what_is_written(names: tuple[str, str, str, str]) -> None:
    made, scaled, masked, softened = names

    def form(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        scores = (PRODUCTS | IN_ONE_DIM)[made](query, key)
        if made in IN_ONE_DIM:
            scores = scores.view(SAMPLES, HEADS, TOKENS, -1)
        scores = SOFTMAXES[softened](MASKS[masked](SCALES[scaled](scores)))
        if made in IN_ONE_DIM:
            scores = scores.reshape(SAMPLES * HEADS, TOKENS, TOKENS)
        return torch.matmul(scores, value)

    lead = (SAMPLES * HEADS,) if made in IN_ONE_DIM else (SAMPLES, HEADS)
    for found, wanted in zip(mixed(form, *lead, read=True), mixed(form, *lead, read=False), strict=True):
        assert torch.allclose(found, wanted, rtol=1e-10, atol=1e-12)


def bias() -> Tensor:
    return torch.linspace(0, 1, TOKENS * TOKENS, dtype=torch.float64).view(TOKENS, TOKENS)


def soft(scores: Tensor) -> Tensor:
    return scores.softmax(-1)


def in_place(scores: Tensor) -> Tensor:
    scores += bias()
    return scores.softmax(-1)


def changed(mask: Tensor) -> Tensor:
    """No longer what it was filled with."""
    mask[0, 0] = -5.0
    return mask


def overwritten(number: Tensor) -> Tensor:
    """No longer what it was filled with, and no version says so."""
    number.data.mul_(0.1)
    return number


REFUSED: Mapping[str, tuple[Step, str]] = {
    "bias": (lambda s: soft(s + bias()), "no mask which can be read"),
    "padding": (lambda s: soft(s + bias()[0].round()), "no mask which can be read"),
    "mask of some pairs": (lambda s: soft(s.masked_fill(bias() > 0.9, -1e9)), "no mask which can be read"),
    "mask of later tokens": (lambda s: soft(s.masked_fill(corner(TRIANGLE), -1e9)), "no mask which can be read"),
    "half hidden": (lambda s: soft(s.masked_fill(~corner(TRIANGLE), -100.0)), "hides scores by -100"),
    "hidden, then seen again": (
        lambda s: soft(s.masked_fill(~corner(TRIANGLE), -1e4) / 100),
        "hides scores by -100",
    ),
    "zeros that are none": (lambda s: soft(s + changed(torch.zeros(TOKENS, TOKENS))), "no mask which can be read"),
    "all hidden": (
        lambda s: soft(s.masked_fill(torch.ones(TOKENS, TOKENS, dtype=torch.bool), -1e9)),
        "no mask which can be read",
    ),
    "mask for each head": (
        lambda s: soft(s + torch.zeros(HEADS, TOKENS, TOKENS).double().mul(-1.0)[..., :TOKENS]),
        "no mask which can be read",
    ),
    "gate alone": (lambda s: soft(s * corner(TRIANGLE).double()), "softmax of something else"),
    "other gate": (
        lambda s: soft(s * corner(TRIANGLE).double() - 1e4 * (1 - corner(BAND).double())),
        "takes something off",
    ),
    "gates that differ": (
        lambda s: soft(s * corner(TRIANGLE).double() + -1e4 * (1 - corner(BAND).double())),
        "no mask that can be read",
    ),
    "negative": (lambda s: soft(s * -1.0), "multiplies scores by -1"),
    "a number written over": (lambda s: soft(s * overwritten(torch.ones(1))), "softmax of something else"),
    "by a parameter": (lambda s: soft(s * nn.Parameter(torch.ones(1))), "softmax of something else"),
    "over queries": (lambda s: s.softmax(-2), "not over the keys"),
    "twice": (lambda s: s.softmax(-1).softmax(-1), "softmax of something else"),
    "no softmax": (lambda s: s, "no softmax"),
    "sigmoid": (lambda s: s.sigmoid(), "does sigmoid"),
    "in place": (in_place, "does add_ "),
    "transposed": (lambda s: soft(s.transpose(-1, -2)), "does transpose"),
    "some of them": (lambda s: soft(s)[..., :3], "takes some of its scores"),
    "dropped before": (lambda s: soft(F.dropout(s, 0.5)), "drops scores that are no probabilities"),
    "dropped twice": (lambda s: F.dropout(F.dropout(soft(s), 0.5), 0.5), "drops them twice"),
    "dropped in place": (lambda s: F.dropout(soft(s), 0.5, inplace=True), "drops attention in place"),
    "all dropped": (lambda s: F.dropout(soft(s), 1.0), "by no rate between 0 and 1"),
    "dropped by a rate that is learnt": (lambda s: torch.dropout(soft(s), torch.tensor(0.5), True), "by no rate"),  # type: ignore[arg-type]
    "scaled probabilities": (lambda s: soft(s) * 2.0, "multiplies its probabilities"),
    "masked probabilities": (lambda s: soft(s).masked_fill(~corner(TRIANGLE), 0.0), "something else in the place"),
    "biased probabilities": (lambda s: soft(s) + bias(), "adds something to its scores"),
    "detached": (lambda s: soft(s.detach()), "detaches its scores"),
    "one another": (lambda s: soft(s + s), "combines scores with one another"),
    "other heads": (
        lambda s: soft(s.view(SAMPLES * HEADS, TOKENS, TOKENS).view(HEADS, SAMPLES, TOKENS, TOKENS)),
        "other heads",
    ),
    "laid out otherwise": (lambda s: soft(s.view(SAMPLES, HEADS, -1)), "lays its scores out otherwise"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_understood_is_refused_by_name(name: str) -> None:
    step, what = REFUSED[name]
    query, key, value = drawn(SAMPLES, HEADS)
    reader = AttentionReader(TOKENS, causal=False, refused=refused)
    reader.enter("attention", nn.Identity())
    with reader, pytest.raises(Refused, match=f"^attention .*{what}"):
        torch.matmul(step(query @ key.mT), value)


def test_a_product_that_turns_scores_over_is_refused() -> None:
    query, key, _ = drawn(SAMPLES * HEADS)
    reader, nothing = AttentionReader(TOKENS, causal=False, refused=refused), torch.zeros(1, 1, 1, dtype=query.dtype)
    reader.enter("attention", nn.Identity())
    with reader, pytest.raises(Refused, match="multiplies scores by -0.7"):
        torch.baddbmm(nothing, query, key.mT, beta=0, alpha=-0.7)


def test_a_dropout_of_its_own_drops_what_it_would() -> None:
    """In evaluation nothing; in training by the module, whose draws are not made of scores."""
    dropout = nn.Dropout(0.5).eval()

    def form(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return dropout((query @ key.mT).softmax(-1)) @ value

    for found, wanted in zip(
        mixed(form, SAMPLES, HEADS, read=True), mixed(form, SAMPLES, HEADS, read=False), strict=True
    ):
        assert torch.allclose(found, wanted, rtol=1e-10, atol=1e-12)


def test_a_function_drops_what_it_would() -> None:
    """By the same draws of torch's generator, for nothing else is drawn meanwhile."""

    def form(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return F.dropout((query @ key.mT).softmax(-1), 0.3) @ value

    made: list[tuple[Tensor, ...]] = []
    for read in (True, False):
        torch.manual_seed(1)
        made.append(mixed(form, SAMPLES, HEADS, read=read))
    for found, wanted in zip(*made, strict=True):
        assert torch.allclose(found, wanted, rtol=1e-10, atol=1e-12)


def test_another_module_that_drops_by_a_function_is_refused() -> None:
    query, key, _ = drawn(SAMPLES, HEADS)
    reader = AttentionReader(TOKENS, causal=False, refused=refused)
    with reader:
        reader.enter("attention", nn.Identity())
        probabilities = (query @ key.mT).softmax(-1)
        reader.enter("attention.inner", nn.Identity())
        with pytest.raises(Refused, match=r"attention.inner drops attention by a function of another module"):
            F.dropout(probabilities, 0.5)


def test_scores_that_left_what_reads_them_say_so() -> None:
    query, key, value = drawn(SAMPLES, HEADS)
    with AttentionReader(TOKENS, causal=False, refused=refused):
        scores = query @ key.mT
    with pytest.raises(Exception, match="outside of what attends"):
        scores.softmax(-1)


def test_scores_of_one_module_are_not_finished_in_another() -> None:
    query, key, value = drawn(SAMPLES, HEADS)
    reader = AttentionReader(TOKENS, causal=False, refused=refused)
    with reader:
        reader.enter("first", nn.Identity())
        probabilities = (query @ key.mT).softmax(-1)
        reader.leave()
        reader.enter("second", nn.Identity())
        with pytest.raises(Refused, match="second attends by scores that first made"):
            torch.matmul(probabilities, value)


def test_other_products_are_left_as_they_are() -> None:
    query, key, _ = drawn(SAMPLES, HEADS)
    with AttentionReader(TOKENS + 1, causal=False, refused=refused) as reader:
        assert type(query @ key.mT) is Tensor
        assert type(query @ torch.ones(SIZE, TOKENS + 1, dtype=query.dtype)) is Tensor
    assert not reader.has_begun
