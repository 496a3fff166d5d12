"""Bytes that one rank keeps of one microbatch in one block, and its share of the block's weights."""

from __future__ import annotations

from typing import NamedTuple

from weft.config.plan import Recompute
from weft.model.profile import Block, Operator, Profile, last_of_experts
from weft.techniques.cost_terms import ELEMENT_BYTES, Framework, FrameworkMemory, Layout, PricedPrecision
from weft.techniques.recompute.cost import waiting_bytes
from weft.techniques.tensor.mesh_2d.shape import grid_shape, tesseract

_EIGHT_BITS = ("fp8", "mxfp8")


class BlockMemory(NamedTuple):
    """One microbatch in one block on one rank."""

    dense_parameters: float
    """Elements of this rank's weights, experts left out."""
    expert_parameters: float
    kept_bytes: float
    """Bytes that are kept from its forward to its backward."""
    live_bytes: float
    """Bytes that exist besides while the block's backward runs: recomputed activations, and gradients on their way."""


class MemoryKey(NamedTuple):
    """All that the memory of a block depends on, beside the block."""

    samples: int
    tensor: int
    weight_parts: int
    """Parts of a weight over the tensor axis; a 2.5-dimensional split copies each over its depth."""
    sequence_parallel: bool
    sample_parts: int
    """Parts that a square of tensor ranks cuts the samples into; 1: they form none."""
    context: int
    expert: int
    expert_tensor: int
    """Parts of each expert over the tensor axis."""
    precision: PricedPrecision


def memory_key(layout: Layout) -> MemoryKey:
    """Return what the memory of a layout's blocks depends on."""
    grid = grid_shape(layout.tensor_scheme, layout.tensor)
    return MemoryKey(
        samples=layout.microbatch_size,
        tensor=layout.tensor,
        weight_parts=layout.tensor // (tesseract(layout.tensor)[0] if layout.tensor_scheme == "2.5d" else 1),
        sequence_parallel=layout.tensor > 1 and (layout.sequence_parallel or layout.tensor_scheme != "1d"),
        sample_parts=grid.sample_parts if grid is not None else 1,
        context=layout.context,
        expert=layout.expert,
        expert_tensor=layout.expert_tensor,
        precision=layout.precision,
    )


def activation_bytes(precision: PricedPrecision) -> int:
    """Return the bytes of one element of an activation."""
    return ELEMENT_BYTES.get(precision, 2)


class BlockMemories:
    """Memory of blocks under one framework, kept by what it depends on."""

    def __init__(self, profile: Profile, framework: Framework) -> None:
        self._profile, self._framework = profile, framework
        self._found: dict[tuple[int, MemoryKey, Recompute], BlockMemory] = {}

    def memory(self, block: Block, key: MemoryKey, recompute: Recompute = "none") -> BlockMemory:
        """Return what one microbatch keeps in a block of the profile."""
        index = (id(block), key, recompute)
        memory = self._found.get(index)
        if memory is None:
            memory = self._found[index] = _memory(self._profile, self._framework, block, key, recompute)
        return memory


def _memory(profile: Profile, framework: Framework, block: Block, key: MemoryKey, recompute: Recompute) -> BlockMemory:
    tokens = key.samples * profile.sequence_length / key.context
    kept = _KeptBytes(framework, key, profile.sequence_length)
    # Backward frees what it has used: the fullest moment is the operator with most before it and the widest gradients.
    whole = fullest = 0.0
    for operator in block.operators:
        # Backward runs from the last operator to the first, so at operator i the outputs of 1 … i are alive.
        whole += kept.of(operator)
        fullest = max(fullest, whole + kept.gradient(operator))
    entry = kept.entry(block)
    waiting = waiting_bytes(recompute, whole, kept.selected(block), entry)
    # What waits is counted once per microbatch in flight; what is live exists once, for the block whose backward runs.
    live = max(0.0, fullest - waiting) + entry
    dense = experts = 0.0
    for operator in block.operators:
        if operator.split == "expert":
            experts += operator.parameters / min(key.expert, max(1, operator.groups)) / key.expert_tensor
        elif operator.split in ("replicate", "sequence"):
            dense += operator.parameters
        else:
            dense += operator.parameters / key.weight_parts
    return BlockMemory(dense, experts, tokens * waiting, tokens * live)


