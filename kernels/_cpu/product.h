// Products of rows with a weight that stays in the cache. The weight is packed once a call into panels of PANEL columns; rows are
// read where they are, also if they are gathered from anywhere.
#pragma once
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#include "vectors.h"

constexpr int PANEL = 2 * LANES;
constexpr int TALL = LANES == 16 ? 12 : LANES == 8 ? 6 : 8;  // rows of the largest block of sums that fits the registers

struct Weight {
  int64_t k, n;
  std::unique_ptr<float[]> own;
  const float* panels;
  int64_t count() const { return (n + PANEL - 1) / PANEL; }
};

// Packs panel `p` of a matrix (k, n), or of the transpose of (n, k).
static void pack_panel(const float* w, bool turned, int64_t k, int64_t n, int64_t p, float* to) {
  int64_t first = p * PANEL, width = n - first < PANEL ? n - first : PANEL;
  if (!turned) {
    for (int64_t i = 0; i < k; i++, to += PANEL) {
      memcpy(to, w + i * n + first, width * sizeof(float));
      if (width < PANEL) memset(to + width, 0, (PANEL - width) * sizeof(float));
    }
    return;
  }
  for (int64_t i = 0; i < k; i += LANES) {
    int64_t end = i + LANES < k ? i + LANES : k;
    if (end - i == LANES && width == PANEL) {
      for (int64_t half = 0; half < PANEL; half += LANES) {
        Floats x[LANES];
        for (int64_t j = 0; j < LANES; j++) x[j] = load(w + (first + half + j) * k + i);
        transpose(x);
        for (int64_t l = 0; l < LANES; l++) store(to + (i + l) * PANEL + half, x[l]);
      }
      continue;
    }
    for (int64_t j = 0; j < PANEL; j++) {
      const float* from = w + (first + j) * k;
      for (int64_t l = i; l < end; l++) to[l * PANEL + j] = j < width ? from[l] : 0.0f;
    }
  }
}

// What a block of a product reads and writes; `bias` may be null, else it has a row for each row of the block.
struct Block {
  const float* const* rows;
  float* const* outs;
  const float* const* bias;
};

template <int R, int P>  // R rows, P panels
static void multiply(const Block& block, const float* panel, int64_t k, int64_t first, int64_t n) {
  Floats sums[R][2 * P];
  const float* row[R];
  for (int r = 0; r < R; r++) {
    row[r] = block.rows[r];
    for (int p = 0; p < 2 * P; p++) sums[r][p] = all(0);
  }
  const float* w[P];
  for (int p = 0; p < P; p++) w[p] = panel + p * PANEL * k;
  for (int64_t i = 0; i < k; i++) {
    Floats b[2 * P];
    for (int p = 0; p < P; p++) b[2 * p] = load(w[p] + i * PANEL), b[2 * p + 1] = load(w[p] + i * PANEL + LANES);
    for (int r = 0; r < R; r++) {
      Floats a = all(row[r][i]);
      for (int p = 0; p < 2 * P; p++) sums[r][p] += a * b[p];
    }
  }
  for (int r = 0; r < R; r++) {
    float* out = block.outs[r] + first;
    const float* bias = block.bias ? block.bias[r] + first : nullptr;
    for (int p = 0; p < 2 * P; p++) {
      int64_t left = n - first - p * LANES;
      if (left >= LANES) {
        store(out + p * LANES, bias ? sums[r][p] + load(bias + p * LANES) : sums[r][p]);
      } else {
        for (int64_t l = 0; l < left; l++) out[p * LANES + l] = sums[r][p][l] + (bias ? bias[p * LANES + l] : 0.0f);
      }
    }
  }
}

template <int R>
static void panels(const Block& block, const Weight& w, int64_t from, int64_t to) {
  constexpr int P = R <= 2 ? 4 : R <= 4 && LANES == 16 ? 2 : 1;
  int64_t p = from;
  for (; p + P <= to; p += P) multiply<R, P>(block, w.panels + p * PANEL * w.k, w.k, p * PANEL, w.n);
  for (; p < to; p++) multiply<R, 1>(block, w.panels + p * PANEL * w.k, w.k, p * PANEL, w.n);
}

template <int R>
static void some_rows(int64_t rows, const Block& block, const Weight& w, int64_t from, int64_t to) {
  if constexpr (R > 1) {
    if (rows < R) return some_rows<R - 1>(rows, block, w, from, to);
  }
  panels<R>(block, w, from, to);
}

// Computes the columns of panels `from` to `to` for all rows. Panels are few at a time, so that they stay in the cache while the
// rows pass.
static void product(int64_t rows, const Block& whole, const Weight& w, int64_t from, int64_t to) {
  for (int64_t p = from; p < to;) {
    int64_t end = rows > TALL ? p + 1 : to;
    for (int64_t r = 0; r < rows;) {
      int64_t left = rows - r, take = left >= TALL ? TALL : left;
      if (left > TALL && left < 2 * TALL) take = (left + 1) / 2;
      Block block{whole.rows + r, whole.outs + r, whole.bias ? whole.bias + r : nullptr};
      some_rows<TALL>(take, block, w, p, end);
      r += take;
    }
    p = end;
  }
}
