"""What the loss holds, with whole logits and with logits in chunks."""

from __future__ import annotations

from weft.model.profile import Profile
from weft.techniques.cost_terms import FrameworkMemory, Layout

_CPU_CHUNK_BYTES = float(8 << 20)
"""Size of the logits that exist at once in a loss by chunks, on a CPU."""


def loss_bytes(layout: Layout, profile: Profile, framework: FrameworkMemory, *, on_accelerator: bool) -> float:
    """Return the bytes that exist around the loss, on the rank that has the head."""
    element, tokens = layout.element_bytes, layout.microbatch_size * profile.sequence_length / layout.context
    whole, element_bytes = tokens * profile.vocabulary_size, framework.logit_bytes
    if layout.tensor > 1 and framework.parallel_logit_bytes is not None:
        element_bytes = framework.parallel_logit_bytes
    if framework.gathered_logit_bytes is None:
        whole /= layout.tensor
    else:
        element_bytes += framework.gathered_logit_bytes * (1 - 1 / layout.tensor)
    if element > 2:
        # No copies in another precision: logits, log-probabilities, and gradients of both.
        element_bytes = 4.0 * element if element_bytes > 12 else 2.0 * element
    if not layout.fuses_loss:
        return whole * element_bytes
    chunk = framework.fused_chunk_bytes if on_accelerator else _CPU_CHUNK_BYTES
    # The head's gradient is summed in fp32 over the chunks, beside the logits and probabilities of one of them.
    head = profile.vocabulary_size * profile.hidden_size / layout.tensor
    return min(whole * element_bytes, 2 * chunk) + (4.0 * head if element < 4 else 0.0)
