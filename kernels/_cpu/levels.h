// Runs all levels of one direction. See cavs/_engines/native/engine.py.
#pragma once
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "threads.h"
#include "tile.h"

namespace {

// Vertices of one kind and level that follow each other. `state` is what is added for rows of states.
struct Group {
  int kind;
  int64_t level, begin, end, state, edge, edge_end;
};

struct Call {
  Program program;
  const int32_t* schedule;
  std::vector<Tensor> tensors;
  std::vector<Group> groups;
  std::vector<std::vector<Weight>> weights;
  std::vector<Shared> shared;
  std::vector<float> later;  // of `run_and_add_later`
  std::vector<std::pair<int, Span>> repeated;  // tensors, and their rows of vertices
  std::atomic<bool> lost{false};

  int32_t header(Header h) const { return program.header[h]; }
  int32_t number(Header h, int64_t i = 0) const { return schedule[header(h) + i]; }
};

// Joins the tasks of each level and kind to groups. The leaves of a kind are one group, of a level before all others.
void find_groups(Call& c) {
  int64_t kinds = c.header(KINDS), classes = c.header(CLASSES), arity = c.header(ARITY);
  int64_t rounds = c.number(NUM_ROUNDS);
  require(0 <= rounds && rounds <= c.header(TASKS), "rounds out of range");
  for (int64_t k = 0; k < c.header(LEAF_KINDS); k++) {
    int64_t count = c.number(LEAF_COUNT, k), row = c.header(LEAF_ROW) < 0 ? 0 : c.number(LEAF_ROW, k);
    require(count >= 0 && count <= c.program.kinds[kinds + k].rows, "leaves out of range");
    if (!count) continue;
    require(c.header(LEAF_ROW) < 0 || (row > 0 && row + count <= c.header(STATE_ROWS)), "rows of states out of range");
    c.groups.push_back({(int)(kinds + k), -1, 0, count, row, 0, 0});
  }
  int64_t t = 0;
  for (int64_t r = 0; r < rounds; r++)
    for (int64_t k = 0; k < kinds; k++)
      for (int64_t end = c.number(ROUND_END, (r * kinds + k) * classes + classes - 1); t < end; t++) {
        require(t < c.header(TASKS), "tasks out of range");
        int64_t begin = c.number(TASK_START, t), size = c.number(TASK_SIZE, t), row = c.number(TASK_ROW, t);
        int64_t edge = arity ? begin * arity : c.number(TASK_EDGE, t), edges = arity ? size * arity : c.number(TASK_EDGES, t);
        int64_t level = c.number(TASK_LEVEL, t);
        const Kind& kind = c.program.kinds[k];
        require(begin >= 0 && size >= 0 && begin + size <= kind.rows, "rows out of range");
        require(row > 0 && row + size <= c.header(STATE_ROWS), "rows of states out of range");
        require(edge >= 0 && edges >= 0 && edge + edges <= kind.edges, "edges out of range");
        Group* before = nullptr;
        for (size_t g = c.groups.size(); g-- > 0 && c.groups[g].level == level && !before;)
          if (c.groups[g].kind == k) before = &c.groups[g];
        if (before && before->end == begin && before->state == row - begin) before->end += size, before->edge_end += edges;
        else c.groups.push_back({(int)k, level, begin, begin + size, row - begin, edge, edge + edges});
      }
}

void prepare_kinds(Call& c) {
  for (int64_t k = 0; k < (int64_t)c.program.kinds.size(); k++) {
    const Kind& kind = c.program.kinds[k];
    Span rows{0, 0}, edges{0, 0};
    bool any = false;
    for (const Group& g : c.groups) {
      if (g.kind != k) continue;
      rows = any ? Span{std::min(rows.begin, g.begin), std::max(rows.end, g.end)} : Span{g.begin, g.end};
      edges = any ? Span{std::min(edges.begin, g.edge), std::max(edges.end, g.edge_end)} : Span{g.edge, g.edge_end};
      any = true;
    }
    Shared s{&c.program, &kind, c.tensors.data(), nullptr, c.schedule, &c.lost};
    auto shifted = [&](Domain domain, Shift shift) {
      int64_t by = shift == PADDED ? kind.slack[domain] : 0;
      Span span = domain == EDGE ? edges : rows;
      return Span{span.begin + by, span.end + by};
    };
    for (const Base& b : kind.bases) {
      if (b.place != ROWS || !any) continue;
      const Tensor& t = c.tensors[b.tensor];
      require(t.size == t.rows * b.n, "a tensor of another width");
      Span span = shifted(b.domain, b.shift);
      require(b.shift == STATE ? t.rows == c.header(STATE_ROWS) : span.begin >= 0 && span.end <= t.rows, "a tensor of few rows");
    }
    for (const Written& w : kind.written) {
      const Tensor& t = c.tensors[w.tensor];
      Span span = any ? shifted(w.domain, w.shift) : Span{0, 0};
      memset(t.data, 0, span.begin * t.width * sizeof(float));
      if (w.repeat && span.begin < span.end) c.repeated.push_back({w.tensor, span});
      else memset(t.data + span.end * t.width, 0, (t.rows - span.end) * t.width * sizeof(float));
    }
    c.shared.push_back(s);
  }
}

// Fills what follows the rows of vertices with the first of these, so that other stages compute there what they do for a vertex.
void repeat_rows(Call& c) {
  for (auto [tensor, span] : c.repeated) {
    const Tensor& t = c.tensors[tensor];
    for (int64_t r = span.end; r < t.rows; r++)
      memcpy(t.data + r * t.width, t.data + span.begin * t.width, t.width * sizeof(float));
  }
}

// Fills the rows of states that no vertex has with zeros, in tensors that the call creates.
void clear_states(Call& c, Team& team) {
  constexpr int64_t SOME = 1 << 15;  // elements at a time
  struct Piece { float* at; int64_t count; };
  std::vector<Span> mine;
  for (const Group& g : c.groups) mine.push_back({g.begin + g.state, g.end + g.state});
  std::sort(mine.begin(), mine.end(), [](const Span& a, const Span& b) { return a.begin < b.begin; });
  mine.push_back({c.header(STATE_ROWS), c.header(STATE_ROWS)});
  std::vector<Piece> pieces;
  for (int i : c.program.states) {
    const Tensor& t = c.tensors[i];
    require(t.rows == c.header(STATE_ROWS), "states of another size");
    int64_t end = 0;
    for (const Span& s : mine) {
      for (int64_t at = end * t.width, last = s.begin * t.width; at < last; at += SOME)
        pieces.push_back({t.data + at, std::min(SOME, last - at)});
      end = std::max(end, s.end);
    }
  }
  team.run(pieces.size(), pieces.size() < 8, [&](int, int64_t i) { memset(pieces[i].at, 0, pieces[i].count * sizeof(float)); });
}

void pack_weights(Call& c, Team& team) {
  struct Panel { const PackedWeight* from; Weight* to; int64_t number; };
  std::vector<Panel> panels;
  c.weights.resize(c.program.kinds.size());
  for (size_t k = 0; k < c.program.kinds.size(); k++) {
    const Kind& kind = c.program.kinds[k];
    c.weights[k].resize(kind.weights.size());
    for (size_t i = 0; i < kind.weights.size(); i++) {
      const PackedWeight& from = kind.weights[i];
      Weight& w = c.weights[k][i];
      w.k = from.k, w.n = from.n;
      require(c.tensors[from.tensor].size == w.k * w.n, "a weight of another size");
      w.own = std::unique_ptr<float[]>(new float[w.count() * PANEL * w.k + 16]);
      w.panels = w.own.get() + (16 - ((uintptr_t)w.own.get() / 4) % 16) % 16;
      for (int64_t p = 0; p < w.count(); p++) panels.push_back({&from, &w, p});
    }
    c.shared[k].weights = c.weights[k].data();
  }
  int64_t floats = 0;
  for (const Panel& p : panels) floats += PANEL * p.to->k;
  team.run(panels.size(), floats < 1 << 16, [&](int, int64_t i) {
    const Panel& p = panels[i];
    float* to = const_cast<float*>(p.to->panels) + p.number * PANEL * p.to->k;
    pack_panel(c.tensors[p.from->tensor].data, p.from->turned, p.to->k, p.to->n, p.number, to);
  });
}

// What a row of a kind costs, in floating-point operations, and the rows of a tile.
struct Cost {
  double flops;
  int64_t rows;
};

Cost cost_of(const Kind& kind) {
  double flops = 0;
  for (const Segment& s : kind.segments) {
    for (const Op& op : s.ops) flops += 16.0 * op.n + 500;
    for (const Op& op : s.products) flops += 2.0 * op.gathered.size() * kind.weights[op.weight].k * kind.weights[op.weight].n;
  }
  int64_t floats = 1;
  for (const Slot& s : kind.slots) floats += s.chunk ? 0 : s.by_row + s.by_edge;
  constexpr int64_t ARENA_FLOATS = 96 << 10;  // of a tile, so that they stay in the L2 cache
  return {flops, std::clamp<int64_t>(ARENA_FLOATS / floats / TALL * TALL, TALL, 8 * TALL)};
}

// Tiles of some rows, shared by the threads.
struct Tiles {
  struct Piece { const Shared* shared; Tile tile; };
  std::vector<Piece> pieces;

