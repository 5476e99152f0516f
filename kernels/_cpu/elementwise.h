// Elementwise equations: one function for each, looped over the rows of a tile. Integers and booleans are 32 bits wide.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>

#include "vectors.h"

// One operand: `at` is its first element, `stride` the distance of rows. With `step` 0 a row has one element, for all of its elements.
struct Operand {
  const float* at;
  int64_t stride;
  int step;
};

// Numbers of the operations: their places in the table.
enum Code {
#define OPERATION(name, ...) name,
#include "operations.def"
#undef OPERATION
  CODES
};

// How many operands each has.
constexpr int OPERANDS[] = {
#define OPERATION(name, operands, ...) operands,
#include "operations.def"
#undef OPERATION
};

typedef uint32_t Words __attribute__((vector_size(LANES * 4)));

static inline Floats truth(Ints x) { return (Floats)(x & 1); }
static float root(float x) { return __builtin_sqrtf(x); }
static float erf1(float x) { return std::erf(x); }
static float log1(float x) { return std::log(x); }
static float log1p1(float x) { return std::log1p(x); }
static float expm11(float x) { return std::expm1(x); }
static float exp21(float x) { return std::exp2(x); }
static float sin1(float x) { return std::sin(x); }
static float cos1(float x) { return std::cos(x); }
static float floor1(float x) { return std::floor(x); }
static float ceil1(float x) { return std::ceil(x); }

static inline Floats power(Floats x, int32_t n) {
  Floats out = all(1.0f), square = x;
  for (uint32_t left = n < 0 ? -(uint32_t)n : n; left; left >>= 1, square = square * square)
    if (left & 1) out = out * square;
  return n < 0 ? 1.0f / out : out;
}

static inline Floats powers(Floats x, Floats y) {
  for (int i = 0; i < LANES; i++) x[i] = std::pow(x[i], y[i]);
  return x;
}

static inline Floats signs(Floats x) { return pick(x > 0.0f, all(1.0f), pick(x < 0.0f, all(-1.0f), x)); }

static inline Ints to_ints(Floats x) {  // as XLA: towards zero, saturated, 0 for what is not a number
  Ints out;
  for (int i = 0; i < LANES; i++)
    out[i] = x[i] != x[i] ? 0 : x[i] >= 2147483648.0f ? INT32_MAX : x[i] <= -2147483648.0f ? INT32_MIN : (int32_t)x[i];
  return out;
}

// A number below the smallest normal one is 0, as it is for XLA.
static inline Floats flushed(Floats x) {
  Ints i = bits(x);
  return (Floats)(i & (((i & 0x7f800000) != 0) | INT32_MIN));
}

template <int C>
static inline Floats apply(Floats a, Floats b, Floats c, int32_t n) {
  Ints i = bits(a), j = bits(b);
  Words u = (Words)a, v = (Words)b;
#define OPERATION(name, operands, types, value) \
  if constexpr (C == name) return value;
#include "operations.def"
#undef OPERATION
}

// The first n < LANES floats at p.
static inline Floats some(const float* p, int64_t n) {
  Floats x{};
  memcpy(&x, p, n * sizeof(float));
  return x;
}

template <int C, int N>  // N operands are read
static void loop(int64_t rows, int64_t n, float* to, int64_t stride, const Operand* x, int32_t imm) {
  const Operand &a = x[0], &b = x[N > 1 ? 1 : 0], &c = x[N > 2 ? 2 : 0];
  for (int64_t r = 0; r < rows; r++) {
    float* out = to + r * stride;
    const float *pa = a.at + r * a.stride, *pb = b.at + r * b.stride, *pc = c.at + r * c.stride;
    Floats va = all(0), vb = va, vc = va;
    if (!a.step) va = (Floats)(*(const int32_t*)pa - Ints{});
    if (N > 1 && !b.step) vb = (Floats)(*(const int32_t*)pb - Ints{});
    if (N > 2 && !c.step) vc = (Floats)(*(const int32_t*)pc - Ints{});
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) {
      if (a.step) va = load(pa + i);
      if (N > 1 && b.step) vb = load(pb + i);
      if (N > 2 && c.step) vc = load(pc + i);
      store(out + i, apply<C>(va, vb, vc, imm));
    }
    if (i < n) {
      if (a.step) va = some(pa + i, n - i);
      if (N > 1 && b.step) vb = some(pb + i, n - i);
      if (N > 2 && c.step) vc = some(pc + i, n - i);
      Floats y = apply<C>(va, vb, vc, imm);
      memcpy(out + i, &y, (n - i) * sizeof(float));
    }
  }
}

typedef void Loop(int64_t, int64_t, float*, int64_t, const Operand*, int32_t);

template <int... C>
static Loop* loop_at(int code, std::integer_sequence<int, C...>) {
  static constexpr Loop* loops[] = {loop<C, OPERANDS[C]>...};
  return loops[code];
}

// Computes `code` for `rows` rows of `n` elements.
static void elementwise(int code, int64_t rows, int64_t n, float* to, int64_t stride, Operand* x, int count, int32_t imm) {
  bool together = stride == n;  // the rows follow each other everywhere: one long row
  for (int i = 0; i < count; i++) together = together && (x[i].step ? x[i].stride == n : x[i].stride == 0);
  if (together) n *= rows, rows = 1;
  loop_at(code, std::make_integer_sequence<int, CODES>())(rows, n, to, stride, x, imm);
}
