// The scheduler: a batch of graphs becomes one vector of int32. It is the library `scheduler.so`, which Python calls through ctypes,
// without the interpreter's lock. cavs/_schedule/reference.py does the same in NumPy, integer by integer, and says more.
//
// Each graph is read once (`DataSet`). Arrays that `Graphs.build` did not check, or that are changed later, cannot make it read or
// write out of bounds: whatever is used as an index is compared first.
#include <algorithm>
#include <array>
#include <cstdint>
#include <exception>
#include <new>
#include <numeric>
#include <thread>
#include <vector>

namespace {

enum Status : int64_t { DONE = 0, NO_ROOM = -1, BAD_INDEX = -2, BAD_GRAPHS = -3, TOO_LARGE = -4, NO_MEMORY = -5 };

constexpr int64_t MOST = INT32_MAX - (1 << 16);  // vertices or edges: with padding, their rows are int32
constexpr int64_t FIELDS = 3;

// The arrays of `cavs.Graphs`.
struct Graphs {
  int64_t graphs, vertices, edges, kinds;
  const int64_t *vertex_offsets, *child_offsets;
  const int32_t *children, *height;
  const int32_t* kind;           // null if all vertices are scheduled as one kind
  const int32_t* fields[FIELDS];  // those that schedules include, then null
};

// How levels are cut into tasks; `Cut` in cavs/_schedule/tasks.py.
struct Cut {
  int64_t classes, limited, special, large;
  const int64_t* widths;  // (classes,) vertices of a task, widest first
  const int64_t* pieces;  // (widths[0] + 1, classes + 1) tasks of each class for a rest of so many vertices; unless some are limited
  const int64_t* limits;  // (limited, 3) class, most vertices, most edges
  const double* cost;     // (limited,)
};

// Where the arrays of a schedule begin in its vector, -1 if it has no such array, and its sizes; `LAYOUT` in
// schedule.py. After `SIZES` follow leaves, inner rows and edges, padded, of each kind.
enum Layout {
  LENGTH, PAD, KINDS, CLASSES, VERTICES, GRAPHS, TASKS, LEVELS, PARTS, ROWS, ROOTED, FOREST, ARITY, MOST_CHILDREN,
  NUM_VERTICES, NUM_TASKS, NUM_ROUNDS, LEAF_COUNT, INNER_COUNT, LEAF_ROW, LEAF_VERTEX, INNER_VERTEX, ROW, GRAPH_END,
  EDGE_CHILD, FIRST_EDGE, NUM_CHILDREN, EDGE_OWNER, TASK_ROW, TASK_START, TASK_SIZE, TASK_EDGE, TASK_EDGES, TASK_LEVEL, ROUND_END,
  ROOTS, FIELD, NUM_LEVELS = FIELD + FIELDS, PART_START, PARENT_EDGE, PARENT_FIRST,
  PARENT_COUNT, SIZES
};

struct Failure : std::exception {
  Status status;
  explicit Failure(Status status) : status(status) {}
};

void require(bool holds, Status otherwise) {
  if (!holds) throw Failure(otherwise);
}

struct Task {
  int32_t loop;  // kind * number of classes + class
  int32_t row, start, size, edge, edges, level;  // `row` counts from the first inner row, `start` and `edge` within the kind
};

// Graphs that are to be scheduled, and what a schedule needs to know of each, whatever its batch.
class DataSet {
 public:
  struct Facts {
    int32_t root, roots, inner, fan_in;  // the first root and how many there are, vertices with children, most children
    int64_t size, edges, keys;           // `keys`: levels * kinds
    int64_t first, end;                  // of its `counts`
  };
  struct Count {
    int32_t key, vertices;  // height * kinds + kind, and how many vertices have it
  };
  explicit DataSet(const Graphs& graphs);
  const Facts& operator[](int64_t graph) const { return facts_[graph]; }
  const Graphs arrays;
  std::vector<Count> counts;  // of each graph, by ascending keys; at most one for each vertex, however many kinds there are

 private:
  Facts read(int64_t first, int64_t size);

