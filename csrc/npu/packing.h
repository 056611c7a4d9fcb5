// A padded batch, layout BSND with lengths, for functions of CANN that ignore lengths there: its
// tokens without the padding, one sequence behind the other as in layout TND.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "core/layout.h"
#include "core/sequence_lengths.h"

namespace ascend_attn::aclnn {

// Reads the lengths of a call from the device, which it waits for; a graph that is being captured
// cannot. One of the two tensors may be missing in BSND.
std::vector<Sequence> sequences_on_host(const char* op, Layout layout, const at::Tensor& query,
                                        const at::Tensor& key, const Lengths& query_lengths,
                                        const Lengths& key_lengths);

// The tokens of a tensor's first axes: of the queries, or of the keys.
using TokensOf = int64_t Sequence::*;
inline constexpr TokensOf kQueries = &Sequence::queries;
inline constexpr TokensOf kKeys = &Sequence::keys;

class Packing {
 public:
  // Sequences of a call in BSND, whose query and key have these tokens per batch. Sequences
  // without queries or keys are dropped: they change no result, and some kernels divide by their
  // length.
  Packing(const std::vector<Sequence>& sequences, const at::Tensor& query, const at::Tensor& key);

  // Whether there is no padding: the call is one without lengths.
  bool complete() const { return complete_; }

  // Replace tensors of a call, those that are given: (B, S, ...) by (T, ...), statistics (B, 1, S1,
  // ...) by (1, T1, ...), and numbers of each batch by those of the sequences that are not dropped.
  template <typename... Tensors>
  void pack(TokensOf tokens, Tensors&... tensors) const {
    (replace(tensors, [&](const at::Tensor& padded) { return packed(tokens, padded); }), ...);
  }
  void pack_statistics(at::Tensor& max, at::Tensor& sum) const;
  void pack_numbers(std::optional<at::Tensor>& of_batches) const;
  // Sets the layout, and the cumulative lengths, of a call or of its options.
  template <typename Options>
  void pack_lengths(Options& options, const at::Tensor& query) const {
    options.layout = LayoutArgument("TND");
    set_lengths(options.actual_seq_lengths_query, query_ends_, query);
    set_lengths(options.actual_seq_lengths_key, key_ends_, query);
  }

  // Launches the call that `pack` makes of a copy, unless no sequence is left, and writes its
  // results into `outputs`, whose other rows the caller has filled. `axes`: the tokens of each
  // output, or null if it has none.
  template <typename Op, typename Pack, size_t count>
  void launch(const Op& op, const typename Op::Outputs& outputs, const Pack& pack,
              void (*launch)(const std::type_identity_t<Op>&, const typename Op::Outputs&),
              const TokensOf (&axes)[count]) const {
    if (sequences_.empty()) {
      return;
    }
    auto packed = op;
    pack(packed);
    const auto results = packed.check_and_allocate();
    launch(packed, results);
    [&]<size_t... i>(std::index_sequence<i...>) {
      (unpack(axes[i], std::get<i>(results), std::get<i>(outputs)), ...);
    }(std::make_index_sequence<count>());
  }

 private:
  at::Tensor packed(TokensOf tokens, const at::Tensor& padded) const;
  void unpack(TokensOf tokens, const at::Tensor& packed, const at::Tensor& padded) const;
  template <typename Pack>
  static void replace(at::Tensor& tensor, const Pack& pack) {
    tensor = pack(tensor);
  }
  template <typename Pack>
  static void replace(std::optional<at::Tensor>& tensor, const Pack& pack) {
    if (tensor) {
      tensor = pack(*tensor);
    }
  }
  static void set_lengths(Lengths& lengths, const std::vector<int32_t>& ends, const at::Tensor&) {
    lengths = std::vector<int64_t>(ends.begin(), ends.end());
  }
  static void set_lengths(DeviceLengths& lengths, const std::vector<int32_t>& ends,
                          const at::Tensor& query);

  std::vector<Sequence> sequences_;
  std::vector<int32_t> query_ends_, key_ends_;
  bool complete_ = true;
};

}  // namespace ascend_attn::aclnn
