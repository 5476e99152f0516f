// L^T R, summed over the rows of two matrices: the gradients of weights, for all vertices at once (lazy batching, Cavs 3.5). Rows
// may be gathered: they are read once where they are, and packed for the cache.
#pragma once
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#include "product.h"
#include "threads.h"

constexpr int64_t DEEP = 192;  // rows that are summed in registers: PANEL columns of R for them stay in the L1 cache
constexpr int64_t LEFT = 804 / TALL, RIGHT = 320 / PANEL;  // the most packed blocks of L, and panels of R: for the L2 cache
constexpr int64_t PARTS = 4;  // of the rows of a gradient, if there are many
constexpr int64_t AHEAD = 4;  // rows that are fetched before they are packed

// The elements of a packed block of `width` columns. Blocks do not begin in the same set of the cache.
constexpr int64_t block_floats(int64_t width) { return DEEP * width + 16; }

// Rows of a matrix. With an index, row i is the rows of `of[0]` that row start + i of it names, one after another. Without one,
// the rows are those of all of `of` side by side, each cut into `fold` rows, and row i is number start + i of these.
struct Matrix {
  std::vector<const float*> of;
  int64_t width, rows;   // of each of `of`
  const int32_t* index;  // null: rows are not gathered
  int64_t parts, start, fold;
  // Where a part of row i lies; null if it is out of range.
  const float* at(int64_t i, int64_t part) const {
    int64_t n = start + i, row = index ? index[n * parts + part] : fold == 1 ? n : n / fold;
    if (row < 0 || row >= rows) return nullptr;
    return of[index ? 0 : fold == 1 ? part : n % fold * parts + part] + row * width;
  }
};

struct Term {
  Matrix left, right;  // without parts, `left` is a column of ones
  int64_t rows;
};

// The sum of some products.
struct Gradient {
  std::vector<Term> terms;
  float* out;
  int64_t height, width;
};

// A block of L^T R.
struct Sum {
  const float *left, *right;
  int64_t rows;
  float* out;
  int64_t stride, columns;  // of `out`: elements between its rows, and columns that it has from here
  bool first;               // whether `out` is written for the first time
};

template <int R>
static void add_block(const Sum& s) {
  Floats sums[R][2];
  const float *x = s.left, *y = s.right;
  for (int r = 0; r < R; r++) {
    sums[r][0] = sums[r][1] = all(0);
    __builtin_prefetch(s.out + r * s.stride, 1), __builtin_prefetch(s.out + r * s.stride + LANES, 1);
  }
  for (int64_t i = 0; i < s.rows; i++, x += TALL, y += PANEL) {
    Floats a = load(y), b = load(y + LANES);
    for (int r = 0; r < R; r++) {
      Floats w = all(x[r]);
      sums[r][0] += w * a, sums[r][1] += w * b;
    }
  }
  for (int r = 0; r < R; r++)
    for (int p = 0; p < 2; p++) {
      int64_t count = std::clamp<int64_t>(s.columns - p * LANES, 0, LANES);
      float* to = s.out + r * s.stride + p * LANES;
      if (count == LANES) store(to, s.first ? sums[r][p] : load(to) + sums[r][p]);
      else for (int64_t l = 0; l < count; l++) to[l] = s.first ? sums[r][p][l] : to[l] + sums[r][p][l];
    }
}

template <int R>
static void some_columns(int64_t columns, const Sum& s) {
  if constexpr (R > 1) {
    if (columns < R) return some_columns<R - 1>(columns, s);
  }
  add_block<R>(s);
}

// Copies columns [from, to) of a row into blocks of W columns. False if the row is out of range.
template <int W>
static bool pack_row(const Matrix& m, int64_t row, int64_t from, int64_t to, float* packed) {
  constexpr int64_t NEXT = block_floats(W);
  int64_t room = W;  // of the present block
  for (int64_t part = from / m.width; part * m.width < to; part++) {
    int64_t c = std::max(from - part * m.width, (int64_t)0), end = std::min(to - part * m.width, m.width);
    const float* x = m.at(row, part);
    if (!x) return false;
    if (room < W) {
      int64_t count = std::min(room, end - c);
      memcpy(packed + W - room, x + c, count * sizeof(float));
      c += count, room -= count;
      if (room) continue;
      packed += NEXT, room = W;
    }
    for (; c + W <= end; c += W, packed += NEXT) memcpy(packed, x + c, W * sizeof(float));
    if (c < end) memcpy(packed, x + c, (end - c) * sizeof(float)), room = W - (end - c);
  }
  return true;
}

