"""Dropout whose masks depend on (seed, step, sample, layer, number of its call, element), never on rank, microbatch or
device.

The mask of an element is a hash of these, so every plan drops the same elements: a microbatch draws what its samples
would draw in any other, a tensor or sequence shard its own part of the whole mask, a recomputed forward the mask of the
first.

Costs: forward and backward of (8, 256, 256) take 1.2 ms in fp32 and 1.6 ms in bf16 on one thread, where `nn.Dropout`
takes 2.6 and 2.5 ms (fastest of 40 on a shared AMD EPYC with AVX-512, torch 2.13, 2026-11).  On accelerators it is a
dozen small kernels against one.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.comm.collectives import shard_bounds
from weft.comm.mesh import GroupView, Mesh
from weft.errors import PlanError
from weft.model.blueprint import Blueprint
from weft.techniques.core._call_numbers import numbered
from weft.techniques.core._context import MicrobatchState, StepContext
from weft.techniques.core.grid import PartGrid
from weft.techniques.core.region import sequence_region

RESOLUTION = 1 << 16
"""Each hash of 32 bits serves two neighbouring elements with 16 bits, so p is rounded to a multiple of 1/65536; what is
kept is scaled by the rounded probability, hence unbiased."""
_CHUNK = 1 << 16
"""Hashes per piece on the CPU: 256 KiB of scratch, which stays in the cache."""

_NAME_BYTES = 64
"""Names of layers are filled up to a multiple of it."""

# Odd multipliers as signed integers (torch has no unsigned arithmetic): of splitmix64 (Steele et al. 2014,
# https://doi.org/10.1145/2714064.2660195) and of a 32-bit mixer of low bias (Wellons 2018,
# https://nullprogram.com/blog/2018/07/31/).
GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_WIDE_1, _WIDE_2 = 0xBF58476D1CE4E5B9 - (1 << 64), 0x94D049BB133111EB - (1 << 64)
_LOW_33, _LOW_34, _LOW_37 = (1 << 33) - 1, (1 << 34) - 1, (1 << 37) - 1
_NARROW_1, _NARROW_2 = 0x7FEB352D, 0x846CA68B - (1 << 32)


class _Masked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, keep: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(keep)
        ctx.scale = scale
        return torch.ops.aten.native_dropout_backward(x, keep, scale)  # x · keep · scale in one pass

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (keep,) = ctx.saved_tensors
        return torch.ops.aten.native_dropout_backward(grads[0], keep, ctx.scale), None, None


class KeyedDropout(nn.Dropout):
    """Dropout keyed by sample; takes activations with samples along dim 0 (a multiple of them, where tokens are
    flattened).

    Each call in a forward draws anew, and a recomputed one what it drew at first.  In evaluation, or with p = 0, it is
    the identity.  Outside a step (a frozen model inside another one's loss) it draws
    from torch's generator, which is seeded by step and data rank.
    """

    def __init__(self, p: float, key: str, context: StepContext, *, whole_features: bool = False) -> None:
        super().__init__(p)
        self.key = key
        encoded = key.encode()
        # As a tensor of few lengths: compiled code would ask for the very name, and be compiled for every block.
        self.encoded = torch.tensor([*encoded, *bytes(-len(encoded) % _NAME_BYTES)], dtype=torch.uint8, device="cpu")
        self.context = context
        self.compiled_calls = 0
        """Calls so far of the compiled code that runs now; `compiling.py` begins it anew with each run."""
        self.channels = whole_features
        """Whether to drop whole channels, as `nn.Dropout2d` does: one draw for (sample, dim 1)."""
        self.cut_dim: int | None = None
        """Dim along which the input is a shard of the whole activation: 1, or −1; None where it is whole."""
        self.view: GroupView | None = None
        self.sequence_sharded = False
        """Whether the shards along dim 1 are those of the sequence, which may be uneven."""

    def forward(self, input: Tensor) -> Tensor:
        if not self.training or self.p == 0.0:
            return input
        if self.context.ledger is not None:
            if self.context.current is not None:
                self.context.ledger.note(f"{self.key}\0{self.call_number()}", self.context)
            return input
        if self.context.current is None and self.view is None:
            # a call of the user's own outside every step, where there are no samples to key by
            return F.dropout(input, self.p)
        if self._is_scattered(input):
            return F.dropout(input, self.p)
        keep, scale = self.mask(input)
        return cast(Tensor, _Masked.apply(input, keep, scale))

    def _is_scattered(self, x: Tensor) -> bool:
        """Return whether rows are no samples, as where an expert takes its own tokens: one process may draw anything.

        Raises:
            PlanError: they are not, and there are other ranks or microbatches.
        """
        samples = self.context.require().sample_ids.numel()
        if x.shape[0] % samples == 0:
            return False
        if self.context.is_alone:
            return True
        raise PlanError(
            f"{self.key} drops elements of {tuple(x.shape)}, whose rows are no multiple of the {samples} samples at"
            " hand (an expert's own tokens, it may be), so that no key says which sample a row is of, and plans would"
            " drop different ones. Set this dropout to 0, put it where tokens are in order again, or train on one"
            " process with the whole batch in one microbatch."
        )

    def call_number(self) -> int:
        """Return the number of the call that draws now; to be asked once in each."""
        if torch.compiler.is_compiling():  # which may note nothing of what it does outside of its graph
            self.compiled_calls += 1
            return self.compiled_calls - 1
        return self.context.require().calls.take(self.key)

    @torch.no_grad()
    def mask(self, x: Tensor) -> tuple[Tensor, float]:
        """Return which elements of `x` are kept (bool, shape of `x`), and the factor of those."""
        state = self.context.require()
        # p in steps of 1 / RESOLUTION, and the scale from the rounded p, so that the expectation stays exact.
        dropped = min(max(round(self.p * RESOLUTION), 1), RESOLUTION)
        if dropped == RESOLUTION:
            return torch.zeros(x.shape, dtype=torch.bool, device=x.device), 0.0
        samples = state.sample_ids.numel()
        width = 1 if x.dim() == 1 else x.shape[1 if self.channels else -1]
        rows = 1 if self.channels else x.numel() // max(samples * width, 1)
        row_offset, column_offset = self._offsets(x, state, width)
        make = torch.ops.weft.keyed_mask if torch.compiler.is_compiling() else keyed_mask
        keys = state.sample_ids, state.moment, self.encoded, self.call_number()

        def keep_of(rows: int, row_offset: int) -> Tensor:
            return make(*keys, dropped, rows, row_offset, width, column_offset, x.device)

        # Context ranks hold runs of each sample's tokens: the rows of these runs, one mask for each run.
        if state.tokens is not None:
            num_tokens = state.tokens.held
            own = shard_bounds(num_tokens, self.view) if self.sequence_sharded and self.view else (0, num_tokens)
            runs = state.tokens.rows_of(x, samples, own, self.key)
            parts = [keep_of(stop - start, start).view(samples, stop - start, width) for start, stop in runs]
            return torch.cat(parts, 1).reshape(x.shape), RESOLUTION / (RESOLUTION - dropped)
        keep = keep_of(rows, row_offset)
        if self.channels:
            shape = (*x.shape[:2], *(1,) * (x.dim() - 2))
            return keep.view(shape).expand(x.shape).contiguous(), RESOLUTION / (RESOLUTION - dropped)
        return keep.reshape(x.shape), RESOLUTION / (RESOLUTION - dropped)

    def _offsets(self, x: Tensor, state: MicrobatchState, width: int) -> tuple[int, int]:
        """Return the first row of a sample and the first column that this rank has of the full activation."""
        if self.view is None or self.cut_dim is None:
            return 0, 0
        if self.cut_dim == -1 or self.channels:  # a channel (dim 1) draws once: parts of later dims draw the same
            has_part = not self.channels or self.cut_dim == 1 or x.dim() == 2
            return 0, self.view.index * width if has_part else 0
        if self.sequence_sharded:
            start, _ = shard_bounds(self.context.whole_length(), self.view)
        else:
            start = self.view.index * x.shape[1]
        return start * math.prod(x.shape[2:-1]), 0


def keyed_mask(
    sample_ids: Tensor,
    moment: Tensor,
    name: Tensor,
    call: int,
    dropped: int,
    rows: int,
    row_offset: int,
    width: int,
    column_offset: int,
    device: torch.device,
) -> Tensor:
    """Return what is kept of `rows` rows per sample and `width` columns, bool, (samples × rows, width); of `RESOLUTION`
    elements `dropped` are not.  `moment`: seed and step; `name`: the layer's, in UTF-8; `call`: number of its
    call."""
    words = layer_words(sample_ids, moment, name, call)
    positions = torch.arange(row_offset, row_offset + rows, device=device)
    return kept_rows(words, positions, (column_offset, column_offset + width), dropped).contiguous()


def _like_keyed_mask(
    sample_ids: Tensor,
    moment: Tensor,
    name: Tensor,
    call: int,
    dropped: int,
    rows: int,
    row_offset: int,
    width: int,
    column_offset: int,
    device: torch.device,
) -> Tensor:
    return torch.empty(sample_ids.shape[0] * rows, width, dtype=torch.bool, device=device)


# To a compiler one operator: Inductor would fold the wrapping integer arithmetic wrongly, and code outside of its
# graphs would cut a block in two.
torch.library.custom_op("weft::keyed_mask", keyed_mask, mutates_args=())
torch.library.register_fake("weft::keyed_mask", _like_keyed_mask)


def layer_words(sample_ids: Tensor, moment: Tensor, name: Tensor, call: int) -> Tensor:
    """Return the draw of each sample for a call of a layer, int64 (samples,).  `moment`: seed and step; `name`: the
    layer's, in UTF-8."""
    seed, step = moment.tolist()
    return sample_words(numbered(bytes(name.tolist()).rstrip(b"\0").decode(), call), seed, step, sample_ids)


def sample_words(key: str, seed: int, step: int, sample_ids: Tensor) -> Tensor:
    """Return a random word per sample of a layer's draw, int64 (samples,)."""
    # The key of (seed, step, layer) by a strong hash once per call, the samples by a cheap one: a sample's word does
    # not depend on which rank or microbatch it is in.
    digest = hashlib.blake2b(f"{seed}\0{step}\0{key}".encode(), digest_size=8).digest()
    return mix(sample_ids * GOLDEN + int.from_bytes(digest, "little", signed=True))


def mix(words: Tensor) -> Tensor:
    """Scramble int64 words: the finaliser of splitmix64, a bijection."""
    # Shifts of signed words bring their sign along, which is masked away.  Without the masks, and with sums in place of
    # the exclusive or, it is nearly linear: 100,000 normal numbers of one row had means of 0.07 (2026-11-25).
    words = (words ^ (words >> 30 & _LOW_34)) * _WIDE_1
    words = (words ^ (words >> 27 & _LOW_37)) * _WIDE_2
    return words ^ (words >> 31 & _LOW_33)


def kept_rows(words: Tensor, rows: Tensor, columns: tuple[int, int], dropped: int) -> Tensor:
    """Return what is kept of some rows and a run of columns of each sample's draw, bool (samples × rows, columns); of
    `RESOLUTION` elements `dropped` are not.  `words`: the draw of each sample; `rows`: their numbers."""
    (start, stop), device = columns, words.device
    # A word per row and a word per pair of columns, combined element by element: an element's hash needs no state, so a
    # shard of the mask is computed without the rest of it.
    row_words = (mix(words[:, None] + rows * GOLDEN) >> 32).to(torch.int32).flatten()
    pairs = torch.arange(start // 2, (stop + 1) // 2, device=device)
    column_words = (mix(pairs * GOLDEN) >> 32).to(torch.int32)
    keep = hashed_mask(row_words, column_words, dropped - RESOLUTION // 2)
    return keep[:, start % 2 : start % 2 + stop - start]


def hashed_mask(rows: Tensor, columns: Tensor, threshold: int) -> Tensor:
    """Return (rows, 2 × columns) of bool: whether the 16-bit hash of an element is at least `threshold` (signed)."""
    keep = torch.empty(rows.numel(), 2 * columns.numel(), dtype=torch.bool, device=rows.device)
    # In chunks on a CPU, so that the two scratch matrices stay in its cache.
    on_cpu = rows.device.type == "cpu"
    step = max(1, _CHUNK // max(columns.numel(), 1)) if on_cpu else max(rows.numel(), 1)
    scratch = torch.empty(2, min(step, rows.numel()), columns.numel(), dtype=torch.int32, device=rows.device)
    for start in range(0, rows.numel(), step):
        part = rows[start : start + step, None]
        words, shifted = scratch[:, : part.shape[0]]
        torch.bitwise_xor(part, columns, out=words)
        for multiplier, shift in ((_NARROW_1, 15), (_NARROW_2, 16)):
            words.mul_(multiplier)
            torch.bitwise_right_shift(words, shift, out=shifted)
            words.add_(shifted)
        # Each 32-bit word is two 16-bit hashes, of two neighbouring columns.
        torch.ge(words.view(torch.int16), threshold, out=keep[start : start + step])
    return keep


def apply_keyed_dropout(
    part: nn.Module,
    blueprint: Blueprint,
    mesh: Mesh,
    context: StepContext,
    *,
    sequence: bool,
    keyed: Collection[str] = (),
    grid: PartGrid | None = None,
) -> None:
    """Replace every `nn.Dropout`, `Dropout1d`, `Dropout2d` and `Dropout3d` of `part` in place; names stay.

    `sequence` is the plan's `tensor_parallel.sequence`: dropouts among the blocks then work on shards along dim 1,
    except those marked `heads` (input split along dim 1) or `features` (last dim).  Over a `grid` of tensor ranks all
    but `heads` work on parts of the features.  What a model draws by functions (`F.dropout`, `torch.rand`) is seen to
    by `draws.py`, for the modules named `keyed`.

    Raises:
        PlanError: a module that draws in another way (`nn.AlphaDropout`, `nn.RReLU`).
    """
    view = mesh["tensor"]
    sharded = sequence and view.group is not None
    region = sequence_region(blueprint) if sharded else None
    for name, module in list(part.named_modules(remove_duplicate=False)):
        if name not in keyed and isinstance(module, (nn.AlphaDropout, nn.FeatureAlphaDropout, nn.RReLU)):
            raise PlanError(
                f"{name} is an nn.{type(module).__name__}, whose draws Weft cannot key by sample, so plans"
                f" would differ."
                " Use nn.Dropout (or nn.LeakyReLU) instead."
            )
        is_dropout = isinstance(module, (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d))
        context.draws |= is_dropout and module.p > 0
        if isinstance(module, KeyedDropout) or not is_dropout:
            continue
        own = KeyedDropout(module.p, name, context, whole_features=not isinstance(module, nn.Dropout))
        own.train(module.training)
        kind = blueprint.kind_of(name)
        if grid is not None:
            own.view, own.cut_dim = (grid.heads, 1) if kind == "heads" else (grid.features, -1)
        elif view.group is not None and kind in ("heads", "features"):
            own.view, own.cut_dim = view, 1 if kind == "heads" else -1
        elif region is not None and region.contains(name) and kind != "replicate":
            own.view, own.cut_dim, own.sequence_sharded = view, 1, True
        parent, _, leaf = name.rpartition(".")
        setattr(part.get_submodule(parent), leaf, own)
