#include "ops/scatter_pa_kv_cache.h"

#include <algorithm>
#include <array>

#include "core/error.h"
#include "core/limits.h"
#include "core/symbolic.h"
#include "core/tensor_checks.h"

namespace ascend_attn {
namespace {

constexpr const char* kName = ScatterPaKvCache::name;

constexpr Devices kTrainingProducts = on(Product::A2, Product::A3);
constexpr Devices k950 = on(Product::P950);

constexpr Rule kRank3{"key", "rank 3 (Ascend 950 alone takes rank 4)", kTrainingProducts};
constexpr Rule kValue{"value", "a tensor", k950};
constexpr Rule kWholeFractals{"key",
                              "D to be a multiple of 32 bytes in scatter modes 'Rope' and 'Omni'"};
constexpr Rule kInt32Slots{"slot_mapping",
                           "dtype int32, which the kernel reads whatever is declared"};

bool is_run(Scatter scatter) { return scatter >= Scatter::alibi; }

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
        c10::str("expected one of ", expected, ", got '", given, "'"));
}

void check_rank(NamedTensor argument, int64_t rank) {
  if (argument.tensor.dim() != rank) [[unlikely]] {
    raise(Violation::value, kName, argument.name,
          c10::str("expected rank ", rank, ", got shape ", argument.tensor.sym_sizes()),
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
  void check_side(NamedTensor source, NamedTensor cache) const;
  void check_index(NamedTensor argument, c10::SymIntArrayRef expected,
                   std::string_view meaning) const;
  void check_absent(NamedOptionalTensor argument, std::string_view when) const;
  // Returns the tensor, after checking that it is present and has slot_mapping's dtype.
  const at::Tensor& checked(NamedOptionalTensor argument) const;

  int64_t block_size_axis() const { return scatter_ == Scatter::nz_rows ? 2 : 1; }

  const ScatterPaKvCache& op_;
  Scatter scatter_;
  LimitsCheck limits_;
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
  check_rank({"key_cache", op_.key_cache}, 4);
  if (op_.value) {
    check_rank({"value", *op_.value}, op_.key.dim());
    check_rank({"value_cache", *op_.value_cache}, 4);
  }
}

void ScatterRules::check_dtypes() const {
  check_cache_dtype(key_);
  limits_.dtype("key", op_.key.scalar_type());
  check_dtype(kName, {"key_cache", op_.key_cache}, key_);
  if (!op_.value) {
    return;
  }
  const NamedTensor value{"value", *op_.value};
  const auto dtype = value.tensor.scalar_type();
  if (dtype != op_.key.scalar_type()) {
    const bool beside_int8_key = scatter_ == Scatter::nz_rows &&
                                 op_.key.scalar_type() == at::kChar &&
                                 (dtype == at::kHalf || dtype == at::kBFloat16);
    check_cache_dtype(value);
    limits_.dtype(value.name, dtype);
    if (!beside_int8_key) {
      check_dtype(kName, value, key_);
    }
  }
  check_dtype(kName, {"value_cache", *op_.value_cache}, value);
}

void ScatterRules::check_modes() const {
  check_name("cache_mode", op_.cache_mode, {"Norm", "PA_NZ"});
  check_name("scatter_mode", op_.scatter_mode, {"None", "Nct", "Alibi", "Rope", "Omni"});
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
  } else if (op_.scatter_mode == "Nct") {
    // Another mode applies and ignores strides and offsets: passing them would silently write other
    // rows.
    check_value(op_.strides[0] == 1 && op_.strides[1] == 1, kName, "strides",
                "expected [1, 1] because cache_mode or product overrule scatter_mode 'Nct', got ",
                op_.strides);
    check_value(op_.offsets[0] == 0 && op_.offsets[1] == 0, kName, "offsets",
                "expected [0, 0] because cache_mode or product overrule scatter_mode 'Nct', got ",
                op_.offsets);
  }
}

void ScatterRules::check_sides() const {
  check_side(key_, {"key_cache", op_.key_cache});
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
  check_side({"value", value}, {"value_cache", *op_.value_cache});
  if (scatter_ == Scatter::rope || scatter_ == Scatter::omni) {
    check_shape(kName, {"value", value}, op_.key.sym_sizes(),
                value.dim() == 3 ? "(T, N, D), key's," : "(B, S, N, D), key's,");
  }
}

void ScatterRules::check_side(NamedTensor source, NamedTensor cache) const {
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
  if (scatter_ == Scatter::nz_rows) {
    check_value(whole_fractals(), kName, source.name,
                "expected D to fill whole fractals of 32 bytes in cache mode 'PA_NZ', got shape ",
                source.tensor.sym_sizes());
    const auto last = ScatterPaKvCache::kFractalBytes / itemsize;
    check_shape(kName, cache, {{num_blocks, heads * size / last, block_size, last}},
                "(num_blocks, N * D / L, block_size, L)");
  } else if (is_run(scatter_)) {
    check_shape(kName, cache, {{num_blocks, block_size, 1, size}},
                "(num_blocks, block_size, 1, D)");
    limits_.rule(kWholeFractals,
                 op_.key.dim() == 4 || scatter_ == Scatter::alibi || whole_fractals(),
                 "D = ", size);
  } else {
    check_shape(kName, cache, {{num_blocks, block_size, heads, size}},
                "(num_blocks, block_size, N, D)");
  }
  check_value(cache.tensor.is_contiguous(), kName, cache.name,
              "expected a contiguous tensor, since a copy of it would take the update, got "
              "strides ",
              cache.tensor.sym_strides());
  if (scatter_ == Scatter::strided_rows) {
    check_value(source.tensor.is_contiguous(), kName, source.name,
                "expected a contiguous tensor at the start of the buffer that strides and offsets "
                "refer to, got strides ",
                source.tensor.sym_strides());
  }
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
    {{kTrainingProducts, {at::kHalf, at::kBFloat16, at::kChar}},
     {k950,
      {at::kHalf, at::kBFloat16, at::kChar, at::kFloat, at::kByte, at::kShort, at::kUInt16,
       at::kInt, at::kUInt32, at::kFloat8_e5m2, at::kFloat8_e4m3fn}}},
    /*limits=*/{},
    {kRank3, kValue, kWholeFractals, kInt32Slots}};

Scatter ScatterPaKvCache::scatter() const {
  if (key.dim() == 4) {
    return compress_seq_offset ? Scatter::rope : Scatter::alibi;
  }
  if (in_force(k950)) {
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
