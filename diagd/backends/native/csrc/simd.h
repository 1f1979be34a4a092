// Vectors as wide as a register of the processor, and the few operations on them that each kind of
// processor spells in its own way. All else is written with the operators of GNU vectors.
//
// The kernels are compiled without contraction of products and sums (compiler.py): what is fused is
// fused here, by name. So compilers, and processors with vectors of other widths, agree on the bits
// of whatever does not call `fma`.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>
#if defined(__SSE2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#elif defined(__wasm_simd128__)
#include <wasm_simd128.h>
#endif

// Bytes of a register, and how many registers there are.
#if defined(__AVX512F__)
constexpr int REGISTER = 64, REGISTERS = 32;
#elif defined(__AVX2__)
constexpr int REGISTER = 32, REGISTERS = 16;
#elif defined(__aarch64__)
constexpr int REGISTER = 16, REGISTERS = 32;
#else
constexpr int REGISTER = 16, REGISTERS = 16;
#endif
#if defined(__AVX512BF16__)
#define BF16_DOTS  // products of pairs of bfloat16
#endif

// At any address, whatever was written there.
#define VECTOR(bytes, element) __attribute__((vector_size(bytes), aligned(element), may_alias))
typedef float Floats VECTOR(REGISTER, 4);
typedef int32_t Ints VECTOR(REGISTER, 4);
typedef uint16_t Shorts VECTOR(REGISTER / 2, 2);
typedef uint16_t bf16;
template <bool whole>
struct Vector {
  typedef Floats of;
};
template <>
struct Vector<true> {
  typedef Ints of;
};
// Weights of one column for successive k: two of bfloat16, two whole numbers, four whole numbers.
struct Pair {
  bf16 at[2];
};
struct Duo {
  int16_t at[2];
};
struct Quad {
  int8_t at[4];
};

constexpr int WIDTH = REGISTER / 4;  // numbers of a vector
constexpr int LINE = 16;  // numbers of a line of the cache
#define INLINE inline __attribute__((always_inline))

INLINE int ceil_to(int n, int multiple) { return (n + multiple - 1) / multiple * multiple; }

INLINE Floats splat(float x) { return x - Floats{}; }
INLINE Ints splat(int32_t x) { return x - Ints{}; }
INLINE Floats load(const float* p) { return *(const Floats*)p; }
INLINE Floats load(const bf16* p) {
#if defined(__AVX512F__)  // compilers spell the widening below in several instructions
  return (Floats)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)),
                                   16);
#elif defined(__AVX2__)
  return (Floats)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16);
#else
  return (Floats)(__builtin_convertvector(*(const Shorts*)p, Ints) << 16);
#endif
}
INLINE void store(float* p, Floats x) { *(Floats*)p = x; }
INLINE Floats to_floats(Ints x) { return __builtin_convertvector(x, Floats); }
// To the nearest whole number, ties to even, of numbers below 2^22 in magnitude.
INLINE Ints to_ints(Floats x) {
  const Floats magic = splat(12582912.0f);
  return (Ints)(x + magic) - (Ints)magic;
}

// a where it is greater, else b, also where one is NaN.
INLINE Floats greater(Floats a, Floats b) {
#if defined(__AVX512F__)
  return (Floats)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
  return (Floats)_mm256_max_ps((__m256)a, (__m256)b);
#else
  return a > b ? a : b;
#endif
}

INLINE Ints greater(Ints a, Ints b) {
#if defined(__AVX512F__)
  return (Ints)_mm512_max_epi32((__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
  return (Ints)_mm256_max_epi32((__m256i)a, (__m256i)b);
#else
  return a > b ? a : b;
#endif
}

// a * b + sums, rounded once where the processor has such an instruction.
INLINE Floats fma(Floats a, Floats b, Floats sums) {
#if defined(__AVX512F__)
  return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)sums);
#elif defined(__AVX2__) && defined(__FMA__)
  return (Floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)sums);
#elif defined(__aarch64__)
  return (Floats)vfmaq_f32((float32x4_t)sums, (float32x4_t)a, (float32x4_t)b);
