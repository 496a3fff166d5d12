"""Checkpoints and exports of a user's model, its optimizer and what is attached to them.

`optimizer` steps the user's torch optimizer over this rank's shards, and `optimizer_states` reads what it keeps and
gives it back.  `saves` writes and fills checkpoints of a model, `stateful` what else has a `state_dict`; `export`
writes a folder for `transformers` or `peft`.
"""
