#include "kernels.hpp"

#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace weft {

using Loop = void (*)(void* const*, int, const void* const*, int, size_t, int);

namespace baseline {
#include "kernels_inner.hpp"
}

#if defined(__x86_64__) && defined(__GNUC__)
#define WEFT_HAS_VARIANTS
#if defined(__clang__)
#undef WEFT_HAS_VARIANTS  // it has no target for a stretch of a file
#else
#pragma GCC push_options
#pragma GCC target("avx2")
namespace avx2 {
#include "kernels_inner.hpp"
}
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,prefer-vector-width=512")
namespace avx512 {
#include "kernels_inner.hpp"
}
#pragma GCC pop_options
#endif
#endif

namespace {

using baseline::BF16;
using baseline::F16;
using baseline::Plain;
using baseline::reduce_blocks;

// Sums and products of signed integers wrap, as torch's do, by way of the unsigned type; widened first, since the
// product of two 16-bit numbers is taken as `int` and may leave it.
template <typename T>
struct Wrapping {
  using Stored = T;
  using Summed = T;
  static T load(T value) { return value; }
  static T store(T value) { return value; }
};

struct WrappingSum {
  template <typename T>
  static T apply(T a, T b) {
    return static_cast<T>(static_cast<uint64_t>(a) + static_cast<uint64_t>(b));
  }
};

struct WrappingProduct {
  template <typename T>
  static T apply(T a, T b) {
    return static_cast<T>(static_cast<uint64_t>(a) * static_cast<uint64_t>(b));
  }
};

struct Product {
  template <typename T>
  static T apply(T a, T b) {
    return static_cast<T>(a * b);
  }
};

// A NaN on any rank is one in the result, whichever rank has it.
struct Min {
  template <typename T>
  static T apply(T a, T b) {
    return a != a || a < b ? a : b;
  }
};

struct Max {
  template <typename T>
  static T apply(T a, T b) {
    return a != a || a > b ? a : b;
  }
};

struct BitAnd {
  template <typename T>
  static T apply(T a, T b) {
    return static_cast<T>(a & b);
  }
};

struct BitOr {
  template <typename T>
  static T apply(T a, T b) {
    return static_cast<T>(a | b);
  }
};

struct BitXor {
  template <typename T>
  static T apply(T a, T b) {
    return static_cast<T>(a ^ b);
  }
};

// Bytes that mean false or true; whatever comes in, 0 or 1 goes out.
struct Truth {
  using Stored = uint8_t;
  using Summed = uint8_t;
  static uint8_t load(uint8_t value) { return value != 0; }
  static uint8_t store(uint8_t value) { return value; }
};

template <typename F>
Loop float_loop(ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum: return reduce_blocks<F, baseline::Sum, false>;
    case ReduceOp::kAvg: return reduce_blocks<F, baseline::Sum, true>;
    case ReduceOp::kProduct: return reduce_blocks<F, Product, false>;
    case ReduceOp::kMin: return reduce_blocks<F, Min, false>;
    case ReduceOp::kMax: return reduce_blocks<F, Max, false>;
    default: return nullptr;
  }
}

template <typename T>
Loop integer_loop(ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum: return reduce_blocks<Wrapping<T>, WrappingSum, false>;
    case ReduceOp::kAvg: return reduce_blocks<Wrapping<T>, WrappingSum, true>;
    case ReduceOp::kProduct: return reduce_blocks<Wrapping<T>, WrappingProduct, false>;
    case ReduceOp::kMin: return reduce_blocks<Wrapping<T>, Min, false>;
    case ReduceOp::kMax: return reduce_blocks<Wrapping<T>, Max, false>;
    case ReduceOp::kBitAnd: return reduce_blocks<Wrapping<T>, BitAnd, false>;
    case ReduceOp::kBitOr: return reduce_blocks<Wrapping<T>, BitOr, false>;
    case ReduceOp::kBitXor: return reduce_blocks<Wrapping<T>, BitXor, false>;
    default: return nullptr;
  }
}

// A sum of truth values is whether any is true, a product whether all are.
Loop truth_loop(ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum:
    case ReduceOp::kMax:
    case ReduceOp::kBitOr: return reduce_blocks<Truth, BitOr, false>;
    case ReduceOp::kProduct:
    case ReduceOp::kMin:
    case ReduceOp::kBitAnd: return reduce_blocks<Truth, BitAnd, false>;
    case ReduceOp::kBitXor: return reduce_blocks<Truth, BitXor, false>;
    default: return nullptr;
  }
}

enum class Variant { kBaseline, kAvx2, kAvx512 };

