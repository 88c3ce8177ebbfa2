#include "xla_ffi/quantize.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "kernels/cpu/huge_pages.h"
#include "kernels/fp8_rows.h"
#include "xla/ffi/api/ffi.h"
#include "xla_ffi/error.h"

namespace jax_ep {
namespace {

namespace ffi = xla::ffi;

constexpr int64_t kRowsAtOnce = 64;  // a hundred microseconds of one thread, for rows of 8,192

// Runs body(begin, end) over all rows, on this thread and on those of `pool` that have time. Waits
// for rows that another thread has begun only, so it ends although all of the pool waits.
template <typename Body>
void ForRows(ffi::ThreadPool& pool, int64_t num_rows, const Body& body) {
  struct Work {
    std::atomic<int64_t> next{0};
    std::atomic<int64_t> num_done{0};
  };
  const auto work = std::make_shared<Work>();  // outlives tasks that come too late
  // `body` lives as long as rows are left.
  auto run = [work, num_rows, &body] {
    for (;;) {
      const int64_t begin = work->next.fetch_add(kRowsAtOnce, std::memory_order_relaxed);
      if (begin >= num_rows) return;
      const int64_t end = std::min(begin + kRowsAtOnce, num_rows);
      body(begin, end);
      if (work->num_done.fetch_add(end - begin, std::memory_order_release) + end - begin ==
          num_rows) {
        work->num_done.notify_all();
      }
    }
  };
  const int64_t num_pieces = (num_rows + kRowsAtOnce - 1) / kRowsAtOnce;
  const int64_t num_helpers = std::min(pool.num_threads(), num_pieces) - 1;
  for (int64_t i = 0; i < num_helpers; ++i) {
    auto task = run;
    pool.Schedule(std::move(task));
  }
  run();
  for (int64_t done; (done = work->num_done.load(std::memory_order_acquire)) < num_rows;) {
    work->num_done.wait(done, std::memory_order_acquire);
  }
}

// What create_group has checked: an attribute would make programs of processes differ.
bool UsesHugePages() {
  static const char* const value = std::getenv("JAX_EP_HUGE_PAGES");
  return value == nullptr || std::string_view(value) != "0";
}

struct Shapes {
  Fp8Rows format;
  int64_t num_rows = 0;
};

std::optional<ElemType> ElemTypeOf(ffi::DataType type) {
  switch (type) {
    case ffi::DataType::F32:
      return ElemType::kF32;
    case ffi::DataType::BF16:
      return ElemType::kBf16;
    case ffi::DataType::F16:
      return ElemType::kF16;
    default:
      return std::nullopt;
  }
}

// Of rows [..., H] and records u8[..., B]. Python has checked them; this keeps a hand-made program
// from writing out of bounds.
Result<Shapes> ShapesOf(const char* operation, const ffi::AnyBuffer& rows,
                        const ffi::AnyBuffer& records, int64_t block, int64_t scale) {
  const auto wrong = [&](const std::string& what) {
    return InvalidArgument(std::string(operation) + ": " + what);
  };
  const std::optional<ElemType> type = ElemTypeOf(rows.element_type());
  if (!type || records.element_type() != ffi::DataType::U8) {
    return wrong("got rows and records of types " +
                 std::to_string(static_cast<int>(rows.element_type())) + " and " +
                 std::to_string(static_cast<int>(records.element_type())) +
                 ", expected floats and bytes");
  }
  if (rows.dimensions().size() == 0 || records.dimensions().size() == 0 || block < 1 ||
      rows.dimensions().back() % block != 0 || scale < 0 || scale > 1) {
    return wrong("got a block of " + std::to_string(block) + " and scales of kind " +
                 std::to_string(scale) + ", expected a divisor of hidden, and 0 or 1");
  }
  Shapes shapes{.format = {.elem_type = *type,
                           .hidden = static_cast<uint64_t>(rows.dimensions().back()),
                           .block = static_cast<uint64_t>(block),
                           .scale = static_cast<Fp8Scale>(scale)}};
  const auto hidden = static_cast<int64_t>(shapes.format.hidden);
  shapes.num_rows = hidden == 0 ? 0 : static_cast<int64_t>(rows.element_count()) / hidden;
  const auto expected = shapes.num_rows * static_cast<int64_t>(shapes.format.record_bytes());
  if (static_cast<int64_t>(records.element_count()) != expected) {
    return wrong("got records of " + std::to_string(records.element_count()) + " bytes, expected " +
                 std::to_string(expected));
  }
  return shapes;
}

ffi::Error Quantize(ffi::ThreadPool pool, ffi::AnyBuffer rows, ffi::Result<ffi::AnyBuffer> records,
                    int64_t block, int64_t scale) {
  const Result<Shapes> shapes = ShapesOf("quantize", rows, *records, block, scale);
  if (!shapes.ok()) return ToFfiError(shapes.status());
  const Fp8Rows& format = shapes->format;
  const auto* from = static_cast<const std::byte*>(rows.untyped_data());
  auto* to = static_cast<std::byte*>(records->untyped_data());
  if (UsesHugePages()) PreferHugePages(to, records->size_bytes());
  ForRows(pool, shapes->num_rows, [&](int64_t begin, int64_t end) {
    const auto first = static_cast<uint64_t>(begin);
    QuantizeRows(format, static_cast<uint64_t>(end - begin), from + first * format.row_bytes(),
                 to + first * format.record_bytes());
  });
  return ffi::Error::Success();
}

ffi::Error Dequantize(ffi::ThreadPool pool, ffi::AnyBuffer records,
                      ffi::Result<ffi::AnyBuffer> rows, int64_t block, int64_t scale) {
  const Result<Shapes> shapes = ShapesOf("dequantize", *rows, records, block, scale);
  if (!shapes.ok()) return ToFfiError(shapes.status());
  const Fp8Rows& format = shapes->format;
  const auto* from = static_cast<const std::byte*>(records.untyped_data());
  auto* to = static_cast<std::byte*>(rows->untyped_data());
  if (UsesHugePages()) PreferHugePages(to, rows->size_bytes());
  ForRows(pool, shapes->num_rows, [&](int64_t begin, int64_t end) {
    const auto first = static_cast<uint64_t>(begin);
    DequantizeRows(format, static_cast<uint64_t>(end - begin), from + first * format.record_bytes(),
                   to + first * format.row_bytes());
  });
  return ffi::Error::Success();
}

XLA_FFI_DEFINE_HANDLER(kQuantize, Quantize,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::ThreadPool>()
                           .Arg<ffi::AnyBuffer>()
                           .Ret<ffi::AnyBuffer>()
                           .Attr<int64_t>("block")
                           .Attr<int64_t>("scale"));
XLA_FFI_DEFINE_HANDLER(kDequantize, Dequantize,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::ThreadPool>()
                           .Arg<ffi::AnyBuffer>()
                           .Ret<ffi::AnyBuffer>()
                           .Attr<int64_t>("block")
                           .Attr<int64_t>("scale"));

}  // namespace

std::span<const HandlerRegistration> QuantizeHandlers() {
  static const std::array<HandlerRegistration, 2> kHandlers{{
      {"jax_ep_quantize", nullptr, kQuantize},
      {"jax_ep_dequantize", nullptr, kDequantize},
  }};
  return kHandlers;
}

}  // namespace jax_ep
