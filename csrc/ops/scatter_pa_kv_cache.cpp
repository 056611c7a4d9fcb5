#include "ops/scatter_pa_kv_cache.h"

#include <algorithm>
#include <array>

#include "core/device_in_force.h"
#include "core/device_limits.h"
#include "core/error.h"
#include "core/symbolic.h"
#include "core/tensor_checks.h"

namespace ascend_attn {
namespace {

constexpr const char* kName = ScatterPaKvCache::name;

constexpr Devices k950IgnoresModes = k950.before(Cann::v9_1);

constexpr Rule kRank3{"key", "rank 3 (Ascend 950 alone takes rank 4)", kA2A3};
constexpr Rule kRank4Runs{"key", "rank 4 in scatter modes 'Alibi', 'Rope' and 'Omni'",
                          k950.since(Cann::v9_1)};
constexpr Rule kRank4Cache{"key_cache", "rank 4", kA2A3.before(Cann::v9_0)};
constexpr Rule kValue{"value", "a tensor", k950};
constexpr Rule kWholeFractals{"key",
                              "D to be a multiple of 32 bytes in scatter modes 'Rope' and 'Omni'"};
constexpr Rule kHalfRuns{"key", "dtype float16 or bfloat16 in scatter modes 'Rope' and 'Omni'",
                         kA2A3.since(Cann::v9_0)};
constexpr Rule kInt32Slots{"slot_mapping",
                           "dtype int32, which the kernel reads whatever is declared"};
constexpr Rule kSlotsForAll{"key_cache", "num_blocks * block_size >= T", kA2A3};
constexpr Rule kNonemptyAxes{"key", "T, N, D, B and block_size of at least 1",
                             kA2A3.before(Cann::v9_0)};
constexpr Rule kContiguousCache{"key_cache", "a contiguous tensor", kAllDevices.before(Cann::v9_1)};
constexpr Rule kBufferGoesOn{"key",
                             "a buffer that goes on behind the last row in scatter mode 'Nct'",
                             k950.since(Cann::v9_1)};

bool has_window(Scatter scatter) { return scatter >= Scatter::rope; }

// Returns whether the elements of every block are contiguous, with the axes behind the first in
// this order, and no two blocks overlap. Symbols that decide nothing may be so.
bool has_dense_blocks(const at::Tensor& cache, std::initializer_list<int64_t> order) {
  const auto may_hold = [](const c10::SymBool& truth) {
    return !truth.has_hint() || truth.guard_bool(__FILE__, __LINE__);
  };
  c10::SymInt elements = 1;
  for (const auto* axis = order.end(); axis-- != order.begin();) {
    if (!may_equal(cache.sym_size(*axis), 1) && !may_equal(cache.sym_stride(*axis), elements)) {
      return false;
    }
    elements = elements * cache.sym_size(*axis);
  }
  return may_hold(cache.sym_size(0).sym_le(1)) || may_hold(cache.sym_stride(0).sym_ge(elements));
}

void check_name(const char* argument, std::string_view given,
                std::initializer_list<std::string_view> names) {
  std::string expected;
  for (const auto name : names) {
    if (name == given) {
      return;
    }
    expected += c10::str(expected.empty() ? "'" : ", '", name, "'");
  }
  raise(Violation::value, kName, argument,
        c10::str("expected one of ", expected, ", got ", quoted(given)));
}

void check_rank(NamedTensor argument, int64_t rank, bool or_one_more = false) {
  const auto given = argument.tensor.dim();
  if (given != rank && !(or_one_more && given == rank + 1)) [[unlikely]] {
    raise(Violation::value, kName, argument.name,
          c10::str("expected rank ", rank, or_one_more ? c10::str(" or ", rank + 1) : "",
                   ", got shape ", argument.tensor.sym_sizes()),
          Status::shape_inference);
  }
}

void check_cache_dtype(NamedTensor argument) {
  constexpr std::array kDtypes{at::kHalf,   at::kBFloat16, at::kChar,        at::kFloat,
                               at::kByte,   at::kShort,    at::kUInt16,      at::kInt,
                               at::kUInt32, at::kDouble,   at::kFloat8_e5m2, at::kFloat8_e4m3fn};
  const auto dtype = argument.tensor.scalar_type();
  check_type(std::find(kDtypes.begin(), kDtypes.end(), dtype) != kDtypes.end(), kName,
             argument.name,
             "expected a dtype that caches have (float16, bfloat16, int8, float32, uint8, int16, "
             "uint16, int32, uint32, float8_e5m2, float8_e4m3fn, float64), got ",
             dtype_name(dtype));
}

// Checks one call. Every method raises on the first violated rule.
class ScatterRules {
 public:
  explicit ScatterRules(const ScatterPaKvCache& op)
      : op_(op), scatter_(op.scatter()), limits_(ScatterPaKvCache::limits), key_{"key", op.key} {}

