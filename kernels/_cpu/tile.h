// Runs the program of a kind for a tile: some rows of a level that follow each other, with their edges.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "elementwise.h"
#include "shared.h"

class Run1 {
 public:
  Run1(const Shared& shared, const Tile& tile, Scratch& scratch) : s_(shared), k_(*shared.kind), tile_(tile), m_(scratch) {
    whole_[ROW] = {tile.begin, tile.end};
    whole_[EDGE] = {first_edge(tile.begin), first_edge(tile.end - 1) + edges_of(tile.end - 1)};
    by_edge_ = whole_[EDGE].end - whole_[EDGE].begin;
  }

  void run() {
    lay_out();
    for (const Segment& segment : k_.segments) {
      for (int64_t r = segment.ops.empty() ? tile_.end : tile_.begin; r < tile_.end; r += chunk_) {
        int64_t end = std::min(r + chunk_, tile_.end);
        now_[ROW] = {r, end};
        now_[EDGE] = {first_edge(r), first_edge(end - 1) + edges_of(end - 1)};
        for (const Op& op : segment.ops) step(op);
      }
      now_[ROW] = whole_[ROW], now_[EDGE] = whole_[EDGE];
      for (const Op& op : segment.products) multiply_rows(op);
    }
  }

  // The elements that `Tile::later` needs.
  int64_t later_floats() const { return (tile_.end - tile_.begin) * k_.scattered[ROW] + by_edge_ * k_.scattered[EDGE]; }

  // Adds part `p` of `parts` of the columns of what a scatter wrote to `Tile::later`.
  void add_later(const Op& op, int64_t p, int64_t parts) const {
    int64_t blocks = (op.n + LANES - 1) / LANES;
    int64_t first = blocks * p / parts * LANES, end = std::min(blocks * (p + 1) / parts * LANES, op.n);
    const float* from = later_of(op) + first;
    for (int64_t i = whole_[op.domain].begin; i < whole_[op.domain].end && first < end; i++, from += op.n)
      if (int64_t row = child(op.child, i)) combine(ADD, end - first, s_.tensors[op.tensor].data + row * op.n + first, from);
  }

 private:
  int32_t header(Header h) const { return s_.program->header[h]; }

  int64_t first_edge(int64_t row) const {
    if (k_.leaf()) return 0;
    if (header(ARITY)) return row * header(ARITY);
    return s_.schedule[header(FIRST_EDGE) + k_.first_row + row];
  }

  int64_t edges_of(int64_t row) const {
    if (k_.leaf()) return 0;
    if (header(ARITY)) return header(ARITY);
    return s_.schedule[header(NUM_CHILDREN) + k_.first_row + row];
  }

  // The row of states of an edge's child; 0, a row of zeros, if there is none.
  int64_t child_of(int64_t edge) const {
    if (edge < 0 || edge >= k_.edges) return *s_.lost = true, 0;
    int64_t at = s_.schedule[header(EDGE_CHILD) + k_.first_edge + edge];
    if (at < 0 || at >= header(STATE_ROWS)) return *s_.lost = true, 0;
    return at;
  }

  int64_t child_of(int64_t row, int number) const { return number < edges_of(row) ? child_of(first_edge(row) + number) : 0; }

  int64_t child(int number, int64_t i) const { return number < 0 ? child_of(i) : child_of(i, number); }

  // Lays out the slots of the arena, for the whole tile or for one chunk of it.
  void lay_out() {
    int64_t rows = tile_.end - tile_.begin, by_row = 0, by_edge = 0;
    for (const Slot& slot : k_.slots)
      if (slot.chunk) by_row += slot.by_row, by_edge += slot.by_edge;
    int64_t floats = by_row + (by_edge_ * by_edge + rows - 1) / rows;
    chunk_ = std::clamp<int64_t>(CHUNK / std::max<int64_t>(floats, 1), 1, rows);
    int64_t most = 0;
    for (int64_t r = tile_.begin; r < tile_.end; r += chunk_) {
      int64_t last = std::min(r + chunk_, tile_.end) - 1;
      most = std::max(most, first_edge(last) + edges_of(last) - first_edge(r));
    }
    m_.offsets.resize(k_.slots.size());
    int64_t at = 0;
    for (size_t i = 0; i < k_.slots.size(); i++) {
      const Slot& slot = k_.slots[i];
      m_.offsets[i] = at;
      at += std::max(slot.by_row * (slot.chunk ? chunk_ : rows), slot.by_edge * (slot.chunk ? most : by_edge_));
      at = (at + 15) / 16 * 16;
    }
    if ((int64_t)m_.arena.size() < at + 16) m_.arena.resize(at + 16);
    arena_ = m_.arena.data() + (16 - ((uintptr_t)m_.arena.data() / 4) % 16) % 16;
  }

