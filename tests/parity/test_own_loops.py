"""The row of loops that keep their own forward, backward and step: every layout that such a loop may have, against one
process.  Each step has two backwards, one of them of a short batch, is clipped, and its model draws."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cells import BATCH, HF_CONFIGS, plan
from pool import RankPool
from torch.utils.data import DataLoader

import weft
from weft.config.plan import Plan
from weft.errors import PlanError

PASSES, TOKENS = 2, 11
EXPERTS: dict[str, Any] = {
    "model_type": "mixtral", "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2,
    "vocab_size": 64, "max_position_embeddings": 64, "router_jitter_noise": 0.0, "experts_implementation": "eager",
}  # fmt: skip
CONFIGS = {**HF_CONFIGS, "hf_mixtral": EXPERTS}


def _data(zero: int, ranks: int = 2, **others: Any) -> Plan:
    axes = {"replicate": ranks} if zero == 0 else {"shard": ranks}
    return plan(zero=zero, **axes, micro=1, **others)


LAYOUTS: dict[str, tuple[str, Plan]] = {
    **{f"zero-{zero}": ("hf_gpt2", _data(zero)) for zero in range(4)},
    **{f"zero-{zero} of 4": ("hf_bert", _data(zero, 4)) for zero in range(4)},
    "hybrid": ("hf_gpt2", plan(replicate=2, shard=2, zero=3, micro=1)),
    "hybrid of zero-2": ("hf_gpt2", plan(replicate=2, shard=2, zero=2, micro=1)),
    "tensor": ("hf_gpt2", plan(tensor=2)),
    "tensor of 4": ("hf_gpt2", plan(tensor=4)),
    "tensor of Llama": ("hf_llama", plan(tensor=2)),
    **{f"tensor and zero-{zero}": ("hf_gpt2", _data(zero, tensor=2)) for zero in range(4)},
    "tensor of Llama and zero-3": ("hf_llama", _data(3, tensor=2)),
    "recomputed": ("hf_gpt2", _data(3, recompute="full")),
    "partly recomputed": ("hf_bert", _data(2, recompute="selective")),
    "mixture": ("hf_mixtral", _data(1)),
    "mixture of zero-3": ("hf_mixtral", _data(3)),
}


def losses(kind: str, plan: Plan) -> list[float]:
    """Losses and norms of a loop under a plan."""
    import transformers

    config = transformers.AutoConfig.for_model(**CONFIGS[kind])
    task = transformers.AutoModelForMaskedLM if kind == "hf_bert" else transformers.AutoModelForCausalLM
    rows = torch.randint(1, 64, (26, TOKENS), generator=torch.Generator().manual_seed(1))
    torch.manual_seed(0)
    model: Any = task.from_config(config).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loader: Any = DataLoader([{"input_ids": row, "labels": row} for row in rows], BATCH, shuffle=True)  # type: ignore[arg-type]
    with weft.session(plan=plan, permit=("fp64",), quiet=True, record=False) as session:
        model, optimizer, loader = session.prepare(model, optimizer, loader)
        found, taken = list[float](), 0
        for _ in range(PASSES):
            for batch in loader:
                logits = model(input_ids=batch["input_ids"]).logits[:, :-1]
                loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten()) / 2
                session.backward(loss)
                found.append(session.mean(loss))
                taken += 1
                if taken % 2 == 0:
                    found.append(float(session.clip_grad_norm_(model, 0.5)))
                    optimizer.step()
                    optimizer.zero_grad()
        return found


@pytest.mark.parametrize("name", LAYOUTS)
def test_equals_one_process(ranks: RankPool, name: str) -> None:
    kind, layout = LAYOUTS[name]
    (expected,) = ranks.run(1, losses, kind, plan(micro=BATCH))
    tolerance = 1e-10 if kind in ("hf_gpt2", "hf_bert") else 1e-6  # the others rotate and normalise in fp32
    for found in ranks.run(layout.mesh.world_size, losses, kind, layout):
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=0)


def refused(layout: Plan) -> str:
    with pytest.raises(PlanError) as caught:
        losses("hf_mixtral" if layout.mesh.expert > 1 else "hf_llama", layout)
    return str(caught.value)


REFUSED = {
    "pipeline": (plan(pipeline=2), "session.prepare(model, optimizer, loader, loss=…)"),
    "context": (plan(context=2), "session.prepare(model, optimizer, loader, loss=…)"),
    "experts": (plan(shard=2, expert=2, zero=1), "cannot be had in a loop of one's own"),
    "sequence": (plan(tensor=2, sequence=True), "has no sequence to split"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_layouts_are_refused(ranks: RankPool, name: str) -> None:
    """Where no rank has a whole forward or a whole sample, or ranks share experts out."""
    layout, text = REFUSED[name]
    for told in ranks.run(2, refused, layout):
        assert text in told