  std::vector<Facts> facts_;
  std::vector<int32_t> of_key_;   // (levels * kinds,) vertices of one graph
  std::vector<char> has_parent_;  // of the vertices of one graph
};

DataSet::DataSet(const Graphs& graphs) : arrays(graphs) {
  require(arrays.kinds > 0, BAD_GRAPHS);
  facts_.reserve(arrays.graphs);
  for (int64_t i = 0; i < arrays.graphs; i++) {
    int64_t first = arrays.vertex_offsets[i], end = arrays.vertex_offsets[i + 1];
    require(first >= 0 && first <= end && end <= arrays.vertices, BAD_GRAPHS);
    require(end - first <= MOST, TOO_LARGE);
    facts_.push_back(read(first, end - first));
  }
}

// Counts the vertices of a graph by key, marks those that have parents, and checks all that is used as an index later.
DataSet::Facts DataSet::read(int64_t first, int64_t size) {
  int64_t kinds = arrays.kinds, fan_in = 0, inner = 0, begin = (int64_t)counts.size();
  of_key_.clear();
  for (int64_t v = first; v < first + size; v++) {
    int64_t height = arrays.height[v], kind = arrays.kind ? arrays.kind[v] : 0;
    int64_t edge = arrays.child_offsets[v], end = arrays.child_offsets[v + 1];
    require(edge >= 0 && edge <= end && end <= arrays.edges, BAD_GRAPHS);
    require(height >= 0 && height < size && (height > 0) == (end > edge), BAD_GRAPHS);
    require(kind >= 0 && kind < kinds, BAD_GRAPHS);
    int64_t key = height * kinds + kind;
    require(key < MOST, TOO_LARGE);
    if (key >= (int64_t)of_key_.size()) of_key_.resize((height + 1) * kinds, 0);
    of_key_[key]++;
    inner += height > 0;
    fan_in = std::max(fan_in, end - edge);
  }
  for (int64_t key = 0; key < (int64_t)of_key_.size(); key++) {
    if (of_key_[key]) counts.push_back({(int32_t)key, of_key_[key]});
  }
  // The edges of a graph lie side by side, as offsets ascend. Processors mispredict the ends of a short loop for each vertex.
  int64_t edge = size ? arrays.child_offsets[first] : 0, end = size ? arrays.child_offsets[first + size] : 0, edges = end - edge;
  require(edges <= MOST, TOO_LARGE);
  has_parent_.assign(size, 0);
  for (; edge < end; edge++) {
    int64_t child = arrays.children[edge];
    require(child >= 0 && child < size, BAD_GRAPHS);
    has_parent_[child] = 1;
  }
  int64_t roots = std::count(has_parent_.begin(), has_parent_.end(), 0);
  auto root = roots ? std::find(has_parent_.begin(), has_parent_.end(), 0) : has_parent_.begin();
  return {(int32_t)(root - has_parent_.begin()), (int32_t)roots, (int32_t)inner, (int32_t)fan_in,
          size, edges, (int64_t)of_key_.size(), begin, (int64_t)counts.size()};
}

// One batch: its vertices sorted by (height, kind), then its tasks.
class Batch {
 public:
  void sort(const DataSet& data, const int64_t* index, int64_t count);
  void cut(const Cut& cut);
  void write(const int64_t* layout, int32_t* out) const;
  void measure(int64_t* facts) const;
  int64_t num_tasks() const { return (int64_t)tasks_.size(); }

 private:
  void place();
  void count_edges();
  void cut_run(const Cut& cut, int64_t level, int64_t kind, int64_t row, int64_t start, int64_t count);
  void add_task(const Cut& cut, int64_t cls, int64_t level, int64_t kind, int64_t row, int64_t start, int64_t size);
  bool fits(const int64_t* layout) const;
  void clear_small(const int64_t* layout, int32_t* out) const;
  void write_vertices(const int64_t* layout, int32_t* out) const;
  void write_edges(const int64_t* layout, int32_t* out) const;
  void write_tasks(const int64_t* layout, int32_t* out) const;
  void write_scripts(const int64_t* layout, int32_t* out) const;
  void write_parts(const int64_t* layout, int32_t* starts) const;

