// The program of one direction of F, as cavs/_engines/native/program.py writes it into a vector of integers, and the schedule.
#pragma once
#include <cstdint>
#include <stdexcept>
#include <utility>
#include <vector>

struct Tensor {  // an argument or a result of the call
  float* data;
  int64_t rows, width;  // width: elements of a row, if the first axis is rows
  int64_t size;
};

enum Domain { ROW, EDGE };
enum Shift { STATE, PADDED, NONE };  // rows of states, of tensors with slack, and without
enum Place { ARENA, ROWS, STATIC, LITERAL };  // where the values of a base lie

// Values lie in bases: `n` elements for each row (or edge), one row after another.
struct Base {
  Place place;
  Domain domain;
  int64_t n;
  int slot;         // ARENA: the slot of the arena, or of the chunk's
  bool chunk;       // ARENA: whether it lives only while a chunk of the tile is computed
  int tensor;       // ROWS, STATIC: the tensor. LITERAL: its bits
  Shift shift;      // ROWS: what is added to the number of a row
};

struct Slot {
  int64_t by_row, by_edge;  // elements for each row, and for each edge
  bool chunk;
};

struct Ref {
  int base;
  int64_t offset;
};

enum Opcode { ELEMENTWISE, GATHER, MOVE, REDUCE, PRODUCT, DOT, SPREAD, CHILDREN, SCATTER };

struct Run {
  Ref from;
  int64_t to, count;
  int step;
};

struct Op {
  Opcode opcode;
  Domain domain;
  int code;
  int64_t n;
  Ref to;
  std::vector<Ref> from;
  std::vector<int> steps;
  int32_t imm;
  int tensor, child;        // GATHER, SCATTER: the tensor, and the number of the child, -1 for the children of edges
  int weight;               // PRODUCT
  bool biased;              // PRODUCT: the last of `from` is added
  std::vector<int> gathered;  // PRODUCT: for each of `from` the number of the child that is gathered, or NOT_GATHERED
  std::vector<Run> runs;    // MOVE
  std::vector<int64_t> sizes;  // REDUCE: outer, reduced, inner. DOT: sizes, then strides
  int64_t before[2];  // SCATTER: the elements of earlier scatters of the kind, for each row, and for each edge
};

constexpr int NOT_GATHERED = -2;

struct Segment {
  std::vector<Op> ops;       // chunk by chunk
  std::vector<Op> products;  // of all rows of the tile, after `ops`
};

struct PackedWeight {
  int tensor;
  bool turned;
  int64_t k, n;
};

struct Written {  // a tensor of which the rows that no vertex has are filled with zeros, or with the first row
  int tensor;
  Domain domain;
  Shift shift;
  bool repeat;
};

struct Kind {
  int64_t rows, edges, first_row, first_edge;  // sizes, and where the kind begins among all inner vertices and edges; leaves: -1
  int64_t slack[2];  // rows, and edges, before the first in tensors with slack
  std::vector<Slot> slots;
  std::vector<Base> bases;
  std::vector<PackedWeight> weights;
  std::vector<Written> written;
  std::vector<Segment> segments;
  std::vector<Op> scatters;
  int64_t scattered[2];  // elements of all scatters, for each row, and for each edge
  bool leaf() const { return first_row < 0; }
};

static inline void require(bool holds, const char* what) {
  if (!holds) throw std::runtime_error(what);
}

struct Reader {
  const int32_t *at, *end;
  int32_t next() {
    require(at != end, "the program ends early");
    return *at++;
  }
  Ref ref() {
    int base = next();
    return {base, next()};
  }
};

// Where arrays of the schedule begin in its vector, and numbers that hold for all kinds.
enum Header {
  BACKWARD, KINDS, CLASSES, ARITY, FOREST, NUM_ROUNDS, ROUND_END, TASK_ROW, TASK_START, TASK_SIZE, TASK_EDGE, TASK_EDGES, TASK_LEVEL,
  INNER_COUNT, EDGE_CHILD, FIRST_EDGE, NUM_CHILDREN, LEAF_COUNT, LEAF_ROW, TASKS, STATE_ROWS, LEAF_KINDS, HEADER
};

struct Program {
  int32_t header[HEADER];
  std::vector<int> states;  // tensors of states that the call creates
  std::vector<Kind> kinds;  // those of vertices with children, and then, if the call runs leaves, those of leaves
};

static Op read_op(Reader& r) {
  Op op{};
  op.opcode = (Opcode)r.next();
  op.domain = (Domain)r.next();
  op.code = r.next();
  op.n = r.next();
  op.to = r.ref();
  op.imm = r.next();
  op.tensor = r.next();
  op.child = r.next();
  op.weight = r.next();
  op.biased = r.next();
  for (int i = r.next(); i > 0; i--) op.from.push_back(r.ref()), op.steps.push_back(r.next());
  for (int i = r.next(); i > 0; i--) op.gathered.push_back(r.next());
  for (int i = r.next(); i > 0; i--) {
    Ref from = r.ref();
    int64_t to = r.next(), count = r.next();
    op.runs.push_back({from, to, count, r.next()});
  }
  for (int i = r.next(); i > 0; i--) op.sizes.push_back(r.next());
  return op;
}

static Kind read_kind(Reader& r) {
  Kind k{};
  k.rows = r.next(), k.edges = r.next(), k.first_row = r.next(), k.first_edge = r.next();
  k.slack[ROW] = r.next(), k.slack[EDGE] = r.next();
  for (int i = r.next(); i > 0; i--) {
    int64_t by_row = r.next(), by_edge = r.next();
    k.slots.push_back({by_row, by_edge, r.next() != 0});
  }
  for (int i = r.next(); i > 0; i--) {
    Base b{};
    b.place = (Place)r.next(), b.domain = (Domain)r.next(), b.n = r.next(), b.slot = r.next(), b.chunk = r.next() != 0;
    b.tensor = r.next(), b.shift = (Shift)r.next();
    k.bases.push_back(b);
  }
  for (int i = r.next(); i > 0; i--) {
    PackedWeight w{};
    w.tensor = r.next(), w.turned = r.next() != 0, w.k = r.next(), w.n = r.next();
    k.weights.push_back(w);
  }
  for (int i = r.next(); i > 0; i--) {
    Written w{};
    w.tensor = r.next(), w.domain = (Domain)r.next(), w.shift = (Shift)r.next(), w.repeat = r.next() != 0;
    k.written.push_back(w);
  }
  for (int i = r.next(); i > 0; i--) {
    Segment s;
    for (int j = r.next(); j > 0; j--) s.ops.push_back(read_op(r));
    for (int j = r.next(); j > 0; j--) s.products.push_back(read_op(r));
    for (Op& op : s.ops) {
      if (op.opcode != SCATTER) continue;
      op.before[ROW] = k.scattered[ROW], op.before[EDGE] = k.scattered[EDGE];
      k.scattered[op.domain] += op.n;
      k.scatters.push_back(op);
    }
    k.segments.push_back(std::move(s));
  }
  return k;
}

static Program read_program(Reader r) {
  Program p{};
  for (int& x : p.header) x = r.next();
  for (int i = r.next(); i > 0; i--) p.states.push_back(r.next());
  for (int i = p.header[KINDS] + p.header[LEAF_KINDS]; i > 0; i--) p.kinds.push_back(read_kind(r));
  return p;
}
