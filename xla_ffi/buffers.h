// XLA's buffers as the kernels' parameters, with their sizes checked. The same for every platform;
// data is never touched.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>

#include "kernels/launch.h"
#include "xla/ffi/api/ffi.h"

namespace jax_ep {

using Arg = xla::ffi::AnyBuffer;
using Ret = xla::ffi::Result<xla::ffi::AnyBuffer>;

inline constexpr xla::ffi::DataType kI32 = xla::ffi::DataType::S32;
inline constexpr xla::ffi::DataType kF32 = xla::ffi::DataType::F32;

template <typename T>
std::span<const T> In(const Arg& arg) {
  return {static_cast<const T*>(arg.untyped_data()), arg.element_count()};
}
template <typename T>
std::span<T> Out(Ret& ret) {
  return {static_cast<T*>(ret->untyped_data()), ret->element_count()};
}

// Collects the first mismatch between a buffer and what the operation needs. Python has checked
// shapes with better words; this keeps a hand-made or stale program from writing out of bounds.
class Checker {
 public:
  explicit Checker(const char* operation) : operation_(operation) {}

  void Require(const char* name, const Arg& arg, xla::ffi::DataType type, int64_t num_elements,
               bool may_be_absent = false) {
    RequireSize(name, arg.element_count(), arg.element_type(), type, num_elements, may_be_absent);
  }
  void Require(const char* name, Ret& ret, xla::ffi::DataType type, int64_t num_elements,
               bool may_be_absent = false) {
    RequireSize(name, ret->element_count(), ret->element_type(), type, num_elements, may_be_absent);
  }
  // Rows of the shape's elements, or opaque ones, u8, of as many bytes; or none.
  void RequireRows(const char* name, const Arg& arg, const GroupShape& shape, int64_t num_rows) {
    RequireRows(name, arg.element_count(), arg.element_type(), shape, num_rows);
  }
  void RequireRows(const char* name, Ret& ret, const GroupShape& shape, int64_t num_rows) {
    RequireRows(name, ret->element_count(), ret->element_type(), shape, num_rows);
  }
  // `message()` is called for a failure only: strings are dear beside a call of low latency.
  template <typename Message>
  void Require(bool condition, Message&& message) {
    if (!condition && status_.ok()) {
      status_ = InvalidArgument(std::string(operation_) + ": " + message());
    }
  }
  const Status& status() const { return status_; }

 private:
  void RequireSize(const char* name, size_t have, xla::ffi::DataType have_type,
                   xla::ffi::DataType type, int64_t num_elements, bool may_be_absent);
  void RequireRows(const char* name, size_t have, xla::ffi::DataType have_type,
                   const GroupShape& shape, int64_t num_rows);

  const char* operation_;
  Status status_;
};

// Of a call, as ShapeOfCall takes them.
using Sizes = xla::ffi::Span<const int64_t>;

// What every call of one operation is asked for, besides its buffers.
struct CallKind {
  Mode mode;
  Layout layout;
  uint64_t site;            // PlanParams.site
  bool counts_load = true;  // PlanParams.counts_load
};

inline CallKind Kind(int64_t module, int64_t mode, int64_t layout) {
  return {static_cast<Mode>(mode), static_cast<Layout>(layout), static_cast<uint64_t>(module)};
}

inline int64_t RowsOf(const Arg& recv_src) {
  return static_cast<int64_t>(recv_src.element_count());
}

// T from a [T, K] array.
inline int64_t TokensOf(const Arg& pairs, const GroupShape& shape) {
  return static_cast<int64_t>(pairs.element_count() / shape.top_k);
}

// Rows of the receive side: `rows` in expert_major, fixed by T in the other layouts.
int64_t ExpectedRows(const GroupShape& shape, Layout layout, int64_t num_tokens, int64_t rows);

Result<PlanParams> MakePlan(const CallKind& call, const GroupShape& shape, Checker& check,
                            const Arg& topk_idx, std::array<Ret*, 9> rets);

// The same with all results in one array: in the order of Python's PlanArrays, each at a multiple
// of kPackedAlign elements, recv_src of `recv_rows` elements.
inline constexpr uint64_t kPackedAlign = 32;
Result<PlanParams> MakePackedPlan(const CallKind& call, const GroupShape& shape, Checker& check,
                                  const Arg& topk_idx, int64_t recv_rows, Ret& packed);

// Fields common to whole calls and halves; a null field is not part of the call, a zero-element
// buffer is absent.
struct DispatchBuffers {
  const Arg* x = nullptr;
  const Arg* weights = nullptr;
  const Arg* send_slot = nullptr;
  const Arg* recv_src = nullptr;
  const Arg* recv_topk_idx = nullptr;
  const Arg* y = nullptr;
  const Arg* row_weights = nullptr;
  Ret* recv_x = nullptr;
  Ret* recv_weights = nullptr;
  Ret* recv_dots = nullptr;
};

Result<DispatchParams> MakeDispatch(const CallKind& call, const GroupShape& shape, Checker& check,
                                    int64_t num_tokens, int64_t rows, int64_t pad,
                                    const DispatchBuffers& buffers);

struct CombineBuffers {
  const Arg* y = nullptr;
  const Arg* row_weights = nullptr;
  const Arg* pair_scalars = nullptr;
  const Arg* send_slot = nullptr;  // always there
  const Arg* recv_src = nullptr;   // always there
  Ret* out = nullptr;
  Ret* pair_scalars_out = nullptr;
};

Result<CombineParams> MakeCombine(const CallKind& call, const GroupShape& shape, Checker& check,
                                  const CombineBuffers& buffers);

}  // namespace jax_ep