  int64_t children_of(int64_t inner_row) const { return before_[inner_row + 1] - before_[inner_row]; }
  bool regular() const { return num_edges_ == fan_in_ * num_inner_; }  // whether all inner vertices have as many children
  int64_t key_of(int64_t row) const { return g_.height[row] * num_kinds_ + (g_.kind ? g_.kind[row] : 0); }  // of a row of the graphs

  Graphs g_;
  int64_t num_graphs_, num_kinds_, num_vertices_, num_leaves_, num_inner_, num_edges_, height_, fan_in_, classes_;
  bool rooted_, forest_;
  std::vector<int64_t> shift_;                // (G,) a vertex's row in the graphs, minus its number in the batch
  std::vector<int32_t> begin_, root_, work_;  // (G + 1,) first vertex of each graph; (G,) first root; inner vertices
  std::vector<int32_t> count_;                // (levels * kinds,) vertices by key
  std::vector<int32_t> next_;                 // by key, where the next vertex goes
  std::vector<int32_t> to_inner_;             // by key, from a place among the sorted vertices to one among the inner ones (leaves: < 0)
  std::vector<int32_t> position_;             // (V,) place of each vertex among the sorted vertices
  std::vector<int32_t> order_;                // (V,) vertices in schedule order: leaves by kind; inner vertices by kind, then height
  std::vector<int32_t> edges_before_;         // (V + 1,) edges before each of them
  const int32_t* inner_;                      // (I,) the inner vertices in `order_`
  int32_t* before_;                           // (I + 1,) the edges before them in `edges_before_`
  std::vector<int64_t> leaves_, inner_count_, edges_, inner_start_;  // by kind
  std::vector<Task> tasks_;
};

void Batch::sort(const DataSet& data, const int64_t* index, int64_t count) {
  g_ = data.arrays, num_graphs_ = count, num_kinds_ = g_.kinds;
  shift_.resize(count), root_.resize(count), work_.resize(count), begin_.resize(count + 1);
  num_vertices_ = num_edges_ = fan_in_ = begin_[0] = 0, rooted_ = true;
  count_.assign(num_kinds_, 0);
  int64_t roots = 0;
  for (int64_t j = 0; j < count; j++) {
    int64_t i = index ? index[j] : j;
    require(i >= 0 && i < g_.graphs, BAD_INDEX);
    const DataSet::Facts& graph = data[i];
    int64_t first = g_.vertex_offsets[i];
    require(first >= 0 && first <= g_.vertices - graph.size, BAD_GRAPHS);
    shift_[j] = first - num_vertices_, root_[j] = (int32_t)(num_vertices_ + graph.root), work_[j] = graph.inner;
    if (graph.keys > (int64_t)count_.size()) count_.resize(graph.keys, 0);
    const DataSet::Count *run = data.counts.data() + graph.first, *end = data.counts.data() + graph.end;
    int32_t* of_key = count_.data();
    for (; run < end; run++) of_key[run->key] += run->vertices;
    num_vertices_ += graph.size, num_edges_ += graph.edges, roots += graph.roots;
    require(num_vertices_ <= MOST && num_edges_ <= MOST, TOO_LARGE);
    fan_in_ = std::max<int64_t>(fan_in_, graph.fan_in), rooted_ &= graph.roots == 1;
    begin_[j + 1] = (int32_t)num_vertices_;
  }
  forest_ = num_vertices_ - roots == num_edges_;
  height_ = (int64_t)count_.size() / num_kinds_ - 1;
  place();
  count_edges();
}

// The counting sort. Graphs are read one after another, which writes to each level in order. Leaves are treated as inner vertices
// are: whether the next vertex is a leaf is a branch that processors mispredict.
void Batch::place() {
  int64_t keys = (int64_t)count_.size(), kinds = num_kinds_;
  next_.resize(keys), to_inner_.resize(keys);
  leaves_.assign(count_.begin(), count_.begin() + kinds), inner_count_.assign(kinds, 0), inner_start_.resize(kinds);
  int64_t at = 0;
  for (int64_t key = 0; key < keys; key++) next_[key] = (int32_t)at, at += count_[key];
  num_leaves_ = keys > kinds ? next_[kinds] : num_vertices_;
  at = 0;
  for (int64_t kind = 0; kind < kinds; kind++) {
    inner_start_[kind] = at;
    for (int64_t key = kinds + kind; key < keys; key += kinds) to_inner_[key] = (int32_t)at - next_[key], at += count_[key];
    inner_count_[kind] = at - inner_start_[kind];
  }
  num_inner_ = at;
  for (int64_t key = 0; key < kinds; key++) to_inner_[key] = (int32_t)-num_leaves_;
  position_.resize(num_vertices_), order_.resize(num_vertices_), edges_before_.resize(num_vertices_ + 1);
  inner_ = order_.data() + num_leaves_, before_ = edges_before_.data() + num_leaves_;
  const bool ragged = !regular();
  for (int64_t j = 0; j < num_graphs_; j++) {
    const int64_t* offsets = g_.child_offsets + shift_[j];
    for (int64_t v = begin_[j]; v < begin_[j + 1]; v++) {
      int64_t key = key_of(v + shift_[j]);
      require(key >= 0 && key < keys, BAD_GRAPHS);
      int32_t row = position_[v] = next_[key]++;
      int64_t place = num_leaves_ + row + to_inner_[key];
      require(place >= 0 && place < num_vertices_, BAD_GRAPHS);
      order_[place] = (int32_t)v;
      if (!ragged) continue;
      int64_t children = offsets[v + 1] - offsets[v];
      require(children >= 0 && children <= MOST, BAD_GRAPHS);
      edges_before_[place + 1] = (int32_t)children;
    }
  }
  // Each place has its vertex, so all that later loops read has been written.
  int64_t end = 0;
  for (int64_t key = 0; key < keys; key++) require(next_[key] == (end += count_[key]), BAD_GRAPHS);
}

// Sums the numbers of children, so that `before_` says where those of each vertex begin.
void Batch::count_edges() {
  edges_.resize(num_kinds_), before_[0] = 0;
  if (regular()) {
    for (int64_t r = 1; r <= num_inner_; r++) before_[r] = (int32_t)(r * fan_in_);
  } else {
    int64_t sum = 0;
    for (int64_t r = 1; r <= num_inner_; r++) {
      require((sum += before_[r]) <= MOST, TOO_LARGE);
      before_[r] = (int32_t)sum;
    }
  }
  for (int64_t k = 0; k < num_kinds_; k++) edges_[k] = before_[inner_start_[k] + inner_count_[k]] - before_[inner_start_[k]];
}

// Writes what decides the shape of the schedule: `BatchSizes` in cavs/_schedule/shape_choice.py.
void Batch::measure(int64_t* facts) const {
  int64_t of_all[] = {num_vertices_, height_, fan_in_, rooted_, forest_};
  facts = std::copy(std::begin(of_all), std::end(of_all), facts);
  for (const auto* each : {&leaves_, &inner_count_, &edges_}) facts = std::copy(each->begin(), each->end(), facts);
}

void Batch::cut(const Cut& cut) {
  tasks_.clear();
  classes_ = cut.classes;
  std::vector<int64_t> start(num_kinds_, 0);
  int64_t row = 0;
  for (int64_t key = num_kinds_; key < (int64_t)count_.size(); key++) {
    int64_t kind = key % num_kinds_;
    cut_run(cut, key / num_kinds_, kind, row, start[kind], count_[key]);
    row += count_[key], start[kind] += count_[key];
  }
}

// Cuts a run, the `count` vertices of one level and kind, into tasks.
void Batch::cut_run(const Cut& cut, int64_t level, int64_t kind, int64_t row, int64_t start, int64_t count) {
  int64_t done = 0;
  auto add = [&](int64_t cls, int64_t size) {
    add_task(cut, cls, level, kind, row + done, start + done, size);
    done += size;
  };
  if (!cut.limited) {  // a task always has room for the edges of its vertices
    const int64_t* pieces = cut.pieces + count % cut.widths[0] * (cut.classes + 1);
    for (int64_t cls = 0; cls < cut.classes; cls++) {
      int64_t tasks = pieces[cls] + (cls ? 0 : count / cut.widths[0]);
      for (; tasks > 0; tasks--) add(cls, std::min(cut.widths[cls], count - done));
    }
    return;
  }
  while (done < count) {
    int64_t here = inner_start_[kind] + start + done, best = -1, taken = 0;
    if (children_of(here) > cut.large) {
      add(cut.special, 1);
      continue;
    }
    double least = 0;
    for (int64_t i = 0; i < cut.limited; i++) {  // the class of the least cost per vertex
      const int64_t* limit = cut.limits + 3 * i;
      const int32_t *first = &before_[here + 1], *last = first + std::min(limit[1], count - done);
      int64_t take = std::upper_bound(first, last, before_[here] + limit[2]) - first;
      double score = take ? cut.cost[i] / (double)take : 0;
      if (take && (best < 0 || score < least)) best = limit[0], taken = take, least = score;
    }
    require(best >= 0, NO_ROOM);
    add(best, taken);
  }
}

void Batch::add_task(const Cut& cut, int64_t cls, int64_t level, int64_t kind, int64_t row, int64_t start, int64_t size) {
  int64_t first = inner_start_[kind], edge = before_[first + start], edges = before_[first + start + size] - edge;
  tasks_.push_back({(int32_t)(kind * cut.classes + cls), (int32_t)row, (int32_t)start, (int32_t)size,
                    (int32_t)(edge - before_[first]), (int32_t)edges, (int32_t)level});
}

// Whether the batch and its tasks fit a layout.
bool Batch::fits(const int64_t* layout) const {
  if (layout[KINDS] != num_kinds_ || layout[CLASSES] != classes_) return false;
  for (int64_t f = 0; f < FIELDS; f++) {
    if ((g_.fields[f] != nullptr) != (layout[FIELD + f] >= 0)) return false;
  }
  const int64_t* sizes = layout + SIZES;
  int64_t inner_kinds = 0;
  for (int64_t k = 0; k < num_kinds_; k++) {
    if (leaves_[k] > sizes[k] || inner_count_[k] > sizes[num_kinds_ + k] || edges_[k] > sizes[2 * num_kinds_ + k]) return false;
    inner_kinds += inner_count_[k] > 0;
  }
  if (num_vertices_ > layout[VERTICES] || num_graphs_ > layout[GRAPHS] || fan_in_ > layout[MOST_CHILDREN]) return false;
  if (num_tasks() > layout[TASKS]) return false;
  if (layout[ARITY] && num_edges_ != layout[ARITY] * num_inner_) return false;
  if (layout[LEVELS] && (height_ > layout[LEVELS] || inner_kinds > 1)) return false;
  return (rooted_ || !layout[ROOTED]) && (forest_ || !layout[FOREST]);
}

void Batch::write(const int64_t* layout, int32_t* out) const {
  require(fits(layout), NO_ROOM);
  clear_small(layout, out);
  write_vertices(layout, out);
  write_edges(layout, out);
  write_tasks(layout, out);
  if (layout[LEVELS]) write_scripts(layout, out);
}

// Zeros all arrays but the large ones, which `write_vertices` and `write_edges` fill: memory is what limits many threads.
void Batch::clear_small(const int64_t* layout, int32_t* out) const {
  const int64_t *leaves = layout + SIZES, *inner = leaves + num_kinds_, *edges = inner + num_kinds_, *end = edges + num_kinds_;
  std::vector<std::array<int64_t, 2>> large = {  // where each begins, and its size
      {layout[LEAF_VERTEX], std::accumulate(leaves, inner, int64_t(0))}, {layout[INNER_VERTEX], std::accumulate(inner, edges, int64_t(0))},
      {layout[EDGE_CHILD], std::accumulate(edges, end, int64_t(0))}, {layout[ROW], layout[VERTICES]}};
  for (int64_t f = 0; f < FIELDS && g_.fields[f]; f++) large.push_back({layout[FIELD + f], layout[VERTICES]});
  if (layout[LEVELS] && layout[FOREST]) large.push_back({layout[PARENT_EDGE], layout[ROWS]});
  std::sort(large.begin(), large.end());
  int64_t done = 0;
  for (auto [begin, size] : large) std::fill(out + done, out + begin, 0), done = begin + size;
  std::fill(out + done, out + layout[LENGTH], 0);
}

// Repeats the first of `count` values up to `size`, so that padding computes what a real row computes.
void repeat_first(int32_t* values, int64_t count, int64_t size) {
  std::fill(values + count, values + size, count ? values[0] : 0);
}

void Batch::write_vertices(const int64_t* layout, int32_t* out) const {
  int32_t pad = (int32_t)layout[PAD], leaf_row = pad;
  out[layout[NUM_VERTICES]] = (int32_t)num_vertices_;
  const int32_t* leaf = order_.data();
  int32_t *leaf_vertex = out + layout[LEAF_VERTEX], *inner_vertex = out + layout[INNER_VERTEX];
  for (int64_t k = 0; k < num_kinds_; k++) {
    int64_t leaf_size = layout[SIZES + k], inner_size = layout[SIZES + num_kinds_ + k];
    out[layout[LEAF_COUNT] + k] = (int32_t)leaves_[k], out[layout[INNER_COUNT] + k] = (int32_t)inner_count_[k];
    out[layout[LEAF_ROW] + k] = leaf_row, leaf_row += (int32_t)leaves_[k];
    std::copy_n(leaf, leaves_[k], leaf_vertex), repeat_first(leaf_vertex, leaves_[k], leaf_size);
    std::copy_n(inner_ + inner_start_[k], inner_count_[k], inner_vertex);
    repeat_first(inner_vertex, inner_count_[k], inner_size);
    leaf += leaves_[k], leaf_vertex += leaf_size, inner_vertex += inner_size;
  }
  int32_t* row = out + layout[ROW];
  for (int64_t v = 0; v < num_vertices_; v++) row[v] = position_[v] + pad;
  std::fill(row + num_vertices_, row + layout[VERTICES], 0);
  int32_t* end = std::copy(begin_.begin() + 1, begin_.end(), out + layout[GRAPH_END]);
  std::fill(end, out + layout[GRAPH_END] + layout[GRAPHS], (int32_t)num_vertices_);  // graphs that a server adds
  if (rooted_) {
    std::copy(root_.begin(), root_.end(), out + layout[ROOTS]);
    repeat_first(out + layout[ROOTS], num_graphs_, layout[GRAPHS]);
  }
  for (int64_t f = 0; f < FIELDS && g_.fields[f]; f++) {
    int32_t* to = out + layout[FIELD + f];
    for (int64_t j = 0; j < num_graphs_; j++) {
      std::copy_n(g_.fields[f] + shift_[j] + begin_[j], begin_[j + 1] - begin_[j], to + begin_[j]);
    }
    std::fill(to + num_vertices_, to + layout[VERTICES], -1);
  }
}

void Batch::write_edges(const int64_t* layout, int32_t* out) const {
  int32_t pad = (int32_t)layout[PAD], *child = out + layout[EDGE_CHILD];
  bool ragged = !layout[ARITY];
  std::vector<int32_t*> of_key(count_.size());  // where the child of edge 0 would be, if it were of the kind of this key
  for (int64_t k = 0; k < num_kinds_; k++) {
    for (size_t key = k; key < of_key.size(); key += num_kinds_) of_key[key] = child - before_[inner_start_[k]];
    child += layout[SIZES + 2 * num_kinds_ + k];
  }
  int32_t* parent = layout[LEVELS] && layout[FOREST] ? out + layout[PARENT_EDGE] : nullptr;  // the one edge above each row
  if (parent) std::fill_n(parent, layout[ROWS], -1);
  for (int64_t j = 0; j < num_graphs_; j++) {
    const int64_t* offsets = g_.child_offsets + shift_[j];
    const int32_t *position = position_.data() + begin_[j], size = begin_[j + 1] - begin_[j];
    for (int64_t v = begin_[j]; v < begin_[j + 1]; v++) {
      int64_t key = key_of(v + shift_[j]), edge = offsets[v], end = offsets[v + 1];
      if (key < num_kinds_) continue;
      int64_t inner_row = position_[v] + to_inner_[key];
      require(edge >= 0 && end <= g_.edges && end - edge == children_of(inner_row), BAD_GRAPHS);
      int32_t number = before_[inner_row], *to = of_key[key];
      for (; edge < end; edge++, number++) {
        int32_t child = g_.children[edge];
        require(child >= 0 && child < size, BAD_GRAPHS);
        int32_t row = to[number] = position[child] + pad;
        if (parent) parent[row] = number;
      }
    }
  }
  child = out + layout[EDGE_CHILD];
  int32_t *first_edge = out + layout[FIRST_EDGE], *num_children = out + layout[NUM_CHILDREN], *owner = out + layout[EDGE_OWNER];
  for (int64_t k = 0; k < num_kinds_; k++) {
    int64_t inner_size = layout[SIZES + num_kinds_ + k], size = layout[SIZES + 2 * num_kinds_ + k];
    repeat_first(child, edges_[k], size), child += size;
    if (!ragged) continue;
    int64_t first = inner_start_[k], count = inner_count_[k];
    int32_t* to_owner = owner;
    for (int64_t r = 0; r < count; r++) {
      first_edge[r] = before_[first + r] - before_[first], num_children[r] = (int32_t)children_of(first + r);
      to_owner = std::fill_n(to_owner, num_children[r], (int32_t)r);
    }
    repeat_first(first_edge, count, inner_size), repeat_first(num_children, count, inner_size);
    std::fill(to_owner, owner + size, (int32_t)inner_size);
    first_edge += inner_size, num_children += inner_size, owner += size;
  }
}

// Tasks, and the rounds in which they run: a round is one pass through all loops, in ascending order.
void Batch::write_tasks(const int64_t* layout, int32_t* out) const {
  int64_t count = num_tasks(), loops = num_kinds_ * classes_, round = -1;
  int32_t first_row = (int32_t)(layout[PAD] + num_leaves_), *ends = out + layout[ROUND_END];
  for (int64_t t = 0; t < count; t++) {
    const Task& task = tasks_[t];
    out[layout[TASK_ROW] + t] = first_row + task.row, out[layout[TASK_START] + t] = task.start;
    out[layout[TASK_SIZE] + t] = task.size, out[layout[TASK_LEVEL] + t] = task.level;
    if (!layout[ARITY]) out[layout[TASK_EDGE] + t] = task.edge, out[layout[TASK_EDGES] + t] = task.edges;
    if (!t || task.loop < tasks_[t - 1].loop) round++;
    ends[round * loops + task.loop]++;
  }
  int32_t end = 0;
  for (int64_t i = 0; i < (round + 1) * loops; i++) end = ends[i] += end;
  out[layout[NUM_TASKS]] = (int32_t)count, out[layout[NUM_ROUNDS]] = (int32_t)(round + 1);
}

// Scripts of engine `persistent`: the parts of each level, and the edges from children to parents.
void Batch::write_scripts(const int64_t* layout, int32_t* out) const {
  out[layout[NUM_LEVELS]] = (int32_t)height_;
  write_parts(layout, out + layout[PART_START]);
  if (layout[FOREST]) return;  // `write_edges` did the rest
  int64_t rows = layout[ROWS];
  int32_t *parent = out + layout[PARENT_EDGE], *count = out + layout[PARENT_COUNT], *first = out + layout[PARENT_FIRST];
  auto for_edges = [&](auto visit) {  // the row of each edge's child, and the number of the edge
    const int32_t* child = out + layout[EDGE_CHILD];
    int32_t edge = 0;
    for (int64_t k = 0; k < num_kinds_; child += layout[SIZES + 2 * num_kinds_ + k++]) {
      for (int64_t e = 0; e < edges_[k]; e++) visit(child[e], edge++);
    }
  };
  for_edges([&](int32_t row, int32_t) { count[row]++; });
  for (int64_t row = 1; row < rows; row++) first[row] = first[row - 1] + count[row - 1];
  std::vector<int32_t> next(first, first + rows);
  for_edges([&](int32_t row, int32_t edge) { parent[next[row]++] = edge; });
}

// Graphs are divided, in order, into parts of about equal work. Writes where each part of each level begins. The vertices of a
// level are in the order of their numbers, as only one kind has children.
void Batch::write_parts(const int64_t* layout, int32_t* starts) const {
  int64_t parts = layout[PARTS], upto = 0, inner = std::max<int64_t>(num_inner_, 1), part = 0;
  std::vector<int32_t> first(parts, (int32_t)num_vertices_);  // the first vertex of each part
  for (int64_t j = 0; j < num_graphs_; j++) {
    upto += work_[j];
    int64_t done = std::max<int64_t>(upto - work_[j] / 2 - 1, 0), mine = std::min(done * parts / inner, parts - 1);
    while (part <= mine) first[part++] = begin_[j];
  }
  const int32_t* row = inner_;
  for (int64_t level = 1; level <= layout[LEVELS]; level++) {
    const int32_t* end = row;
    for (int64_t k = 0; k < num_kinds_ && level <= height_; k++) end += count_[level * num_kinds_ + k];
    for (int32_t vertex : first) *starts++ = (int32_t)(std::lower_bound(row, end, vertex) - inner_);
    row = end;
  }
  *starts = (int32_t)num_inner_;
}

// Runs a function, and returns `DONE` or why it failed.
template <typename Run>
int64_t guarded(Run run) {
  try {
    run();
    return DONE;
  } catch (const Failure& failure) {
    return failure.status;
  } catch (const std::exception&) {  // std::bad_alloc, std::length_error
    return NO_MEMORY;
  }
}

}  // namespace

