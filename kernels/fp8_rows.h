// Rows as FP8 records and back (docs/semantics.md, "FP8 rows"): H values of float8_e4m3fn, the
// scales of their blocks, zeros up to a multiple of 32 bytes. The results are the same bits on
// every machine, also where f32 subnormals are flushed, as XLA's threads do. That holds for records
// that QuantizeRows wrote: their scales are 2^-109 or more. In those of others a scale, or an
// element times its scale, of less than 2^-126 may become zero.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/layout.h"

namespace jax_ep {

struct Fp8Rows {
  ElemType elem_type = ElemType::kF32;  // of the rows
  uint64_t hidden = 0;                  // a multiple of block
  uint64_t block = 1;
  Fp8Scale scale = Fp8Scale::kF32;

  uint64_t row_bytes() const { return hidden * ElemBytes(elem_type); }
  uint64_t num_blocks() const { return hidden / block; }
  uint64_t record_bytes() const { return RecordBytes(hidden, block, scale); }
};

// Of `num_rows` rows that follow each other; records need no alignment.
void QuantizeRows(const Fp8Rows& format, uint64_t num_rows, const std::byte* rows,
                  std::byte* records);
void DequantizeRows(const Fp8Rows& format, uint64_t num_rows, const std::byte* records,
                    std::byte* rows);

}  // namespace jax_ep
