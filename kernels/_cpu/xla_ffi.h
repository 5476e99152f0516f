// The part of XLA's FFI that the engine uses: a handler receives a call frame with its arguments and results. The layout is that
// of xla/ffi/api/c_api.h, which every jaxlib ships, and which is stable (API 0.x: structs only grow at their end). It is written
// out here so that the library can be compiled without jaxlib.
#pragma once
#include <cstddef>
#include <cstdint>

namespace xla_ffi {

constexpr int METADATA = 1, EXECUTE = 3, INVALID_ARGUMENT = 3, RESOURCE_EXHAUSTED = 8, ARRAY = 1;
constexpr int PRED = 1, S32 = 4, F32 = 11;  // of the types of elements

struct Extension {
  size_t struct_size;
  int type;
  Extension* next;
};

struct Error;

struct ErrorCreate {
  size_t struct_size;
  Extension* extension_start;
  const char* message;
  int code;
};

struct Version {
  size_t struct_size;
  Extension* extension_start;
  int major_version, minor_version;
};

struct Api {
  size_t struct_size;
  Extension* extension_start;
  Version version;
  void* internal;
  Error* (*error_create)(ErrorCreate*);
};

struct Buffer {
  size_t struct_size;
  Extension* extension_start;
  int dtype;
  void* data;
  int64_t rank;
  int64_t* dims;
};

struct Buffers {
  size_t struct_size;
  Extension* extension_start;
  int64_t size;
  int* types;
  Buffer** of;
};

struct Array {
  int dtype;
  size_t size;
  void* data;
};

struct Attrs {
  size_t struct_size;
  Extension* extension_start;
  int64_t size;
  int* types;
  void** names;
  void** attrs;
};

struct CallFrame {
  size_t struct_size;
  Extension* extension_start;
  const Api* api;
  void* context;
  int stage;
  Buffers args, rets;
  Attrs attrs;
};

struct Metadata {
  size_t struct_size;
  Version version;
  uint32_t traits;
  int64_t state_type;
};

struct MetadataExtension {
  Extension base;
  Metadata* metadata;
};

}  // namespace xla_ffi