#ifndef CAVS_VERSION
#define CAVS_VERSION "unknown"
#endif
#define EXPORTED extern "C" __attribute__((visibility("default")))

EXPORTED const char* cavs_version() { return CAVS_VERSION; }

// Reads graphs. Their arrays must remain where they are. `*data` is set.
EXPORTED int64_t cavs_read(const Graphs* graphs, DataSet** data) {
  *data = nullptr;
  return guarded([&] { *data = new DataSet(*graphs); });
}

EXPORTED void cavs_forget(DataSet* data) { delete data; }

// Sorts a batch: the graphs `index`, or the first `count` ones if that is null. Its facts are written, and `*batch` is set.
EXPORTED int64_t cavs_open(const DataSet* data, const int64_t* index, int64_t count, int64_t* facts, Batch** batch) {
  *batch = nullptr;
  return guarded([&] {
    *batch = new Batch;
    (*batch)->sort(*data, index, count);
    (*batch)->measure(facts);
  });
}

// Cuts a batch into tasks. Writes their number.
EXPORTED int64_t cavs_cut(Batch* batch, const Cut* cut, int64_t* count) {
  return guarded([&] {
    batch->cut(*cut);
    *count = batch->num_tasks();
  });
}

// Writes the schedule of a batch that was cut.
EXPORTED int64_t cavs_write(const Batch* batch, const int64_t* layout, int32_t* out) {
  return guarded([&] { batch->write(layout, out); });
}

