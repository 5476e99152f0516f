// Vectors of floats of the width that the compiler's target has, and the functions of F on them.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX512F__)
constexpr int LANES = 16;
#elif defined(__AVX2__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif

typedef float Floats __attribute__((vector_size(LANES * 4)));
typedef int32_t Ints __attribute__((vector_size(LANES * 4)));

static inline Floats load(const float* p) {
  Floats x;
  memcpy(&x, p, sizeof x);
  return x;
}

static inline void store(float* p, Floats x) { memcpy(p, &x, sizeof x); }

static inline Floats all(float x) { return x - Floats{}; }

static inline Ints bits(Floats x) { return (Ints)x; }

static inline Floats pick(Ints mask, Floats yes, Floats no) { return mask ? yes : no; }

static inline Floats absolute(Floats x) { return (Floats)(bits(x) & INT32_MAX); }

// Transposes a block of LANES rows: in step D, rows that differ in bit D exchange the lanes that differ in it.
template <int D = LANES / 2>
static inline void transpose(Floats* x) {
  if constexpr (D > 0) {
    for (int i = 0; i < LANES; i++) {
      if (i & D) continue;
      Floats a = x[i], b = x[i + D];
#if defined(__GNUC__) && !defined(__clang__)
      Ints first, second;
      for (int l = 0; l < LANES; l++) first[l] = l & D ? LANES + l - D : l, second[l] = l & D ? LANES + l : l + D;
      x[i] = __builtin_shuffle(a, b, first), x[i + D] = __builtin_shuffle(a, b, second);
#else
      for (int l = 0; l < LANES; l++) x[i][l] = l & D ? b[l - D] : a[l], x[i + D][l] = l & D ? b[l] : a[l + D];
#endif
    }
    transpose<D / 2>(x);
  }
}

// As in XLA, what is not a number stays so in these two, and 0 exceeds -0.
static inline Floats largest(Floats a, Floats b) {
  Floats x = pick(a == b, (Floats)(bits(a) & bits(b)), pick(a > b, a, b));
  return pick(a != a, a, x);
}
static inline Floats least(Floats a, Floats b) {
  Floats x = pick(a == b, (Floats)(bits(a) | bits(b)), pick(a < b, a, b));
  return pick(a != a, a, x);
}

// e^x: x = n log 2 + r, a polynomial of r (Cephes), and 2^n in two steps, so that results may be subnormal or infinite.
static inline Floats exponential(Floats x) {
  x = pick(x > 89.0f, all(89.0f), x);
  x = pick(x < -104.0f, all(-104.0f), x);
  const Floats magic = all(12582912.0f);
  Floats n = (x * 1.44269504088896341f + magic) - magic;
  Floats r = x - n * 0.693359375f - n * -2.12194440e-4f;
  Floats p = all(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  Ints whole = __builtin_convertvector(pick(n == n, n, all(0.0f)), Ints);
  Ints half = whole >> 1, rest = whole - half;
  return p * (Floats)((half + 127) << 23) * (Floats)((rest + 127) << 23);
}

static inline Floats logistic(Floats x) { return 1.0f / (1.0f + exponential(-x)); }

// tanh as a quotient of polynomials (Eigen's of 2024, by rminimax, which XLA uses, too). It is 1 where the quotient exceeds 1, and
// from where tanh rounds to 1: the derivative 1 - t * t of what is saturated is 0, however many children add theirs.
static inline Floats tangent(Floats x) {
  Floats z = x * x;
  Floats p = all(1.394553628e-8f);
  p = p * z + 2.102733560e-5f;
  p = p * z + 3.520756727e-3f;
  p = p * z + 1.340216100e-1f;
  Floats q = all(8.015776984e-7f);
  q = q * z + 3.326951409e-4f;
  q = q * z + 2.597254514e-2f;
  q = q * z + 4.673548340e-1f;
  q = q * z + 1.0f;
  Floats t = (x * z * p + x) / q;
  Ints saturated = (absolute(x) > 9.0109f) | (absolute(t) > 1.0f);
  return pick(saturated, (Floats)((bits(x) & INT32_MIN) | bits(all(1.0f))), t);
}

template <float (*F)(float)>
static inline Floats each(Floats x) {
  for (int i = 0; i < LANES; i++) x[i] = F(x[i]);
  return x;
}
