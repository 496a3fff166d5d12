// Copies and reductions over plain memory: what a rank does between two turns.
#pragma once

#include <cstddef>
#include <cstdint>

namespace weft {

enum class Dtype : uint32_t { kF32 = 0, kF64, kBF16, kF16, kI8, kI16, kI32, kI64, kU8, kBool, kU16, kU32, kU64, kCount };
// In torch's order.
enum class ReduceOp : uint32_t { kSum = 0, kAvg, kProduct, kMin, kMax, kBitAnd, kBitOr, kBitXor, kCount };

size_t element_bytes(Dtype dtype);
bool is_defined(Dtype dtype, ReduceOp op);  // bitwise operations are not for floats, averages not for truth values

// Stores past the cache where `is_streaming`; the caller publishes behind an sfence.  Only for what another core reads
// next: what this one has just read, such as the result of an all-reduce in place, is in its cache already.
void copy(void* to, const void* from, size_t bytes, bool is_streaming);

// to[d][i] = from[0][i] op from[1][i] op … for all d, in the order of `from`; averages are divided at the end.
// A `to` may be one of `from`, at the same place; else they must not overlap.  bf16 and fp16 are summed in fp32 and
// rounded once.
void reduce(Dtype dtype, ReduceOp op, void* const* to, int num_to, const void* const* from, int num_from,
            size_t count);

const char* kernel_variant();  // "avx512", "avx2" or "baseline"

}  // namespace weft