EXPORTED void cavs_close(Batch* batch) { delete batch; }

// Schedules several batches of one shape: the graphs `index`, `counts[b]` of them for batch b. Writes the schedules one after another.
// Some threads take about equal numbers of batches. If one fails, `*failed` is the number of the first batch that did.
EXPORTED int64_t cavs_schedule(const DataSet* data, const int64_t* index, const int64_t* counts, int64_t batches, const Cut* cut,
                               const int64_t* layout, int32_t* out, int64_t threads, int64_t* failed) {
  return guarded([&] {
    std::vector<int64_t> first(batches + 1, 0), status(threads, DONE), at(threads, 0);
    for (int64_t b = 0; b < batches; b++) first[b + 1] = first[b] + counts[b];
    auto some = [&](int64_t t) {
      int64_t& b = at[t] = t * batches / threads;
      status[t] = guarded([&] {
        Batch batch;
        for (; b < (t + 1) * batches / threads; b++) {
          batch.sort(*data, index + first[b], counts[b]);
          batch.cut(*cut);
          batch.write(layout, out + b * layout[LENGTH]);
        }
      });
    };
    std::vector<std::thread> others;
    others.reserve(threads);
    try {
      for (int64_t t = 0; t < threads - 1; t++) others.emplace_back(some, t);
    } catch (const std::exception&) {  // no more threads, or no memory for one
    }
    // The calling thread takes the last part, and those for which there is no thread.
    for (int64_t t = (int64_t)others.size(); t < threads; t++) some(t);
    for (std::thread& other : others) other.join();
    for (int64_t t = 0; t < threads; t++) {
      *failed = at[t];
      require(!status[t], (Status)status[t]);
    }
  });
}
