"""What a line of `metrics.jsonl` holds, of whatever run."""

STEP_KEYS = {
    "kind", "step", "loss", "count", "gradient_norm", "learning_rate", "skipped", "loss_scale", "memory_bytes",
    "samples_per_second", "tokens_per_second", "flops_per_second", "peak_share", "unix_time_seconds", "step_seconds",
    "data_wait_seconds", "forward_backward_seconds", "reduce_wait_seconds", "optimizer_seconds", "checkpoint_seconds",
    "evaluation_seconds", "other_seconds", "communication",
}  # fmt: skip
"""Of a step."""
