#include "tests/kernels_gpu/wire_scenario.h"

#include <bit>
#include <cmath>
#include <limits>

#include "kernels/fp8_rows.h"

namespace jax_ep::testing {
namespace {

Fp8Rows FormatOf(const WireCase& wire) {
  const GroupShape& shape = wire.scenario.shape;
  return {.elem_type = shape.elem_type,
          .hidden = shape.hidden,
          .block = wire.block,
          .scale = wire.scale};
}

// Rows of a matrix whose columns scales may be.
uint64_t RowsOfMatrix(const Scenario& s) {
  const auto tokens = static_cast<uint64_t>(s.num_tokens);
  if (s.layout == Layout::kRankMajor) return tokens;
  return s.layout == Layout::kExpertBatched ? s.shape.num_ranks * tokens
                                            : static_cast<uint64_t>(s.recv_rows);
}

uint64_t ScaleIndex(const WireCase& wire, uint64_t row, uint64_t block) {
  const uint64_t num_blocks = FormatOf(wire).num_blocks();
  if (wire.delivery != Delivery::kScalesInColumns) return row * num_blocks + block;
  const uint64_t rows = RowsOfMatrix(wire.scenario);
  return (row / rows * num_blocks + block) * rows + row % rows;
}

// Both bytes, or elements, NaN: of either sign, docs/semantics.md says.
bool SameElem(ElemType type, const std::byte* a, const std::byte* b) {
  return std::memcmp(a, b, ElemBytes(type)) == 0 ||
         (std::isnan(DecodeElem(type, a)) && std::isnan(DecodeElem(type, b)));
}
bool SameValue(std::byte a, std::byte b) {
  constexpr std::byte kNan{0x7f};
  return a == b || ((a & kNan) == kNan && (b & kNan) == kNan);
}

bool IsUsed(int32_t src) { return src >= 0; }

}  // namespace

uint64_t WireCase::recv_row_bytes() const {
  return delivery == Delivery::kRows ? FormatOf(*this).row_bytes() : scenario.shape.hidden;
}
uint64_t WireCase::scales_row_bytes() const {
  return delivery == Delivery::kRows ? 0 : FormatOf(*this).num_blocks() * ScaleBytes(scale);
}
std::string WireCase::Name() const {
  return scenario.Name() + " block " + std::to_string(block) +
         (scale == Fp8Scale::kF32 ? " f32" : " ue8m0") + " delivery " +
         std::to_string(static_cast<int>(delivery)) + (zero_padding ? "" : " padding undefined") +
         (has_weights ? " weights" : "");
}

std::vector<std::byte> HardRows(const GroupShape& shape, int64_t count, std::mt19937& random) {
  const uint64_t elem_bytes = ElemBytes(shape.elem_type);
  const uint64_t num_elems = static_cast<uint64_t>(count) * shape.hidden;
  std::vector<std::byte> rows(num_elems * elem_bytes);
  constexpr float kSpecial[] = {0.0f,
                                -0.0f,
                                std::numeric_limits<float>::infinity(),
                                -std::numeric_limits<float>::infinity(),
                                std::numeric_limits<float>::quiet_NaN(),
                                1.0e-40f,
                                -6.0e-8f};
  std::uniform_real_distribution<float> uniform(-1, 1);
  const int most_exponent = shape.elem_type == ElemType::kF16 ? 15 : 120;
  int exponent = 0;
  uint32_t kind = 0;
  for (uint64_t i = 0; i < num_elems; ++i) {
    if (i % 16 == 0 && random() % 8 == 0) {
      exponent =
          static_cast<int>(random() % static_cast<uint32_t>(2 * most_exponent + 1)) - most_exponent;
      kind = random() % 16;
    }
    float value = std::ldexp(uniform(random), exponent);
    if (kind == 0) value = 0.0f;                                    // zero blocks
    if (kind == 1) value = std::numeric_limits<float>::infinity();  // none is finite
    if (kind == 2) value = std::ldexp(static_cast<float>(random() % 29), exponent);  // ties
    if (kind == 3) value = static_cast<float>(random() % 897) / 2;  // at the largest
    if (random() % 256 == 0) value = kSpecial[random() % std::size(kSpecial)];
    const auto bits = std::bit_cast<uint32_t>(value);
    std::byte* to = rows.data() + i * elem_bytes;
    if (shape.elem_type == ElemType::kF16) {
      const bool is_finite = std::isfinite(value);
      EncodeElem(ElemType::kF16, is_finite ? static_cast<double>(value) : 0.0, to);
      if (!is_finite) {
        const auto half =
            static_cast<uint16_t>((bits >> 16 & 0x8000) | (std::isnan(value) ? 0x7e00 : 0x7c00));
        std::memcpy(to, &half, sizeof(half));
      }
    } else {
      std::memcpy(to, reinterpret_cast<const std::byte*>(&bits) + (4 - elem_bytes), elem_bytes);
    }
  }
  return rows;
}

WireResult ExpectedOf(const WireCase& wire, const std::vector<HostArrays>& sources,
                      const HostArrays& own) {
  const Scenario& s = wire.scenario;
  const Fp8Rows format = FormatOf(wire);
  const uint64_t scale_bytes = ScaleBytes(wire.scale);
  const auto num_tokens = static_cast<uint64_t>(s.num_tokens);
  const uint64_t codes = s.shape.max_tokens * s.shape.top_k;
  WireResult result;
  result.recv_x.resize(own.recv_src.size() * wire.recv_row_bytes());
  result.recv_scales.resize(own.recv_src.size() * wire.scales_row_bytes());
  std::vector<std::vector<std::byte>> records, rows;
  for (const HostArrays& source : sources) {
    auto& of_source = records.emplace_back(num_tokens * format.record_bytes());
    QuantizeRows(format, num_tokens, source.x.data(), of_source.data());
    auto& back = rows.emplace_back(num_tokens * format.row_bytes());
    DequantizeRows(format, num_tokens, of_source.data(), back.data());
  }
  for (uint64_t row = 0; row < own.recv_src.size(); ++row) {
    if (!IsUsed(own.recv_src[row])) continue;
    const auto src = static_cast<uint64_t>(own.recv_src[row]);
    const uint64_t source = src / codes, token = src % codes / s.shape.top_k;
    const std::byte* record = records[source].data() + token * format.record_bytes();
    const std::byte* elems = wire.delivery == Delivery::kRows
                                 ? rows[source].data() + token * format.row_bytes()
                                 : record;
    std::memcpy(result.recv_x.data() + row * wire.recv_row_bytes(), elems, wire.recv_row_bytes());
    if (wire.delivery == Delivery::kRows) continue;
    for (uint64_t block = 0; block < format.num_blocks(); ++block) {
      std::memcpy(result.recv_scales.data() + ScaleIndex(wire, row, block) * scale_bytes,
                  record + format.hidden + block * scale_bytes, scale_bytes);
    }
  }
  return result;
}

WireArrays OutputsOf(const WireCase& wire, GpuTeam& team, uint32_t rank, const HostArrays& own) {
  const size_t rows = own.recv_src.size();
  return {.recv_x = DeviceArray<std::byte>::Output(team, rank, rows * wire.recv_row_bytes()),
          .recv_scales = DeviceArray<std::byte>::Output(team, rank, rows * wire.scales_row_bytes()),
          .recv_weights = DeviceArray<float>::Output(team, rank, own.recv_weights[0].size())};
}

DispatchParams WireDispatchOf(const WireCase& wire, DeviceArrays& arrays, WireArrays& out) {
  DispatchParams params = DispatchOf(wire.scenario, arrays, 0);
  params.zero_padding = wire.zero_padding;
  params.recv_x = out.recv_x.data();
  params.recv_weights = out.recv_weights.span();
  if (!wire.has_weights) params.weights = {};
  if (!wire.has_weights) params.recv_weights = {};
  params.wire = {.block = wire.block, .scale = wire.scale};
  if (wire.delivery != Delivery::kRows) params.wire.recv_scales = out.recv_scales.data();
  params.wire.scales_in_columns = wire.delivery == Delivery::kScalesInColumns;
  return params;
}

void ExpectWire(const WireCase& wire, const WireArrays& got, const WireResult& expected,
                const HostArrays& own) {
  const GroupShape& shape = wire.scenario.shape;
  const bool are_rows = wire.delivery == Delivery::kRows;
  const uint64_t elem_bytes = are_rows ? ElemBytes(shape.elem_type) : 1;
  EXPECT_TRUE(got.recv_x.HasCanary());
  EXPECT_TRUE(got.recv_scales.HasCanary());
  EXPECT_TRUE(got.recv_weights.HasCanary());
  const std::vector<std::byte> recv_x = got.recv_x.Download();
  const std::vector<std::byte> recv_scales = got.recv_scales.Download();
  const uint64_t scale_bytes = ScaleBytes(wire.scale);
  int num_wrong = 0;
  for (uint64_t row = 0; row < own.recv_src.size() && num_wrong == 0; ++row) {
    if (!wire.zero_padding && !IsUsed(own.recv_src[row])) continue;
    for (uint64_t i = 0; i < shape.hidden; ++i) {
      const uint64_t at = row * wire.recv_row_bytes() + i * elem_bytes;
      const bool is_same = are_rows ? SameElem(shape.elem_type, &recv_x[at], &expected.recv_x[at])
                                    : SameValue(recv_x[at], expected.recv_x[at]);
      if (is_same || num_wrong++ > 0) continue;
      ADD_FAILURE() << "row " << row << " element " << i << ": got byte "
                    << static_cast<int>(recv_x[at]) << ", expected "
                    << static_cast<int>(expected.recv_x[at]);
    }
    for (uint64_t b = 0; !are_rows && b < shape.hidden / wire.block; ++b) {
      const uint64_t at = ScaleIndex(wire, row, b) * scale_bytes;
      if (std::memcmp(&recv_scales[at], &expected.recv_scales[at], scale_bytes) == 0) continue;
      if (num_wrong++ > 0) continue;
      ADD_FAILURE() << "row " << row << " scale " << b;
    }
  }
  if (!wire.has_weights) return;
  const std::vector<float> weights = got.recv_weights.Download();
  EXPECT_EQ(std::memcmp(weights.data(), own.recv_weights[0].data(), weights.size() * sizeof(float)),
            0)
      << "weights";
}

}  // namespace jax_ep::testing
