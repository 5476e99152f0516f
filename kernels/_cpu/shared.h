// A tile, what all tiles of a kind read, and the memory of a thread.
#pragma once
#include <atomic>
#include <cstdint>
#include <vector>

#include "product.h"
#include "program.h"

// What all tiles of a kind read.
struct Shared {
  const Program* program;
  const Kind* kind;
  const Tensor* tensors;
  const Weight* weights;
  const int32_t* schedule;
  std::atomic<bool>* lost;  // an index was out of range
};

struct Span {
  int64_t begin, end;
};

struct Tile {
  int64_t begin, end, state;  // rows of the kind, and what is added for rows of states
  float* later = nullptr;     // if it is given, scatters write here, and `add_later` adds to the children
};

// The memory of a thread.
struct Scratch {
  std::vector<float> arena;
  std::vector<int64_t> offsets;
  std::vector<const float*> rows, bias;
  std::vector<float*> outs;
};