// Reads columns [from, to) of a row into the cache.
static inline void fetch_row(const Matrix& m, int64_t row, int64_t from, int64_t to) {
  for (int64_t part = from / m.width; part * m.width < to; part++) {
    int64_t c = std::max(from - part * m.width, (int64_t)0), end = std::min(to - part * m.width, m.width);
    const float* x = m.at(row, part);
    if (!x) return;
    for (; c < end; c += 16) __builtin_prefetch(x + c);
  }
}

template <int W>
static bool pack(const Matrix& m, int64_t first, int64_t rows, int64_t from, int64_t to, float* packed) {
  for (int64_t i = 0; i < rows; i++) {
    if (i + AHEAD < rows) fetch_row(m, first + i + AHEAD, from, to);
    if (!pack_row<W>(m, first + i, from, to, packed + i * W)) return false;
  }
  return true;
}

// Adds columns [from, to) of a matrix's first `rows` rows to `out`, in order. False if a row is out of range.
static bool add_rows(const Matrix& m, int64_t rows, int64_t from, int64_t to, float* out) {
  for (int64_t i = 0; i < rows; i++)
    for (int64_t part = from / m.width; part * m.width < to; part++) {
      int64_t c = std::max(from, part * m.width), end = std::min(to, (part + 1) * m.width);
      const float* x = m.at(i, part);
      if (!x) return false;
      x -= part * m.width;
      for (; c + LANES <= end; c += LANES) store(out + c, load(out + c) + load(x + c));
      for (; c < end; c++) out[c] += x[c];
    }
  return true;
}

// Memory that grows, without the values that it had.
class Memory {
 public:
  float* at_least(int64_t count) {
    if (count > count_) of_.reset(new float[count + 16]), count_ = count;
    return of_.get() + (16 - ((uintptr_t)of_.get() / 4) % 16) % 16;
  }

 private:
  std::unique_ptr<float[]> of_;
  int64_t count_ = 0;
};

// A part of a gradient: some columns of L, some panels of R, and some rows of the terms.
struct Part {
  const Gradient* gradient;
  int64_t first_block, last_block, first_panel, last_panel, first_row, last_row;
  float* out;

  // False if a row is out of range.
  bool run(Memory& memory) const {
    const Gradient& g = *gradient;
    int64_t from = first_block * TALL, to = std::min(last_block * TALL, g.height);
    int64_t wide = std::min(RIGHT, last_panel - first_panel) * block_floats(PANEL);
    float* right = memory.at_least(wide + (last_block - first_block) * block_floats(TALL));
    float* left = right + wide;
    bool first = true;
    int64_t before = 0;  // rows of the terms before
    for (const Term& t : g.terms) {
      int64_t last = std::min(last_row - before, t.rows);
      for (int64_t r = std::max(first_row - before, (int64_t)0); r < last || (first && &t == &g.terms.back()); r += DEEP, first = false) {
        int64_t rows = std::max(std::min(DEEP, last - r), (int64_t)0);
        if (!pack<TALL>(t.left, r, rows, from, to, left)) return false;
        for (int64_t panel = first_panel; panel < last_panel; panel += RIGHT) {
          int64_t end = std::min(panel + RIGHT, last_panel);
          if (!pack<PANEL>(t.right, r, rows, panel * PANEL, std::min(end * PANEL, g.width), right)) return false;
          for (int64_t p = panel; p < end; p++)
            for (int64_t b = first_block; b < last_block; b++) {
              float* to = out + b * TALL * g.width + p * PANEL;
              const float *x = left + (b - first_block) * block_floats(TALL), *y = right + (p - panel) * block_floats(PANEL);
              Sum sum{x, y, rows, to, g.width, g.width - p * PANEL, first};
              some_columns<TALL>(std::min<int64_t>(TALL, g.height - b * TALL), sum);
            }
        }
      }
      before += t.rows;
    }
    return true;
  }
};

