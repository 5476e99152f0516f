// What XLA calls: `cavs_levels` runs all levels of one direction, `cavs_gradients` computes products over all vertices.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <new>
#include <utility>
#include <vector>

#include "gradient.h"
#include "levels.h"
#include "xla_ffi.h"

namespace {

Tensor tensor_of(const xla_ffi::Buffer& b) {
  int64_t size = 1;
  for (int64_t i = 0; i < b.rank; i++) size *= b.dims[i];
  int64_t rows = b.rank ? b.dims[0] : 1, width = 1;
  for (int64_t i = 1; i < b.rank; i++) width *= b.dims[i];
  require(b.dtype == xla_ffi::F32 || b.dtype == xla_ffi::S32, "a buffer of another type");
  return {(float*)b.data, rows, width, size};
}

const int32_t* integers(const xla_ffi::Buffer& b) {
  require(b.dtype == xla_ffi::S32, "a buffer of another type");
  return (const int32_t*)b.data;
}

Reader program_of(const xla_ffi::CallFrame& frame) {
  require(frame.attrs.size == 1 && frame.attrs.types[0] == xla_ffi::ARRAY, "no program");
  const xla_ffi::Array& words = *(const xla_ffi::Array*)frame.attrs.attrs[0];
  require(words.dtype == xla_ffi::S32, "a program of another type");
  const int32_t* first = (const int32_t*)words.data;
  return {first, first + words.size};
}

void levels(const xla_ffi::CallFrame& frame) {
  require(frame.args.size >= 1, "few arguments");
  Call c;
  for (int64_t i = 1; i < frame.args.size; i++) c.tensors.push_back(tensor_of(*frame.args.of[i]));
  for (int64_t i = 0; i < frame.rets.size; i++) c.tensors.push_back(tensor_of(*frame.rets.of[i]));
  c.program = read_program(program_of(frame));
  c.schedule = integers(*frame.args.of[0]);
  run_levels(c);
  require(!c.lost, "a child's row is out of range");
}

// Reads a matrix: the numbers of its index and of its tensors, the former negative if there is none, the parts of a row, and its
// `fold`. Without tensors there is no matrix.
Matrix matrix_of(const xla_ffi::CallFrame& frame, Reader& r, int64_t start, int64_t rows) {
  int64_t index = r.next(), parts = r.next(), fold = r.next(), count = r.next();
  if (!count) return {{}, 1, 0, nullptr, 0, 0, 1};
  require(index < frame.args.size && parts > 0 && fold > 0, "a number out of range");
  require(count == (index < 0 ? parts * fold : 1) && (index < 0 || fold == 1), "another number of matrices");
  Matrix m{{}, 0, 0, index < 0 ? nullptr : integers(*frame.args.of[index]), parts, start, fold};
  for (; count > 0; count--) {
    int64_t data = r.next();
    require(data >= 0 && data < frame.args.size, "a number out of range");
    Tensor t = tensor_of(*frame.args.of[data]);
    require(frame.args.of[data]->dtype == xla_ffi::F32 && t.width > 0, "a matrix of another type");
    require(m.of.empty() || (m.width == t.width && m.rows == t.rows), "matrices of other sizes");
    m.of.push_back(t.data), m.width = t.width, m.rows = t.rows;
  }
  int64_t limit = m.rows * fold;
  if (index >= 0) {
    Tensor i = tensor_of(*frame.args.of[index]);
    require(i.size == i.rows * parts, "an index of another width");
    limit = i.rows;
  }
  require(start >= 0 && start + rows <= limit, "rows out of range");
  return m;
}

// The program: for each result the number of its terms, and for each of these two matrices. The first argument has three numbers
// for each term: the first rows of the matrices, and how many follow.
void gradients(const xla_ffi::CallFrame& frame) {
  require(frame.args.size > 0, "few arguments");
  Reader r = program_of(frame);
  const int32_t* bounds = integers(*frame.args.of[0]);
  const int32_t* last = bounds + tensor_of(*frame.args.of[0]).size;
  std::vector<Gradient> all;
  for (int64_t i = 0; i < frame.rets.size; i++) {
    Tensor out = tensor_of(*frame.rets.of[i]);
    Gradient g{{}, out.data, 0, 0};
    for (int n = r.next(); n > 0; n--, bounds += 3) {
      require(bounds + 3 <= last && bounds[2] >= 0, "few bounds");
      Term t{matrix_of(frame, r, bounds[0], bounds[2]), {}, bounds[2]};
      t.right = matrix_of(frame, r, bounds[1], bounds[2]);
      int64_t height = t.left.parts * t.left.width, width = t.right.parts * t.right.width;
      require(g.terms.empty() || (g.height == height && g.width == width), "terms of other sizes");
      g.height = height, g.width = width;
      g.terms.push_back(std::move(t));
    }
    require(!g.terms.empty() && out.size == std::max<int64_t>(g.height, 1) * g.width && g.width > 0, "a result of another size");
    all.push_back(std::move(g));
  }
  Team team;
  require(compute_gradients(team, all), "a row is out of range");
}

// An error of the call. It takes no memory of our own, as there may be none.
xla_ffi::Error* error(const xla_ffi::CallFrame& frame, int code, const char* what) {
  char message[256];
  snprintf(message, sizeof message, "cavs: engine native: %s", what);
  xla_ffi::ErrorCreate args{sizeof args, nullptr, message, code};
  return frame.api->error_create(&args);
}

xla_ffi::Error* handled(xla_ffi::CallFrame* frame, void (*run)(const xla_ffi::CallFrame&)) {
  for (xla_ffi::Extension* e = frame->extension_start; e; e = e->next) {
    if (e->type != xla_ffi::METADATA) continue;
    xla_ffi::Metadata* m = reinterpret_cast<xla_ffi::MetadataExtension*>(e)->metadata;
    m->version = frame->api ? frame->api->version : xla_ffi::Version{sizeof(xla_ffi::Version), nullptr, 0, 1};
    m->traits = 0, m->state_type = 0;
    return nullptr;
  }
  if (frame->stage != xla_ffi::EXECUTE) return nullptr;
  try {
    run(*frame);
    return nullptr;
  } catch (const std::bad_alloc&) {
    return error(*frame, xla_ffi::RESOURCE_EXHAUSTED, "out of memory");
  } catch (const std::exception& e) {
    return error(*frame, xla_ffi::INVALID_ARGUMENT, e.what());
  }
}

}  // namespace

#ifndef CAVS_VERSION
#define CAVS_VERSION "unknown"
#endif
#define EXPORTED extern "C" __attribute__((visibility("default")))

EXPORTED const char* cavs_version() { return CAVS_VERSION; }

EXPORTED void cavs_threads(int count) { Threads::set_count(count); }

EXPORTED xla_ffi::Error* cavs_levels(xla_ffi::CallFrame* frame) { return handled(frame, levels); }

EXPORTED xla_ffi::Error* cavs_gradients(xla_ffi::CallFrame* frame) { return handled(frame, gradients); }