Variant best_variant() {
#if defined(WEFT_HAS_VARIANTS)
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512dq"))
    return Variant::kAvx512;
  if (__builtin_cpu_supports("avx2")) return Variant::kAvx2;
#endif
  return Variant::kBaseline;
}

template <bool kDivides>
Loop sum_loop(Dtype dtype) {
#if defined(WEFT_HAS_VARIANTS)
  static const Variant variant = best_variant();
  if (variant == Variant::kAvx512) return avx512::sum_loop<kDivides>(dtype);
  if (variant == Variant::kAvx2) return avx2::sum_loop<kDivides>(dtype);
#endif
  return baseline::sum_loop<kDivides>(dtype);
}

Loop loop_for(Dtype dtype, ReduceOp op) {
  if (op == ReduceOp::kSum) {
    if (const Loop found = sum_loop<false>(dtype)) return found;
  }
  if (op == ReduceOp::kAvg) {
    if (const Loop found = sum_loop<true>(dtype)) return found;
  }
  if (op == ReduceOp::kAvg && dtype == Dtype::kBool) return nullptr;
  switch (dtype) {
    case Dtype::kF32: return float_loop<Plain<float>>(op);
    case Dtype::kF64: return float_loop<Plain<double>>(op);
    case Dtype::kBF16: return float_loop<BF16>(op);
    case Dtype::kF16: return float_loop<F16>(op);
    case Dtype::kI8: return integer_loop<int8_t>(op);
    case Dtype::kI16: return integer_loop<int16_t>(op);
    case Dtype::kI32: return integer_loop<int32_t>(op);
    case Dtype::kI64: return integer_loop<int64_t>(op);
    case Dtype::kU8: return integer_loop<uint8_t>(op);
    case Dtype::kU16: return integer_loop<uint16_t>(op);
    case Dtype::kU32: return integer_loop<uint32_t>(op);
    case Dtype::kU64: return integer_loop<uint64_t>(op);
    case Dtype::kBool: return truth_loop(op);
    default: return nullptr;
  }
}

#if defined(__x86_64__)
void stream(char* to, const char* from, size_t bytes) {
  const size_t head = (64 - reinterpret_cast<uintptr_t>(to) % 64) % 64;
  if (bytes < head + 64) {
    std::memcpy(to, from, bytes);
    return;
  }
  std::memcpy(to, from, head);
  to += head, from += head, bytes -= head;
  for (; bytes >= 64; to += 64, from += 64, bytes -= 64) {
    const __m128i* in = reinterpret_cast<const __m128i*>(from);
    __m128i* out = reinterpret_cast<__m128i*>(to);
    const __m128i a = _mm_loadu_si128(in), b = _mm_loadu_si128(in + 1);
    const __m128i c = _mm_loadu_si128(in + 2), d = _mm_loadu_si128(in + 3);
    _mm_stream_si128(out, a);
    _mm_stream_si128(out + 1, b);
    _mm_stream_si128(out + 2, c);
    _mm_stream_si128(out + 3, d);
  }
  std::memcpy(to, from, bytes);
}
#endif

}  // namespace

size_t element_bytes(Dtype dtype) {
  switch (dtype) {
    case Dtype::kF64:
    case Dtype::kI64:
    case Dtype::kU64: return 8;
    case Dtype::kF32:
    case Dtype::kI32:
    case Dtype::kU32: return 4;
    case Dtype::kBF16:
    case Dtype::kF16:
    case Dtype::kI16:
    case Dtype::kU16: return 2;
    default: return 1;
  }
}

bool is_defined(Dtype dtype, ReduceOp op) { return loop_for(dtype, op) != nullptr; }

void copy(void* to, const void* from, size_t bytes, bool is_streaming) {
#if defined(__x86_64__)
  if (is_streaming) {
    stream(static_cast<char*>(to), static_cast<const char*>(from), bytes);
    return;
  }
#endif
  (void)is_streaming;  // arm64: a stored line needs no read before it when it is written whole
  std::memcpy(to, from, bytes);
}

void reduce(Dtype dtype, ReduceOp op, void* const* to, int num_to, const void* const* from, int num_from,
            size_t count) {
  if (count == 0) return;
  const int divisor = op == ReduceOp::kAvg ? num_from : 1;
  loop_for(dtype, op)(to, num_to, from, num_from, count, divisor);
}

const char* kernel_variant() {
  switch (best_variant()) {
    case Variant::kAvx512: return "avx512";
    case Variant::kAvx2: return "avx2";
    default: return "baseline";
  }
}

}  // namespace weft