class _KeptBytes:
    """Bytes per token of one rank."""

    def __init__(self, framework: Framework, key: MemoryKey, length: int) -> None:
        self._memory_model: FrameworkMemory = framework.memory
        self._flash, fused = framework.flash_attention, framework.fused_elementwise
        self._fused_norms = fused if self._memory_model.fused_norms is None else self._memory_model.fused_norms
        self._fused_activations = (
            fused if self._memory_model.fused_activations is None else self._memory_model.fused_activations
        )
        self._key, self._length = key, length
        self._element = activation_bytes(key.precision)
        self._mask = 1 if self._memory_model.masks_in_bytes else self._element

    def entry(self, block: Block) -> float:
        """The activation that enters it."""
        return block.entry_elements_per_token * self._element / self._sequence_share

    def of(self, operator: Operator) -> float:
        """Return the bytes per token that an operator keeps without recomputation."""
        elements, fixed = operator.kept_elements_per_token, operator.kept_bytes_per_token
        if not self._fused_activations:
            elements += operator.unfused_elements_per_token
        if not self._fused_norms:
            fixed += operator.unfused_bytes_per_token
        if operator.dropout and operator.kind == "elementwise":
            fixed *= self._mask
        size = elements * self._element + fixed
        if self._memory_model.operands_in_fp8 and self._key.precision in _EIGHT_BITS and operator.kind == "elementwise":
            # Of what norms and activations keep, the result is a matmul's input.
            size -= (elements / 3 if operator.split in ("column", "expert") else elements / 2) * (self._element - 1)
        if operator.kind == "attention":
            size += self._scores(operator)
            size += self._projection(operator) * self._element
        # Sequence parallelism gathers a norm's result before a column-parallel product: kept gathered, it is as large
        # as without.
        if self._gathers(operator):
            # Of its input and its result, the norm's result stays gathered.
            half = operator.kept_elements_per_token / 2 * self._element
            return (size - half) / self._share(operator) + half
        return size / self._share(operator)

    def selected(self, block: Block) -> float:
        """Return the bytes per token that `recompute = "selective"` keeps of a block."""
        if self._memory_model.selective == "attention":
            return sum(
                self.of(operator) - self._scores(operator) / self._share(operator) * (operator.kind == "attention")
                for operator in block.operators
            )
        results = 0.0
        every = 2 if self._memory_model.selective == "alternate" else 1
        summed = last_of_experts(block.operators) if self._key.expert_tensor > 1 else None
        for operator in block.operators:
            if operator.kind in ("matmul", "convolution"):
                # A row-parallel product's result is summed over tensor ranks and then whole, or a part of the sequence.
                share = self._sequence_share if operator.split == "row" else self._share(operator)
                if operator is summed and self._key.sample_parts == 1:  # a part of each sum, of all tokens
                    share = 1
                results += operator.rows_per_token * operator.n * self._element / share / every
            elif operator.kind == "attention":
                size = operator.heads * operator.value_head_size * self._element + operator.kept_bytes_per_token
                results += (size + self._scores(operator)) / self._share(operator)
        return self.entry(block) + results

    def gradient(self, operator: Operator) -> float:
        """The gradients of what an operator keeps, while its backward runs."""
        size = operator.kept_elements_per_token * self._element
        if operator.kind == "attention":
            size += self._scores(operator) / 2
        return size / self._share(operator)

    def _projection(self, operator: Operator) -> float:
        """Elements kept of the joint projection."""
        if self._memory_model.kept_projection == "none":
            return 0.0
        values = operator.kv_heads * operator.value_head_size if self._memory_model.kept_projection == "all" else 0
        return (operator.heads + operator.kv_heads) * operator.head_size + values

    def _scores(self, operator: Operator) -> float:
        if self._flash:
            return 0.0
        keys = min(self._length, operator.window or self._length)
        each = self._memory_model.score_bytes * self._element / 2
        if operator.dropout:
            each += self._element + self._mask
        return operator.heads * keys * each

    def _gathers(self, operator: Operator) -> bool:
        is_norm_before_matmul = operator.kind == "elementwise" and operator.split == "sequence"
        return (
            self._memory_model.keeps_gathered
            and self._key.sequence_parallel
            and is_norm_before_matmul
            and operator.kept_elements_per_token > 0
        )

    @property
    def _sequence_share(self) -> int:
        return self._key.tensor if self._key.sequence_parallel else 1

    def _share(self, operator: Operator) -> int:
        if operator.split == "replicate" or (operator.moves_experts_rows and self._key.expert_tensor > 1):
            return 1
        return self._sequence_share if operator.split == "sequence" else self._key.tensor