#elif defined(__wasm_relaxed_simd__)
  return (Floats)wasm_f32x4_relaxed_madd((v128_t)a, (v128_t)b, (v128_t)sums);
#else
  return a * b + sums;
#endif
}

// Adds the products of four bytes of x, from 0 to 127, with four of w, from -127 to 127: exact, and
// of 7 bits on one side, for then two products fit into 16 bits, which some processors add up
// first.
INLINE Ints dot_quads(Ints sums, Ints x, Ints w) {
#if defined(__AVX512VNNI__)
  return (Ints)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)x, (__m512i)w);
#elif defined(__AVX512BW__)
  const __m512i pairs = _mm512_maddubs_epi16((__m512i)x, (__m512i)w);
  return sums + (Ints)_mm512_madd_epi16(pairs, _mm512_set1_epi16(1));
#elif defined(__AVX2__) && defined(__AVXVNNI__)
  return (Ints)_mm256_dpbusd_avx_epi32((__m256i)sums, (__m256i)x, (__m256i)w);
#elif defined(__AVX2__)
  const __m256i pairs = _mm256_maddubs_epi16((__m256i)x, (__m256i)w);
  return sums + (Ints)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
#elif defined(__ARM_FEATURE_DOTPROD)
  return (Ints)vdotq_s32((int32x4_t)sums, (int8x16_t)x, (int8x16_t)w);
#elif defined(__aarch64__)
  const int8x16_t a = (int8x16_t)x, b = (int8x16_t)w;
  const int16x8_t low = vmull_s8(vget_low_s8(a), vget_low_s8(b)), high = vmull_high_s8(a, b);
  return (Ints)vpadalq_s16((int32x4_t)sums, vpaddq_s16(low, high));
#elif defined(__wasm_relaxed_simd__)  // relaxed of what 7 bits never reach
  return (Ints)wasm_i32x4_relaxed_dot_i8x16_i7x16_add((v128_t)w, (v128_t)x, (v128_t)sums);
#elif defined(__wasm_simd128__)  // bytes 0 and 2, then 1 and 3
  const v128_t a = (v128_t)x, b = (v128_t)w;
  const auto even = [](v128_t v) { return wasm_i16x8_shr(wasm_i16x8_shl(v, 8), 8); };
  const v128_t pairs = wasm_i16x8_add(wasm_i16x8_mul(even(a), even(b)),
                                      wasm_i16x8_mul(wasm_i16x8_shr(a, 8), wasm_i16x8_shr(b, 8)));
  return sums + (Ints)wasm_i32x4_extadd_pairwise_i16x8(pairs);
#else
  for (int shift = 24; shift >= 0; shift -= 8) sums += (x << shift >> 24) * (w << shift >> 24);
  return sums;
#endif
}

// Adds the products of two whole numbers of 16 bits of x with two of w.
INLINE Ints dot_duos(Ints sums, Ints x, Ints w) {
#if defined(__AVX512VNNI__)
  return (Ints)_mm512_dpwssd_epi32((__m512i)sums, (__m512i)x, (__m512i)w);
#elif defined(__AVX512BW__)
  return sums + (Ints)_mm512_madd_epi16((__m512i)x, (__m512i)w);
#elif defined(__AVX2__) && defined(__AVXVNNI__)
  return (Ints)_mm256_dpwssd_avx_epi32((__m256i)sums, (__m256i)x, (__m256i)w);
#elif defined(__AVX2__)
  return sums + (Ints)_mm256_madd_epi16((__m256i)x, (__m256i)w);
#elif defined(__SSE2__)
  return sums + (Ints)_mm_madd_epi16((__m128i)x, (__m128i)w);
#elif defined(__aarch64__)
  const int16x8_t a = (int16x8_t)x, b = (int16x8_t)w;
  const int32x4_t low = vmull_s16(vget_low_s16(a), vget_low_s16(b)), high = vmull_high_s16(a, b);
  return sums + (Ints)vpaddq_s32(low, high);
#elif defined(__wasm_simd128__)
  return sums + (Ints)wasm_i32x4_dot_i16x8((v128_t)x, (v128_t)w);
#else
  return sums + (x << 16 >> 16) * (w << 16 >> 16) + (x >> 16) * (w >> 16);
#endif
}

