// Compressed keys, as DeepSeek-V4 has them: one key stands for cmp_ratio tokens. The tokens behind
// the last complete window, fewer than cmp_ratio, are the residual: no key stands for them yet.
#pragma once

#include <c10/core/SymInt.h>
#include <c10/util/ArrayRef.h>

#include <cstdint>
#include <string_view>
#include <vector>

#include "core/sequence_lengths.h"
#include "core/sparse_mode.h"
#include "core/tensor_checks.h"

namespace ascend_attn {

// Expects at least one token per key.
void check_cmp_ratio(std::string_view op, int64_t ratio);
// Expects integers (B), on the device of `query`, if it is given.
void check_residual(std::string_view op, NamedOptionalTensor residual, NamedTensor query,
                    const c10::SymInt& batch);
// Raises unless a residual is in [0, ratio). `place` follows the value in the error.
void check_residual_value(std::string_view op, std::string_view argument, int64_t ratio,
                          int64_t residual, std::string_view place);
// Raises unless the residual that is left out, of padded batches without lengths, is one. Does
// nothing where a size is not known.
void check_derived_residual(std::string_view op, std::string_view argument, int64_t ratio,
                            const c10::SymInt& batch, const c10::SymInt& tokens,
                            const c10::SymInt& keys);
// Returns the residual of every sequence; if the argument is None, that of `tokens`, of which
// `keys` keys are complete. A device makes the host wait.
std::vector<int64_t> read_residuals(std::string_view op, NamedOptionalTensor residual,
                                    int64_t ratio, c10::ArrayRef<int64_t> tokens,
                                    c10::ArrayRef<int64_t> keys);
// The same of sequences whose keys are those of the queries. Empty where nothing depends on them:
// the keys are not compressed, or every query sees all of them.
std::vector<int64_t> read_residuals(std::string_view op, NamedOptionalTensor residual,
                                    int64_t ratio, SparseMode mode,
                                    c10::ArrayRef<Sequence> sequences);

}  // namespace ascend_attn
