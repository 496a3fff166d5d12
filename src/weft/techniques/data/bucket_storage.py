"""The flat storages of buckets: weights, masters and gradients, their dtypes, and this rank's region of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from weft.comm.flat import Collectives
from weft.comm.memory import new_flat
from weft.comm.mesh import Mesh
from weft.techniques.buckets.bucket_state import Bucket, BucketMember, BucketState
from weft.techniques.core._shard import Shard
from weft.techniques.core.precision import NARROW, real_of

if TYPE_CHECKING:
    from weft.techniques.compression.codecs import CodecSpec, CompressedReduction


@dataclass(frozen=True, slots=True)
class BucketStorage:
    """Allocates the storages of buckets under one ZeRO stage and one choice of dtypes."""

    stage: Literal[0, 1, 2]
    compute_dtype: torch.dtype
    gradient_dtype: torch.dtype
    compression: CodecSpec | None

    def allocate(self, bucket: Bucket, collectives: Collectives) -> BucketState:
        """Move the members' weights into one storage, and turn the parameters into views of it."""
        device, compute_dtype = bucket.members[0].parameter.device, self._compute_dtype_of(bucket)
        master_dtype = torch.promote_types(compute_dtype, torch.float32)
        whole = torch.zeros(bucket.num_elements, dtype=master_dtype, device=device)  # (elements,), padding stays zero
        for member, view in bucket.views(whole):
            view.copy_(member.stored(member.parameter.detach()))
        reducing = bucket.key.reducing
        start, stop = self.region(bucket)
        if master_dtype == compute_dtype:
            # The master is a view of the weights, so the optimizer's update needs no copy back.
            weights, master = whole, whole[start:stop]
        else:
            weights, master = whole.to(compute_dtype), whole[start:stop].clone()
        gradient_dtype = self._gradient_dtype_of(bucket)
        for member, view in bucket.views(weights):
            member.parameter.data = seen = member.seen(view)
            # Autograd then accumulates in the reduction's dtype: bf16 sums would lose the small microbatches.
            member.parameter.grad_dtype = gradient_dtype.to_complex() if seen.is_complex() else gradient_dtype
        is_cut = self.stage > 0
        shard = Shard(
            master=master,
            segments=bucket.segments(start, stop),
            group=bucket.key.group,
            counts=bucket.key.counts and (is_cut or reducing.index == 0),
            cut_group=reducing if is_cut and reducing.size > 1 else None,
            cut_matrices=bucket.cut_matrices() if is_cut else {},
        )
        if master_dtype != compute_dtype:
            shard.weights = weights[start:stop]
        shard.keeps_gradient = gradient_dtype == master_dtype
        kept = torch.zeros(stop - start, dtype=gradient_dtype, device=device) if self.stage == 2 else None
        reduction = self._create_reduction(bucket, weights)
        return BucketState(bucket, collectives, weights, master, shard, kept, reduction)

    def _compute_dtype_of(self, bucket: Bucket) -> torch.dtype:
        """Return the dtype of a bucket's weights: under fp32 and fp64, parameters of another dtype keep their own."""
        return self.compute_dtype if self.compute_dtype in NARROW else real_of(bucket.key.dtype)

    def _gradient_dtype_of(self, bucket: Bucket) -> torch.dtype:
        return self.gradient_dtype if self.compute_dtype in NARROW else real_of(bucket.key.dtype)

    def region(self, bucket: Bucket) -> tuple[int, int]:
        """Return [first, last) of the elements of a bucket that this rank updates."""
        return bucket.regions[bucket.key.reducing.index if self.stage else 0]

    def compressible(self, mesh: Mesh) -> Callable[[BucketMember], bool] | None:
        """Return which members' gradients are compressed; None: none are."""
        if self.compression is None:
            return None
        from weft.techniques.compression.reduction import compressible  # codecs are loaded where one is used

        return compressible(self.compression, mesh)

    def _create_reduction(self, bucket: Bucket, weights: Tensor) -> CompressedReduction | None:
        if self.compression is None or not bucket.key.compressed:
            return None
        from weft.techniques.compression.codecs import CompressedReduction
        from weft.techniques.compression.reduction import frame_of

        like = torch.empty_like(weights, dtype=self._gradient_dtype_of(bucket))
        frame = frame_of(bucket, sharded=self.stage > 0)
        return CompressedReduction(self.compression, frame, like, bucket.key.reducing)

    def new_gradients(self, state: BucketState) -> Tensor:
        """Give a bucket a storage of zeros for all its gradients, (elements,), shared between ranks where possible."""
        bucket = state.bucket
        dtype = self._gradient_dtype_of(bucket)
        made = new_flat(bucket.num_elements, dtype, state.weights.device, bucket.key.reducing)
        state.gradients = made.zero_()
        return state.gradients
