"""A program for transformers' Trainer, which knows nothing of Weft: `python trainer.py llama '{"max_steps": 4}'`.

Its global batch is the same on any number of processes.  Prints the losses of its steps and of its evaluation.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
)

SIZES: dict[str, Any] = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
BATCH, LENGTH, ROWS = 8, 12, 96


def llama(tokens: torch.Tensor) -> tuple[Any, list[dict[str, torch.Tensor]]]:
    """A language model; how many tokens of a row count differs."""
    model = LlamaForCausalLM(LlamaConfig(**SIZES, num_attention_heads=4, num_key_value_heads=2))
    rows: list[dict[str, torch.Tensor]] = []
    for number, row in enumerate(tokens):
        labels = row.clone()
        labels[: number % 7] = -100
        rows.append({"input_ids": row, "labels": labels})
    return model, rows


def bert(tokens: torch.Tensor) -> tuple[Any, list[dict[str, torch.Tensor]]]:
    """A classifier that drops nothing: what a model drops is drawn by sample under Weft, and is none of the peer's."""
    drops_nothing = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    model = BertForSequenceClassification(BertConfig(**SIZES, **drops_nothing, num_attention_heads=4, num_labels=3))
    # Its loss is a mean whatever it is told of the batch; else the Trainer multiplies it by the number of processes.
    model.accepts_loss_kwargs = False
    return model, [{"input_ids": row, "labels": torch.tensor(int(row.sum()) % 3)} for row in tokens]


def main(kind: str, given: dict[str, Any]) -> None:
    share = BATCH // int(os.environ.get("WORLD_SIZE", "1"))
    torch.manual_seed(0)
    tokens = torch.randint(SIZES["vocab_size"], (ROWS, LENGTH), generator=torch.Generator().manual_seed(1))
    model, rows = {"llama": llama, "bert": bert}[kind](tokens)
    resume = given.pop("resume", None)
    settings: dict[str, Any] = {"learning_rate": 1e-3, "seed": 3, "use_cpu": True, "disable_tqdm": True}
    settings |= {"output_dir": "saved", "save_strategy": "no", "report_to": [], "logging_steps": 1}
    settings |= {"per_device_train_batch_size": share, "per_device_eval_batch_size": share}
    trainer = Trainer(
        model=model, args=TrainingArguments(**settings | given), train_dataset=rows, eval_dataset=rows[:16]
    )
    trainer.train(resume_from_checkpoint=resume)
    evaluated = trainer.evaluate()
    if trainer.is_world_process_zero():
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        print(json.dumps([*losses, evaluated["eval_loss"]]))


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