  void add(const Shared& shared, const Group& g, int64_t begin, int64_t end, int64_t size) {
    for (int64_t r = begin; r < end; r += size) pieces.push_back({&shared, {r, std::min(r + size, end), g.state}});
  }
  Run1 at(size_t i, Scratch& scratch) const { return Run1(*pieces[i].shared, pieces[i].tile, scratch); }
  void run(Team& team, bool alone, std::vector<Scratch>& scratch) const {
    team.run(pieces.size(), alone, [&](int thread, int64_t i) { at(i, scratch[thread]).run(); });
  }
};

// Several parents may add to one child, which threads must not do at once. So the tiles first write what they would add, and
// then each thread adds some columns, for all rows in order: sums do not depend on the number of threads.
void run_and_add_later(Call& c, Team& team, const Group& group, int64_t size, std::vector<Scratch>& scratch) {
  constexpr int64_t FLOATS = 4 << 20;  // that are written before they are added
  const Shared& shared = c.shared[group.kind];
  const Kind& kind = *shared.kind;
  int64_t rows = group.end - group.begin, by_row = kind.scattered[ROW];
  if (!rows) return;
  by_row += kind.scattered[EDGE] * ((group.edge_end - group.edge + rows - 1) / rows);
  int64_t block = std::clamp<int64_t>(FLOATS / std::max<int64_t>(by_row, 1), 1, rows);
  for (int64_t r = group.begin; r < group.end; r += block) {
    int64_t end = std::min(r + block, group.end), floats = 0;
    Tiles tiles;
    tiles.add(shared, group, r, end, std::min(size, (end - r + team.count() - 1) / team.count()));
    std::vector<int64_t> starts;
    for (size_t i = 0; i < tiles.pieces.size(); i++) starts.push_back(floats), floats += tiles.at(i, scratch[0]).later_floats();
    if ((int64_t)c.later.size() < floats) c.later.resize(floats);
    for (size_t i = 0; i < starts.size(); i++) tiles.pieces[i].tile.later = c.later.data() + starts[i];
    tiles.run(team, false, scratch);
    team.run(team.count(), false, [&](int thread, int64_t part) {
      for (const Op& op : kind.scatters)
        for (size_t i = 0; i < starts.size(); i++) tiles.at(i, scratch[thread]).add_later(op, part, team.count());
    });
  }
}

void run_level(Call& c, Team& team, const std::vector<Cost>& costs, std::vector<Scratch>& scratch, size_t from, size_t to) {
  double work = 0;
  for (size_t g = from; g < to; g++) work += costs[c.groups[g].kind].flops * (c.groups[g].end - c.groups[g].begin);
  bool alone = work < 4e5;
  bool leaves = c.program.kinds[c.groups[from].kind].leaf();
  if (!alone && c.header(BACKWARD) && !c.header(FOREST) && !leaves) {
    for (size_t g = from; g < to; g++) run_and_add_later(c, team, c.groups[g], costs[c.groups[g].kind].rows, scratch);
    return;
  }
  Tiles tiles;
  for (size_t g = from; g < to; g++) {
    const Group& group = c.groups[g];
    int64_t size = costs[group.kind].rows, rows = group.end - group.begin;
    if (!alone) size = std::min(size, (rows + team.count() - 1) / team.count());
    tiles.add(c.shared[group.kind], group, group.begin, group.end, size);
  }
  tiles.run(team, alone, scratch);
}

void run_levels(Call& c) {
  Team team;
  find_groups(c);
  prepare_kinds(c);
  clear_states(c, team);
  pack_weights(c, team);
  std::vector<Cost> costs;
  for (const Kind& kind : c.program.kinds) costs.push_back(cost_of(kind));
  std::vector<Scratch> scratch(team.count());
  if (c.header(BACKWARD)) std::reverse(c.groups.begin(), c.groups.end());
  for (size_t g = 0; g < c.groups.size();) {
    size_t end = g;
    while (end < c.groups.size() && c.groups[end].level == c.groups[g].level) end++;
    run_level(c, team, costs, scratch, g, end);
    g = end;
  }
  repeat_rows(c);
}

}  // namespace
