#include "ops/compressed_keys.h"

#include <limits>

#include "core/error.h"

namespace ascend_attn {

void check_cmp_ratio(std::string_view op, int64_t ratio) {
  constexpr int64_t kLargest = std::numeric_limits<int32_t>::max();
  check_value(ratio >= 1 && ratio <= kLargest, op, "cmp_ratio", "expected 1 to ", kLargest,
              " tokens per key, got ", ratio);
}

void check_residual(std::string_view op, NamedOptionalTensor residual, NamedTensor query,
                    const c10::SymInt& batch) {
  if (!residual.tensor) {
    return;
  }
  const NamedTensor given{residual.name, *residual.tensor};
  check_device(op, given, query);
  check_integers(op, given);
  check_shape(op, given, {{batch}}, "(B)");
}

void check_residual_value(std::string_view op, std::string_view argument, int64_t ratio,
                          int64_t residual, std::string_view place) {
  check_value(residual >= 0 && residual < ratio, op, argument,
              "expected values in [0, cmp_ratio = ", ratio, "), got ", residual, place);
}

void check_derived_residual(std::string_view op, std::string_view argument, int64_t ratio,
                            const c10::SymInt& batch, const c10::SymInt& tokens,
                            const c10::SymInt& keys) {
  const auto known_tokens = tokens.maybe_as_int();
  const auto known_keys = keys.maybe_as_int();
  if (batch.maybe_as_int().value_or(0) > 0 && known_tokens && known_keys) {
    read_residuals(op, {argument, std::nullopt}, ratio, *known_tokens, *known_keys);
  }
}

std::vector<int64_t> read_residuals(std::string_view op, NamedOptionalTensor residual,
                                    int64_t ratio, c10::ArrayRef<int64_t> tokens,
                                    c10::ArrayRef<int64_t> keys) {
  std::vector<int64_t> values;
  if (residual.tensor) {
    const auto dense = on_host(*residual.tensor).contiguous();
    const auto* data = dense.const_data_ptr<int32_t>();
    values.assign(data, data + dense.numel());
    for (size_t b = 0; b < values.size(); ++b) {
      check_residual_value(op, residual.name, ratio, values[b], c10::str(" at ", b));
    }
    return values;
  }
  for (size_t b = 0; b < keys.size(); ++b) {
    values.push_back(tokens[b] - keys[b] * ratio);
    check_residual_value(
        op, residual.name, ratio, values[b],
        c10::str(" at ", b, ", which None derives from ", tokens[b], " tokens and ", keys[b],
                 " keys; pass the residual of all tokens that the keys stand for"));
  }
  return values;
}

std::vector<int64_t> read_residuals(std::string_view op, NamedOptionalTensor residual,
                                    int64_t ratio, SparseMode mode,
                                    c10::ArrayRef<Sequence> sequences) {
  if (!residual.tensor && (ratio == 1 || mode != SparseMode::right_down_causal)) {
    return {};
  }
  std::vector<int64_t> tokens;
  std::vector<int64_t> keys;
  for (const auto& sequence : sequences) {
    tokens.push_back(sequence.queries);
    keys.push_back(sequence.keys);
  }
  return read_residuals(op, residual, ratio, tokens, keys);
}

}  // namespace ascend_attn