// Computes gradients. One thread sums some of the rows, and then these sums are added: the order depends on sizes only, not on the
// number of threads.
class Gradients {
 public:
  explicit Gradients(Team& team, bool alone) : team_(team), alone_(alone), memory_(team.count()) {}

  // False if a row is out of range.
  bool run(const Gradient& g) {
    for (const Term& t : g.terms) rows_ += t.rows;
    if (g.height) products(g);
    else sums(g);
    rows_ = 0;
    return !lost_;
  }

 private:
  void products(const Gradient& g) {
    int64_t blocks = (g.height + TALL - 1) / TALL, panels = (g.width + PANEL - 1) / PANEL, size = g.height * g.width;
    // Parts of other rows have sums of their own; parts of other columns of R pack L again. What costs less?
    int64_t down = (blocks + LEFT - 1) / LEFT, deep = rows_ > 2 * g.width ? PARTS : rows_ > g.width ? PARTS / 2 : 1;
    deep = std::clamp<int64_t>(rows_ / (2 * DEEP), 1, deep);
    int64_t across = std::clamp<int64_t>(2 * team_.count() / (deep * down), 1, panels);
    float* partial = partial_.at_least((deep - 1) * size);
    team_.run(deep * down * across, alone_, [&](int thread, int64_t i) {
      int64_t r = i % deep, d = i / deep % down, a = i / deep / down;
      Part part{&g, blocks * d / down, blocks * (d + 1) / down, panels * a / across, panels * (a + 1) / across};
      part.first_row = rows_ * r / deep, part.last_row = rows_ * (r + 1) / deep;
      part.out = r ? partial + (r - 1) * size : g.out;
      if (!part.run(memory_[thread])) lost_ = true;
    });
    if (deep == 1) return;
    constexpr int64_t SOME = 1 << 14;
    team_.run((size + SOME - 1) / SOME, alone_, [&](int, int64_t i) {
      for (int64_t k = i * SOME; k < std::min((i + 1) * SOME, size); k++)
        for (int64_t r = 1; r < deep; r++) g.out[k] += partial[(r - 1) * size + k];
    });
  }

  // The sums of the columns of R.
  void sums(const Gradient& g) {
    int64_t lanes = (g.width + LANES - 1) / LANES, parts = std::min<int64_t>(lanes, 2 * team_.count());
    std::vector<float> memory(g.width);
    team_.run(parts, alone_, [&](int, int64_t i) {
      int64_t from = lanes * i / parts * LANES, to = std::min(lanes * (i + 1) / parts * LANES, g.width);
      std::fill(g.out + from, g.out + to, 0.0f);
      for (const Term& t : g.terms)
        for (int64_t r = 0; r < t.rows; r += DEEP) {
          Matrix some = t.right;
          some.start += r;
          std::fill(memory.data() + from, memory.data() + to, 0.0f);
          if (!add_rows(some, std::min(DEEP, t.rows - r), from, to, memory.data())) lost_ = true;
          for (int64_t c = from; c < to; c++) g.out[c] += memory[c];
        }
    });
  }

  Team& team_;
  bool alone_;
  std::vector<Memory> memory_;  // of each thread
  Memory partial_;
  int64_t rows_ = 0;  // of all terms
  std::atomic<bool> lost_{false};
};

// False if a row is out of range.
static bool compute_gradients(Team& team, const std::vector<Gradient>& all) {
  double flops = 0;
  for (const Gradient& g : all)
    for (const Term& t : g.terms) flops += 2.0 * t.rows * std::max<int64_t>(g.height, 1) * g.width;
  Gradients gradients(team, flops < 4e6);  // threads take some 30 microseconds to wake
  for (const Gradient& g : all)
    if (!gradients.run(g)) return false;
  return true;
}
