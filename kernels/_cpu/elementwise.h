// Elementwise equations: one function for each, looped over the rows of a tile. Integers and booleans are 32 bits wide.
#pragma once
#include <utility>

#include "vectors.h"

// One operand: `at` is its first element, `stride` the distance of rows. With `step` 0 a row has one element, for all of its elements.
struct Operand {
  const float* at;
  int64_t stride;
  int step;
};

// The operations, in the order of OPERATIONS in cavs/_engines/native_operations.py.
enum Code {
  ADD, SUB, MUL, DIV, MAX, MIN, NEG, ABS, SIGN, SQRT, RSQRT, SQUARE, EXP, EXP2, LOG, LOG1P, EXPM1, TANH, LOGISTIC, ERF, SIN, COS,
  POW, INTEGER_POW, FLOOR, CEIL, ONE_MINUS_SQUARE, COPY, EQ, NE, LT, LE, GT, GE, SELECT, CLAMP,
  ADD_I, SUB_I, MUL_I, MAX_I, MIN_I, NEG_I, ABS_I, SIGN_I, EQ_I, NE_I, LT_I, LE_I, GT_I, GE_I, AND, OR, NOT, XOR, TO_FLOAT, TO_INT,
  TO_BOOL, TO_BOOL_I, FINITE, CODES
};

static inline Floats as_floats(Ints x) { return (Floats)x; }
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

template <int C>
static inline Floats apply(Floats a, Floats b, Floats c, int32_t imm) {
  Ints i = bits(a), j = bits(b);
  if constexpr (C == ADD) return a + b;
  if constexpr (C == SUB) return a - b;
  if constexpr (C == MUL) return a * b;
  if constexpr (C == DIV) return a / b;
  if constexpr (C == MAX) return largest(a, b);
  if constexpr (C == MIN) return least(a, b);
  if constexpr (C == NEG) return as_floats(i ^ (int32_t)0x80000000);
  if constexpr (C == ABS) return as_floats(i & 0x7fffffff);
  if constexpr (C == SIGN) return signs(a);
  if constexpr (C == SQRT) return each<root>(a);
  if constexpr (C == RSQRT) return 1.0f / each<root>(a);
  if constexpr (C == SQUARE) return a * a;
  if constexpr (C == EXP) return exponential(a);
  if constexpr (C == EXP2) return each<exp21>(a);
  if constexpr (C == LOG) return each<log1>(a);
  if constexpr (C == LOG1P) return each<log1p1>(a);
  if constexpr (C == EXPM1) return each<expm11>(a);
  if constexpr (C == TANH) return tangent(a);
  if constexpr (C == LOGISTIC) return logistic(a);
  if constexpr (C == ERF) return each<erf1>(a);
  if constexpr (C == SIN) return each<sin1>(a);
  if constexpr (C == COS) return each<cos1>(a);
  if constexpr (C == POW) return powers(a, b);
  if constexpr (C == INTEGER_POW) return power(a, imm);
  if constexpr (C == FLOOR) return each<floor1>(a);
  if constexpr (C == CEIL) return each<ceil1>(a);
  if constexpr (C == ONE_MINUS_SQUARE) return 1.0f - a * a;
  if constexpr (C == COPY) return a;
  if constexpr (C == EQ) return truth(a == b);
  if constexpr (C == NE) return truth(a != b);
  if constexpr (C == LT) return truth(a < b);
  if constexpr (C == LE) return truth(a <= b);
  if constexpr (C == GT) return truth(a > b);
  if constexpr (C == GE) return truth(a >= b);
  if constexpr (C == SELECT) return pick(i != 0, c, b);  // select_n: the second case if true
  if constexpr (C == CLAMP) return pick(b != b, b, least(largest(b, a), c));
  if constexpr (C == ADD_I) return as_floats(i + j);
  if constexpr (C == SUB_I) return as_floats(i - j);
  if constexpr (C == MUL_I) return as_floats(i * j);
  if constexpr (C == MAX_I) return pick(i > j, a, b);
  if constexpr (C == MIN_I) return pick(i < j, a, b);
  if constexpr (C == NEG_I) return as_floats(-i);
  if constexpr (C == ABS_I) return pick(i < 0, as_floats(-i), a);
  if constexpr (C == SIGN_I) return as_floats(((i > 0) & 1) - ((i < 0) & 1));
  if constexpr (C == EQ_I) return truth(i == j);
  if constexpr (C == NE_I) return truth(i != j);
  if constexpr (C == LT_I) return truth(i < j);
  if constexpr (C == LE_I) return truth(i <= j);
  if constexpr (C == GT_I) return truth(i > j);
  if constexpr (C == GE_I) return truth(i >= j);
  if constexpr (C == AND) return as_floats(i & j);
  if constexpr (C == OR) return as_floats(i | j);
  if constexpr (C == XOR) return as_floats(i ^ j);
  if constexpr (C == NOT) return truth(i == 0);  // of booleans
  if constexpr (C == TO_FLOAT) return __builtin_convertvector(i, Floats);
  if constexpr (C == TO_INT) return as_floats(to_ints(a));
  if constexpr (C == TO_BOOL) return truth(a != 0.0f);
  if constexpr (C == TO_BOOL_I) return truth(i != 0);
  if constexpr (C == FINITE) return truth((i & 0x7f800000) != 0x7f800000);
  return a;
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

template <int C>
static constexpr Loop* loop_of() {
  constexpr bool three = C == SELECT || C == CLAMP;
  constexpr bool two = C == ADD || C == SUB || C == MUL || C == DIV || C == MAX || C == MIN || C == POW || (C >= EQ && C <= GE) ||
                       (C >= ADD_I && C <= MIN_I) || (C >= EQ_I && C <= GE_I) || C == AND || C == OR || C == XOR;
  return three ? loop<C, 3> : two ? loop<C, 2> : loop<C, 1>;
}

template <int... C>
static Loop* loop_at(int code, std::integer_sequence<int, C...>) {
  static constexpr Loop* loops[] = {loop_of<C>()...};
  return loops[code];
}

// Computes `code` for `rows` rows of `n` elements.
static void elementwise(int code, int64_t rows, int64_t n, float* to, int64_t stride, Operand* x, int count, int32_t imm) {
  bool together = stride == n;  // the rows follow each other everywhere: one long row
  for (int i = 0; i < count; i++) together = together && (x[i].step ? x[i].stride == n : x[i].stride == 0);
  if (together) n *= rows, rows = 1;
  loop_at(code, std::make_integer_sequence<int, CODES>())(rows, n, to, stride, x, imm);
}