  // Where the value of row (or edge) i lies.
  float* at(Ref ref, int64_t i) const {
    const Base& b = k_.bases[ref.base];
    switch (b.place) {
      case ARENA:
        return arena_ + m_.offsets[b.slot] + (i - (b.chunk ? now_ : whole_)[b.domain].begin) * b.n + ref.offset;
      case ROWS:
        return s_.tensors[b.tensor].data + (i + shift(b)) * b.n + ref.offset;
      case STATIC:
        return s_.tensors[b.tensor].data + ref.offset;
      case LITERAL:
        break;
    }
    return (float*)&b.tensor;
  }

  int64_t shift(const Base& b) const {
    switch (b.shift) {
      case STATE: return tile_.state;
      case PADDED: return k_.slack[b.domain];
      case NONE: break;
    }
    return 0;
  }

  int64_t stride(Ref ref) const {
    const Base& b = k_.bases[ref.base];
    return b.place == STATIC || b.place == LITERAL ? 0 : b.n;
  }

  void step(const Op& op) {
    Span span = now_[op.domain];
    int64_t rows = span.end - span.begin;
    if (rows <= 0) return;
    switch (op.opcode) {
      case ELEMENTWISE: {
        Operand x[3];
        for (size_t i = 0; i < op.from.size(); i++) x[i] = {at(op.from[i], span.begin), stride(op.from[i]), op.steps[i]};
        elementwise(op.code, rows, op.n, at(op.to, span.begin), stride(op.to), x, (int)op.from.size(), op.imm);
        break;
      }
      case GATHER: {
        float* to = at(op.to, span.begin);
        for (int64_t i = span.begin; i < span.end; i++, to += stride(op.to))
          memcpy(to, s_.tensors[op.tensor].data + child(op.child, i) * op.n, op.n * sizeof(float));
        break;
      }
      case MOVE: move(op, span); break;
      case REDUCE: reduce(op, span); break;
      case DOT: dot(op, span); break;
      case SPREAD: spread(op, span); break;
      case CHILDREN: children(op, span); break;
      case SCATTER: scatter(op, span); break;
      case PRODUCT: break;
    }
  }

  void move(const Op& op, Span span) {
    for (const Run& run : op.runs) {
      float* to = at(op.to, span.begin) + run.to;
      const float* from = at(run.from, span.begin);
      for (int64_t i = span.begin; i < span.end; i++, to += stride(op.to), from += stride(run.from)) {
        if (run.step == 1) memcpy(to, from, run.count * sizeof(float));
        else for (int64_t j = 0; j < run.count; j++) memcpy(to + j, from + j * run.step, sizeof(float));
      }
    }
  }

  void reduce(const Op& op, Span span) {
    int64_t outer = op.sizes[0], reduced = op.sizes[1], inner = op.sizes[2];
    for (int64_t i = span.begin; i < span.end; i++) {
      float* to = at(op.to, i);
      const float* from = at(op.from[0], i);
      for (int64_t o = 0; o < outer; o++, from += reduced * inner, to += inner) {
        if (inner == 1) {
          *to = op.code == ADD ? sum(from, reduced) : folded(op.code, from, reduced);
          continue;
        }
        memcpy(to, from, inner * sizeof(float));
        for (int64_t j = 1; j < reduced; j++) combine(op.code, inner, to, from + j * inner);
      }
    }
  }

  static float sum(const float* from, int64_t n) {
    Floats sum = all(0);
    int64_t j = 0;
    for (; j + LANES <= n; j += LANES) sum += load(from + j);
    float total = 0;
    for (int l = 0; l < LANES; l++) total += sum[l];
    for (; j < n; j++) total += from[j];
    return total;
  }

  // Combines n numbers: blocks with each other, then halves of one block.
  static float folded(int code, const float* from, int64_t n) {
    float block[64];
    int64_t left = n < 64 ? n : 64;
    memcpy(block, from, left * sizeof(float));
    for (int64_t j = left; j < n; j += left) combine(code, n - j < left ? n - j : left, block, from + j);
    for (int64_t half; left > 1; left = half) {
      half = (left + 1) / 2;
      combine(code, left - half, block, block + half);
    }
    return block[0];
  }

  static void combine(int code, int64_t n, float* to, const float* with) {
    Operand x[2] = {{to, n, 1}, {with, n, 1}};
    elementwise(code, 1, n, to, n, x, 2, 0);
  }

