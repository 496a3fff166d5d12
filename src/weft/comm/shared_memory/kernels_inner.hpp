// The loops, compiled once per instruction set.  Included several times, inside a namespace of its own and under
// `#pragma GCC target`, by kernels.cpp; includes nothing itself, so that no library code is compiled for a processor
// that may not be there.

// Not __builtin_bit_cast, which g++ has from 11 on only; both compile to one move.
inline float bits_as_float(uint32_t bits) {
  float value;
  __builtin_memcpy(&value, &bits, sizeof value);
  return value;
}

inline uint32_t float_as_bits(float value) {
  uint32_t bits;
  __builtin_memcpy(&bits, &value, sizeof bits);
  return bits;
}

template <typename T>
struct Plain {
  using Stored = T;
  using Summed = T;
  static Summed load(Stored value) { return value; }
  static Stored store(Summed value) { return value; }
};

struct BF16 {
  using Stored = uint16_t;
  using Summed = float;
  static Summed load(Stored value) { return bits_as_float(uint32_t(value) << 16); }
  // To nearest, ties to even; a NaN stays one (its rounding up could end in infinity).
  static Stored store(Summed value) {
    const uint32_t bits = float_as_bits(value);
    const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    return static_cast<uint16_t>(value != value ? 0x7fc0u : rounded);
  }
};

struct F16 {
  using Stored = uint16_t;
  using Summed = float;
  // The exponent is moved by a multiplication with 2^112, which also makes denormal numbers normal.
  static Summed load(Stored value) {
    const uint32_t magnitude = (uint32_t(value) & 0x7fffu) << 13;
    const float scaled = bits_as_float(magnitude) * 0x1p112f;
    const uint32_t special = magnitude | 0x7f800000u;
    const uint32_t bits = magnitude >= 0x0f800000u ? special : float_as_bits(scaled);
    return bits_as_float(bits | (uint32_t(value) & 0x8000u) << 16);
  }
  static Stored store(Summed value) {
    const uint32_t bits = float_as_bits(value);
    const uint32_t sign = (bits >> 16) & 0x8000u;
    const uint32_t magnitude = bits & 0x7fffffffu;
    // Normal results: move the exponent, round the 13 bits that fall off to nearest, ties to even.
    const uint32_t normal = (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
    // Denormal results: adding 0.5 lets the addition itself round at the last place that fp16 has there.
    const float shifted = bits_as_float(magnitude) + 0.5f;
    const uint32_t denormal = float_as_bits(shifted) - 0x3f000000u;
    const uint32_t infinite = magnitude > 0x7f800000u ? 0x7e00u : 0x7c00u;
    const uint32_t finite = magnitude < 0x38800000u ? denormal : normal;
    return static_cast<uint16_t>(sign | (magnitude >= 0x477ff000u ? infinite : finite));
  }
};

struct Sum {
  template <typename T>
  static T apply(T a, T b) {
    return static_cast<T>(a + b);
  }
};

constexpr size_t kBlock = 2048;  // elements that are summed in the first-level cache

template <typename F, typename Op>
__attribute__((noinline)) void first_two(typename F::Summed* __restrict sums, const typename F::Stored* a,
                                         const typename F::Stored* b, size_t count) {
  for (size_t i = 0; i < count; ++i) sums[i] = Op::apply(F::load(a[i]), F::load(b[i]));
}

template <typename F, typename Op>
__attribute__((noinline)) void one_more(typename F::Summed* __restrict sums, const typename F::Stored* a,
                                        size_t count) {
  for (size_t i = 0; i < count; ++i) sums[i] = Op::apply(sums[i], F::load(a[i]));
}

template <typename F>
__attribute__((noinline)) void only_one(typename F::Stored* to, const typename F::Stored* a, size_t count) {
#pragma GCC ivdep
  for (size_t i = 0; i < count; ++i) to[i] = F::store(F::load(a[i]));
}

// `to` may be one of the sources, at the same place: each element is read before it is written, which is what the
// compiler is told here, since it would otherwise take its slow way out for overlapping arrays.
template <typename F, typename Op, bool kDivides>
__attribute__((noinline)) void last_two(typename F::Stored* to, const typename F::Stored* a,
                                        const typename F::Stored* b, int divisor, size_t count) {
#pragma GCC ivdep
  for (size_t i = 0; i < count; ++i) {
    const typename F::Summed sum = Op::apply(F::load(a[i]), F::load(b[i]));
    to[i] = F::store(kDivides ? static_cast<typename F::Summed>(sum / divisor) : sum);
  }
}

template <typename F, typename Op, bool kDivides>
__attribute__((noinline)) void last_one(typename F::Stored* to, const typename F::Summed* sums,
                                        const typename F::Stored* a, int divisor, size_t count) {
#pragma GCC ivdep
  for (size_t i = 0; i < count; ++i) {
    const typename F::Summed sum = Op::apply(sums[i], F::load(a[i]));
    to[i] = F::store(kDivides ? static_cast<typename F::Summed>(sum / divisor) : sum);
  }
}

template <typename F, typename Op, bool kDivides>
void reduce_blocks(void* const* to, int num_to, const void* const* from, int num_from, size_t count, int divisor) {
  using Stored = typename F::Stored;
  alignas(64) typename F::Summed sums[kBlock];
  alignas(64) Stored result[kBlock];
  for (size_t start = 0; start < count; start += kBlock) {
    const size_t length = count - start < kBlock ? count - start : kBlock;
    const auto source = [&](int rank) { return static_cast<const Stored*>(from[rank]) + start; };
    Stored* out = num_to == 1 ? static_cast<Stored*>(to[0]) + start : result;
    if (num_from == 1) {
      only_one<F>(out, source(0), length);
    } else if (num_from == 2) {
      last_two<F, Op, kDivides>(out, source(0), source(1), divisor, length);
    } else {
      first_two<F, Op>(sums, source(0), source(1), length);
      for (int rank = 2; rank < num_from - 1; ++rank) one_more<F, Op>(sums, source(rank), length);
      last_one<F, Op, kDivides>(out, sums, source(num_from - 1), divisor, length);
    }
    for (int target = 0; num_to > 1 && target < num_to; ++target) {
      copy(static_cast<Stored*>(to[target]) + start, result, length * sizeof(Stored), false);
    }
  }
}

template <bool kDivides>
Loop sum_loop(Dtype dtype) {
  switch (dtype) {
    case Dtype::kF32: return reduce_blocks<Plain<float>, Sum, kDivides>;
    case Dtype::kF64: return reduce_blocks<Plain<double>, Sum, kDivides>;
    case Dtype::kBF16: return reduce_blocks<BF16, Sum, kDivides>;
    case Dtype::kF16: return reduce_blocks<F16, Sum, kDivides>;
    default: return nullptr;
  }
}