// Shortens to as many numbers of 16 or 8 bits, into which they fit.
INLINE void put_shorts(int16_t* to, Ints x) {
#if defined(__AVX512F__)
  _mm256_storeu_si256((__m256i*)to, _mm512_cvtepi32_epi16((__m512i)x));
#elif defined(__AVX2__)
  const __m128i low = _mm256_castsi256_si128((__m256i)x);
  const __m128i high = _mm256_extracti128_si256((__m256i)x, 1);
  _mm_storeu_si128((__m128i*)to, _mm_packs_epi32(low, high));
#elif defined(__SSE2__)
  _mm_storel_epi64((__m128i*)to, _mm_packs_epi32((__m128i)x, (__m128i)x));
#elif defined(__aarch64__)
  vst1_s16(to, vmovn_s32((int32x4_t)x));
#elif defined(__wasm_simd128__)
  wasm_v128_store64_lane(to, wasm_i16x8_narrow_i32x4((v128_t)x, (v128_t)x), 0);
#else
  for (int i = 0; i < WIDTH; i++) to[i] = x[i];
#endif
}
INLINE void put_bytes(int8_t* to, Ints x) {
  int16_t shorts[WIDTH];
  put_shorts(shorts, x);
  for (int i = 0; i < WIDTH; i++) to[i] = shorts[i];
}

INLINE bf16 round_to_bf16(float x) {  // to nearest, ties to even; finite numbers only
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
}
INLINE void put(float* p, float x) { *p = x; }
INLINE void put(bf16* p, float x) { *p = round_to_bf16(x); }

// 2^x to 3 ulp for x below 127; 0 where it would be less than 2^-126: such numbers are slow. NaN
// stays NaN, so that what went wrong in attention is seen in the logits.
INLINE Floats exp2(Floats x) {
  const Floats clamped = x < -126.0f ? splat(-126.0f) : x;
  const Floats magic = splat(12582912.0f), shifted = clamped + magic;  // rounds
  const Floats r = clamped - (shifted - magic);
  Floats p = splat(1.3264726e-3f);
  p = p * r + 9.6715127e-3f;
  p = p * r + 5.5507337e-2f;
  p = p * r + 2.4022242e-1f;
  p = p * r + 6.9314698e-1f;
  p = p * r + 1.0f;
#if defined(__AVX512F__)  // the same bits
  const __mmask16 normal = _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(-126), _CMP_NLT_UQ);
  return (Floats)_mm512_maskz_scalef_ps(normal, (__m512)p, (__m512)(shifted - magic));
#else
  return x < -126.0f ? Floats{} : (Floats)((Ints)p + (((Ints)shifted - (Ints)magic) << 23));
#endif
}

constexpr float LOG2_E = 1.44269504f;
// e^x for any x, to 3 ulp and a rounding of x.
INLINE Floats exp(Floats x) { return exp2(x < 88.0f ? x * LOG2_E : splat(88 * LOG2_E)); }

// A row is summed up in LINE parts, on every processor the same ones, and they one after the other.
struct Parts {
  Floats at[LINE / WIDTH] = {};

  float sum() const {
    float total = 0;
    for (int i = 0; i < LINE; i++) total += at[i / WIDTH][i % WIDTH];
    return total;
  }
};

// The highest number; any, where one is NaN.
template <class V>
INLINE auto max(V x) {
  auto highest = x[0];
  for (int i = 1; i < WIDTH; i++) highest = x[i] > highest ? x[i] : highest;
  return highest;
}
// Of numbers of which none is negative, as bits, among which NaN is above all numbers.
INLINE float max_of_bits(Ints bits) {
  const int32_t highest = max(bits);
  float number;
  std::memcpy(&number, &highest, sizeof(number));
  return number;
}