  // For each row out[b, m, n] = sum over k of x[b, m, k] y[b, n, k], with any strides.
  void dot(const Op& op, Span span) {
    const int64_t* z = op.sizes.data();
    for (int64_t i = span.begin; i < span.end; i++) {
      float* to = at(op.to, i);
      const float *x = at(op.from[0], i), *y = at(op.from[1], i);
      for (int64_t b = 0; b < z[0]; b++)
        for (int64_t m = 0; m < z[1]; m++)
          for (int64_t n = 0; n < z[2]; n++) {
            const float *p = x + b * z[4] + m * z[5], *q = y + b * z[7] + n * z[8];
            *to++ = sum_of_products(p, z[6], q, z[9], z[3]);
          }
    }
  }

  static float sum_of_products(const float* p, int64_t sp, const float* q, int64_t sq, int64_t n) {
    float total = 0;
    int64_t k = 0;
    if (sp == 1 && sq == 1) {
      Floats sum = all(0);
      for (; k + LANES <= n; k += LANES) sum += load(p + k) * load(q + k);
      for (int l = 0; l < LANES; l++) total += sum[l];
    }
    for (; k < n; k++) total += p[k * sp] * q[k * sq];
    return total;
  }

  void spread(const Op& op, Span span) {
    for (int64_t i = span.begin; i < span.end; i++) {
      const float* from = at(op.from[0], i);
      int64_t first = first_edge(i), count = edges_of(i);
      float* to = at(op.to, first);
      for (int64_t e = 0; e < count; e++, to += stride(op.to)) memcpy(to, from, op.n * sizeof(float));
    }
  }

  void children(const Op& op, Span span) {
    for (int64_t i = span.begin; i < span.end; i++) {
      int64_t first = first_edge(i), count = edges_of(i), next = stride(op.from[0]);
      float* to = at(op.to, i);
      const float* from = at(op.from[0], first);
      if (!count) memset(to, 0, op.n * sizeof(float));
      else memcpy(to, from, op.n * sizeof(float));
      for (int64_t e = 1; e < count; e++) combine(op.code, op.n, to, from + e * next);
    }
  }

  float* later_of(const Op& op) const {
    return tile_.later + (tile_.end - tile_.begin) * op.before[ROW] + by_edge_ * op.before[EDGE];
  }

  void scatter(const Op& op, Span span) {
    int64_t next = stride(op.from[0]);
    const float* from = at(op.from[0], span.begin);
    if (tile_.later) {
      Operand x[1] = {{from, next, op.steps[0]}};
      float* to = later_of(op) + (span.begin - whole_[op.domain].begin) * op.n;
      return elementwise(COPY, span.end - span.begin, op.n, to, op.n, x, 1, 0);
    }
    for (int64_t i = span.begin; i < span.end; i++, from += next) {
      int64_t row = child(op.child, i);
      if (!row) continue;
      float* to = s_.tensors[op.tensor].data + row * op.n;
      Operand x[2] = {{op.code == ADD ? to : from, op.n, op.code == ADD ? 1 : op.steps[0]}, {from, op.n, op.steps[0]}};
      elementwise(op.code, 1, op.n, to, op.n, x, op.code == ADD ? 2 : 1, 0);
    }
  }

  void multiply_rows(const Op& op) {
    Span span = now_[op.domain];
    int64_t rows = span.end - span.begin, m = op.gathered.size(), count = rows * m;
    if (count <= 0) return;
    const Weight& w = s_.weights[op.weight];
    m_.rows.resize(count), m_.outs.resize(count), m_.bias.resize(count);
    for (int64_t j = 0; j < m; j++) {
      Ref from = op.from[j];
      for (int64_t i = 0; i < rows; i++) {
        int64_t r = i * m + j;
        m_.outs[r] = at(op.to, span.begin + i) + j * w.n;
        if (op.gathered[j] == NOT_GATHERED) m_.rows[r] = at(from, span.begin + i);
        else m_.rows[r] = s_.tensors[from.base].data + child(op.gathered[j], span.begin + i) * w.k + from.offset;
        if (op.biased) m_.bias[r] = at(op.from[m], span.begin + i) + j * op.imm;
      }
    }
    product(count, {m_.rows.data(), m_.outs.data(), op.biased ? m_.bias.data() : nullptr}, w, 0, w.count());
  }

  static constexpr int64_t CHUNK = 6144;  // floats of a chunk: they stay in the L1 cache
  const Shared& s_;
  const Kind& k_;
  const Tile& tile_;
  Scratch& m_;
  Span whole_[2], now_[2];
  int64_t by_edge_, chunk_ = 1;
  float* arena_ = nullptr;
};
