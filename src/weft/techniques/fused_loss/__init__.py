"""The fused vocabulary loss: head and loss in chunks of tokens, so that full logits never exist."""