  void check_ranks() const;
  void check_dtypes() const;
  void check_modes() const;
  void check_sides() const;
  void check_indices() const;

 private:
  void check_side(NamedTensor source, NamedTensor cache, size_t side) const;
  void check_layout(NamedTensor cache) const;
  // Checks where the rows of "Nct" are; `side` is the place of their stride and offset.
  void check_buffer(NamedTensor source, size_t side) const;
  void check_not_empty(NamedTensor argument, std::string_view size, int64_t axis) const;
  void check_index(NamedTensor argument, c10::SymIntArrayRef expected,
                   std::string_view meaning) const;
  void check_absent(NamedOptionalTensor argument, std::string_view when) const;
  // Returns the tensor, after checking that it is present and has slot_mapping's dtype.
  const at::Tensor& checked(NamedOptionalTensor argument) const;

  int64_t block_size_axis() const { return op_.block_size_axis(scatter_); }

  const ScatterPaKvCache& op_;
  Scatter scatter_;
  DeviceLimits limits_;
  NamedTensor key_;
};

void ScatterRules::check_ranks() const {
  if (op_.key.dim() != 3 && op_.key.dim() != 4) [[unlikely]] {
    raise(Violation::value, kName, "key",
          c10::str("expected rank 3 or 4, got shape ", op_.key.sym_sizes()),
          Status::shape_inference);
  }
  limits_.rule(kRank3, op_.key.dim() == 3, "rank ", op_.key.dim());
  check_present(op_.value || !op_.value_cache, kName, "value",
                "expected a tensor because value_cache is given, got None");
  check_present(op_.value_cache || !op_.value, kName, "value_cache",
                "expected a tensor because value is given, got None");
  const bool or_5 = scatter_ == Scatter::nz_rows;
  check_rank({"key_cache", op_.key_cache}, 4, or_5);
  limits_.rule(kRank4Cache, op_.key_cache.dim() == 4, "rank ", op_.key_cache.dim());
  if (op_.value) {
    check_rank({"value", *op_.value}, op_.key.dim());
    check_rank({"value_cache", *op_.value_cache}, 4, or_5);
  }
}

void ScatterRules::check_dtypes() const {
  const auto key = op_.key.scalar_type();
  check_cache_dtype(key_);
  limits_.dtype("key", key);
  limits_.rule(kHalfRuns, !has_window(scatter_) || key == at::kHalf || key == at::kBFloat16,
               dtype_name(key));
  check_dtype(kName, {"key_cache", op_.key_cache}, key_);
  if (!op_.value) {
    return;
  }
  const NamedTensor value{"value", *op_.value};
  const auto dtype = value.tensor.scalar_type();
  if (dtype != op_.key.scalar_type()) {
    const auto is_half = [](at::ScalarType x) { return x == at::kHalf || x == at::kBFloat16; };
    const bool may_differ = scatter_ == Scatter::nz_rows && is_half(dtype) &&
                            (op_.key.scalar_type() == at::kChar || is_half(op_.key.scalar_type()));
    check_cache_dtype(value);
    limits_.dtype(value.name, dtype);
    if (!may_differ) {
      check_dtype(kName, value, key_);
    }
  }
  check_dtype(kName, {"value_cache", *op_.value_cache}, value);
}

void ScatterRules::check_modes() const {
  check_name("cache_mode", op_.cache_mode, {"Norm", "PA_NZ"});
  check_name("scatter_mode", op_.scatter_mode, {"None", "Nct", "Alibi", "Rope", "Omni"});
  if (op_.key.dim() == 4 && !in_force(k950IgnoresModes)) {
    check_value(op_.cache_mode == "Norm", kName, "cache_mode",
                "expected 'Norm' for a key of rank 4, got '", op_.cache_mode, "'");
    check_value(op_.scatter_mode != "Nct", kName, "scatter_mode",
                "expected 'None', 'Alibi', 'Rope' or 'Omni' for a key of rank 4, got 'Nct'");
  }
  limits_.rule(kRank4Runs, !is_run(scatter_) || op_.key.dim() == 4, "rank ", op_.key.dim(),
               " with scatter_mode '", op_.scatter_mode, "'");
  if (!op_.value) {
    check_implemented(
        scatter_ == Scatter::rows || scatter_ == Scatter::strided_rows, kName, "value",
        "expected a tensor: without values there are the scatter modes 'None' and "
        "'Nct' of cache mode 'Norm' alone, got None with cache_mode '",
        op_.cache_mode, "', scatter_mode '", op_.scatter_mode, "' and key of rank ", op_.key.dim());
    limits_.rule(kValue, false, "None");
  }
  check_value(op_.strides.size() == 2, kName, "strides", "expected 2 numbers, got ", op_.strides);
  check_value(op_.offsets.size() == 2, kName, "offsets", "expected 2 numbers, got ", op_.offsets);
  if (scatter_ == Scatter::strided_rows) {
    check_value(op_.strides[0] > 0 && op_.strides[1] > 0, kName, "strides",
                "expected positive numbers of elements, got ", op_.strides);
    check_value(op_.offsets[0] >= 0 && op_.offsets[1] >= 0, kName, "offsets",
                "expected numbers of elements >= 0, got ", op_.offsets);
  } else {
    // No other mode reads them: passing them would silently write other rows.
    const char* reason = op_.scatter_mode == "Nct"
                             ? "because cache_mode or product overrule scatter_mode 'Nct', got "
                             : "unless scatter_mode is 'Nct', got ";
    check_value(op_.strides[0] == 1 && op_.strides[1] == 1, kName, "strides", "expected [1, 1] ",
                reason, op_.strides);
    check_value(op_.offsets[0] == 0 && op_.offsets[1] == 0, kName, "offsets", "expected [0, 0] ",
                reason, op_.offsets);
  }
}

void ScatterRules::check_sides() const {
  check_side(key_, {"key_cache", op_.key_cache}, 0);
  if (op_.key.dim() == 3) {
    const auto tokens = op_.key.sym_size(0).maybe_as_int();
    const auto slots =
        (op_.key_cache.sym_size(0) * op_.key_cache.sym_size(block_size_axis())).maybe_as_int();
    limits_.rule(kSlotsForAll, !tokens || !slots || *slots >= *tokens, slots.value_or(0),
                 " for T = ", tokens.value_or(0));
  }
  if (!op_.value) {
    return;
  }
  const auto& value = *op_.value;
  const auto key_sizes = op_.key.sym_sizes();
  const auto value_sizes = value.sym_sizes();
  bool same_rows = true;
  for (size_t axis = 0; axis + 1 < key_sizes.size(); ++axis) {
    same_rows = same_rows && same(key_sizes[axis], value_sizes[axis]);
  }
  if (!same_rows) [[unlikely]] {
    auto expected = c10::SymDimVector(key_sizes);
    expected.back() = value_sizes.back();
    raise_shape(kName, {"value", value}, expected,
                value.dim() == 3 ? "(T, N, Dv)" : "(B, S, N, Dv)");
  }
  check_side({"value", value}, {"value_cache", *op_.value_cache}, 1);
  if (has_window(scatter_)) {
    check_shape(kName, {"value", value}, op_.key.sym_sizes(),
                value.dim() == 3 ? "(T, N, D), key's," : "(B, S, N, D), key's,");
  }
}

void ScatterRules::check_side(NamedTensor source, NamedTensor cache, size_t side) const {
  check_device(kName, source, key_);
  check_device(kName, cache, key_);
  const auto sizes = source.tensor.sym_sizes();
  const auto& heads = sizes[sizes.size() - 2];
  const auto& size = sizes.back();
  const auto blocks = op_.key_cache.sym_sizes();
  const auto& num_blocks = blocks[0];
  const auto& block_size = blocks[block_size_axis()];
  const auto itemsize = static_cast<int64_t>(source.tensor.itemsize());
  const auto whole_fractals = [&] {
    return divides(ScatterPaKvCache::kFractalBytes, size * itemsize);
  };
  check_not_empty(source, "T", 0);
  check_not_empty(source, "N", -2);
  check_not_empty(source, "D", -1);
  check_not_empty({cache.name, op_.key_cache}, "block_size", block_size_axis());
  if (scatter_ == Scatter::nz_rows) {
    check_value(whole_fractals(), kName, source.name,
                "expected D to fill whole fractals of 32 bytes in cache mode 'PA_NZ', got shape ",
                source.tensor.sym_sizes());
    const auto last = ScatterPaKvCache::kFractalBytes / itemsize;
    if (op_.key_cache.dim() == 5) {
      check_shape(kName, cache, {{num_blocks, heads, size / last, block_size, last}},
                  "(num_blocks, N, D / L, block_size, L)");
    } else {
      check_shape(kName, cache, {{num_blocks, heads * size / last, block_size, last}},
                  "(num_blocks, N * D / L, block_size, L)");
    }
    limits_.size(cache.name, "block_size", block_size);
  } else if (is_run(scatter_)) {
    check_shape(kName, cache, {{num_blocks, block_size, 1, size}},
                "(num_blocks, block_size, 1, D)");
    limits_.rule(kWholeFractals,
                 op_.key.dim() == 4 || scatter_ == Scatter::alibi || whole_fractals(),
                 "D = ", size);
    if (scatter_ == Scatter::rope) {
      limits_.size(source.name, "D", size);
    }
  } else {
    check_shape(kName, cache, {{num_blocks, block_size, heads, size}},
                "(num_blocks, block_size, N, D)");
  }
  check_layout(cache);
  if (scatter_ == Scatter::strided_rows) {
    check_buffer(source, side);
  }
}

void ScatterRules::check_layout(NamedTensor cache) const {
  const auto& tensor = cache.tensor;
  if (tensor.is_contiguous()) {
    return;
  }
  const bool rows = scatter_ == Scatter::rows || scatter_ == Scatter::strided_rows;
  const bool fits = rows
                        ? has_dense_blocks(tensor, {1, 2, 3}) || has_dense_blocks(tensor, {2, 1, 3})
                    : scatter_ != Scatter::nz_rows ? false
                    : tensor.dim() == 5            ? has_dense_blocks(tensor, {1, 2, 3, 4})
                                                   : has_dense_blocks(tensor, {1, 2, 3});
  check_value(fits, kName, cache.name, "expected a contiguous tensor",
              rows ? ", or one of dense blocks (block_size, N, D) or (N, block_size, D)"
              : scatter_ == Scatter::nz_rows ? ", or one of dense blocks"
                                             : "",
              ", since a copy of it would take the update, got strides ", tensor.sym_strides());
  limits_.rule({cache.name, kContiguousCache.expected, kContiguousCache.devices}, false, "strides ",
               tensor.sym_strides());
}

void ScatterRules::check_buffer(NamedTensor source, size_t side) const {
  const auto& tensor = source.tensor;
  check_value(tensor.is_contiguous(), kName, source.name,
              "expected a contiguous tensor at the start of the buffer that strides and offsets "
              "refer to, got strides ",
              tensor.sym_strides());
  if (!limits_.on(kBufferGoesOn.devices) || !tensor.has_storage()) {
    return;
  }
  const auto tokens = tensor.sym_size(0).maybe_as_int();
  const auto row = (tensor.sym_size(1) * tensor.sym_size(2)).maybe_as_int();
  const auto bytes = tensor.storage().sym_nbytes().maybe_as_int();
  const auto before = tensor.sym_storage_offset().maybe_as_int();
  if (!tokens || !row || !bytes || !before) {
    return;
  }
  // Compared without products, which could overflow.
  const auto left = *bytes / static_cast<int64_t>(tensor.itemsize()) - *before - *row - 1;
  const auto stride = op_.strides[side];
  const auto offset = op_.offsets[side];
  const bool goes_on = *tokens > 0 && *row > 0 && offset <= left &&
                       (*tokens == 1 || stride <= (left - offset) / (*tokens - 1));
  limits_.rule({source.name, kBufferGoesOn.expected, kBufferGoesOn.devices}, goes_on, *tokens,
               " rows of ", *row, " elements in one of ", left + *row + 1);
}

void ScatterRules::check_not_empty(NamedTensor argument, std::string_view size,
                                   int64_t axis) const {
  const auto known = argument.tensor.sym_size(axis).maybe_as_int();
  limits_.rule({argument.name, kNonemptyAxes.expected, kNonemptyAxes.devices}, !known || *known > 0,
               size, " = 0");
}

void ScatterRules::check_indices() const {
  const auto& slots = op_.slot_mapping;
  const NamedOptionalTensor lens{"compress_lens", op_.compress_lens};
  const NamedOptionalTensor offset{"compress_seq_offset", op_.compress_seq_offset};
  const NamedOptionalTensor seq_lens{"seq_lens", op_.seq_lens};
  check_type(slots.scalar_type() == at::kInt || slots.scalar_type() == at::kLong, kName,
             "slot_mapping", "expected dtype int32 or int64, got ",
             dtype_name(slots.scalar_type()));

  if (!is_run(scatter_)) {
    for (const auto& argument : {lens, offset, seq_lens}) {
      check_absent(argument, "with uncompressed rows");
    }
    check_index({"slot_mapping", slots}, {op_.key.sym_size(0)}, "(T)");
    return;
  }

  if (op_.key.dim() == 3) {
    limits_.rule(kInt32Slots, slots.scalar_type() == at::kInt, dtype_name(slots.scalar_type()));
  }
  checked(lens);
  checked(seq_lens);
  if (scatter_ == Scatter::alibi) {
    check_absent(offset, "in scatter mode 'Alibi'");
  } else {
    checked(offset);
  }
  const auto& heads = op_.key.sym_size(-2);
  c10::SymInt batch;
  if (op_.key.dim() == 4) {
    batch = op_.key.sym_size(0);
    check_index({"slot_mapping", slots}, {batch, heads}, "(B, N)");
    check_index({"compress_lens", *op_.compress_lens}, {batch, heads}, "(B, N)");
  } else {
    check_value(op_.seq_lens->dim() == 1, kName, "seq_lens", "expected shape (B), got ",
                op_.seq_lens->sym_sizes());
    batch = op_.seq_lens->sym_size(0);
    check_index({"slot_mapping", slots}, {batch * heads}, "(B * N)");
    check_index({"compress_lens", *op_.compress_lens}, {batch * heads}, "(B * N)");
  }
  check_index({"seq_lens", *op_.seq_lens}, {batch}, "(B)");
  check_not_empty({"seq_lens", *op_.seq_lens}, "B", 0);
  if (op_.compress_seq_offset) {
    check_index({"compress_seq_offset", *op_.compress_seq_offset}, {batch * heads}, "(B * N)");
  }
}

void ScatterRules::check_index(NamedTensor argument, c10::SymIntArrayRef expected,
                               std::string_view meaning) const {
  check_device(kName, argument, key_);
  check_shape(kName, argument, expected, meaning);
  check_value(argument.tensor.is_contiguous(), kName, argument.name,
              "expected a contiguous tensor, got strides ", argument.tensor.sym_strides());
}

void ScatterRules::check_absent(NamedOptionalTensor argument, std::string_view when) const {
  check_value(!argument.tensor, kName, argument.name, "expected None ", when, ", got a tensor");
}

const at::Tensor& ScatterRules::checked(NamedOptionalTensor argument) const {
  check_present(argument.tensor.has_value(), kName, argument.name,
                "expected a tensor because the rows are compressed, got None");
  check_dtype(kName, {argument.name, *argument.tensor}, {"slot_mapping", op_.slot_mapping});
  return *argument.tensor;
}

}  // namespace

const OperatorLimits ScatterPaKvCache::limits{
    name,
    functions,
    {{kA2A3, {at::kHalf, at::kBFloat16, at::kChar}},
     {k950,
      {at::kHalf, at::kBFloat16, at::kChar, at::kFloat, at::kByte, at::kShort, at::kUInt16,
       at::kInt, at::kUInt32, at::kFloat8_e5m2, at::kFloat8_e4m3fn}}},
    {{"block_size",
      "positions per block in cache mode 'PA_NZ'",
      {.min = 0, .max = 65535},
      kA2A3.since(Cann::v9_0)},
     // With heads of 1536 elements, the kernel writes a window's mean beyond a core's memory.
     {"D", "head size in scatter mode 'Rope'", {.min = 0, .max = 1472}, kA2A3}},
    {kRank3, kRank4Runs, kRank4Cache, kValue, kWholeFractals, kHalfRuns, kInt32Slots, kSlotsForAll,
     kNonemptyAxes, kContiguousCache, kBufferGoesOn}};

Scatter ScatterPaKvCache::scatter() const {
  const bool by_name = !in_force(k950IgnoresModes);
  if (key.dim() == 4 && (!by_name || scatter_mode == "None")) {
    return compress_seq_offset ? Scatter::rope : Scatter::alibi;
  }
  if (!by_name) {
    return Scatter::rows;
  }
  if (cache_mode == "PA_NZ") {
    return Scatter::nz_rows;
  }
  return scatter_mode == "Nct"     ? Scatter::strided_rows
         : scatter_mode == "Alibi" ? Scatter::alibi
         : scatter_mode == "Rope"  ? Scatter::rope
         : scatter_mode == "Omni"  ? Scatter::omni
                                   : Scatter::rows;
}

ScatterPaKvCache::Outputs ScatterPaKvCache::check_and_allocate() const {
  const ScatterRules rules(*this);
  rules.check_ranks();
  rules.check_modes();
  rules.check_dtypes();
  rules.check_sides();
  rules.check_indices();
  return {};
}

}  // namespace ascend_attn
