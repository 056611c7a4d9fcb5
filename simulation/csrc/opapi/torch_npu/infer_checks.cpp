// Checks of the outputs and lists of FusedInferAttentionScore, as CANN documents them.
#include <algorithm>

#include "opapi/torch_npu/infer_attention.h"

namespace cann_sim {
namespace {

using Sizes = std::vector<int64_t>;

// The sizes of a tensor with heads of `size` in a layout.
Sizes sizes_in(std::string_view layout, int64_t batch, int64_t tokens, int64_t heads,
               int64_t size) {
  if (layout == "BSH") {
    return {batch, tokens, heads * size};
  }
  if (layout == "BSND") {
    return {batch, tokens, heads, size};
  }
  if (layout == "BNSD") {
    return {batch, heads, tokens, size};
  }
  if (layout == "NBSD") {
    return {heads, batch, tokens, size};
  }
  return layout == "TND" ? Sizes{tokens, heads, size} : Sizes{heads, tokens, size};
}

void check_outputs(const Call& call, const InferAttention& given) {
  const auto split = given.layout.find('_');
  const auto layout = given.layout.substr(0, split);
  const auto out_layout = split == std::string::npos ? layout : given.layout.substr(split + 1);
  const bool packed = is_packed(layout);
  const auto query = heads_first(given.query, layout, given.heads);
  const int64_t batch = query.size(0);
  const int64_t tokens = query.size(2);
  const auto& out = call.get<TensorView>("attentionOut");
  const bool paged = given.block_table.has_value();
  // The value's heads: in pages of rows they share an axis, in fractal ones they are divided.
  const auto& value = given.value.sizes();
  const int64_t value_size = (paged ? value.size() == 3 : layout == "BSH")
                                 ? value.back() / given.key_heads
                             : paged && value.size() == 5 ? value[2] * value[4]
                                                          : value.back();
  TORCH_CHECK(out.sizes == sizes_in(out_layout, batch, tokens, given.heads, value_size),
              "attentionOut: shape ", out.sizes);
  const bool quantized = call.find<TensorView>("quantScale2Optional") != nullptr;
  TORCH_CHECK(quantized ? out.dtype == ACL_INT8 : out.dtype == call.get<TensorView>("query").dtype,
              "attentionOut: dtype ", out.dtype);
  if (!call.get<bool>("softmaxLseFlag")) {
    return;
  }
  const auto* lse = call.find<TensorView>("softmaxLse");
  TORCH_CHECK(lse, "softmaxLse: nullptr beside softmaxLseFlag");
  TORCH_CHECK(lse->dtype == ACL_FLOAT, "softmaxLse: dtype ", lse->dtype);
  TORCH_CHECK(
      lse->sizes == (packed ? Sizes{tokens, given.heads, 1} : Sizes{batch, given.heads, tokens, 1}),
      "softmaxLse: shape ", lse->sizes);
}

void check_ends(const Sizes& ends, int64_t tokens, std::string_view name) {
  TORCH_CHECK(std::ranges::is_sorted(ends) && ends.front() >= 0, name, ": not ascending: ", ends);
  TORCH_CHECK(ends.back() == tokens, name, ": ends with ", ends.back(), ", not with T ", tokens);
}

void check_counts(const InferAttention::Lengths& lengths, int64_t batch, std::string_view name) {
  const auto count = lengths ? static_cast<int64_t>(lengths->size()) : 0;
  TORCH_CHECK(count <= 1 || count >= batch, name, ": ", count, " lengths for ", batch, " batches");
}

void check_lists(const InferAttention& given) {
  const auto layout = given.layout.substr(0, given.layout.find('_'));
  const auto query = heads_first(given.query, layout, given.heads);
  TORCH_CHECK(!given.block_table || given.key_lengths,
              "actualSeqLengthsKv: nullptr beside blockTable");
  if (!is_packed(layout)) {
    check_counts(given.query_lengths, query.size(0), "actualSeqLengths");
    check_counts(given.key_lengths, query.size(0), "actualSeqLengthsKv");
    return;
  }
  TORCH_CHECK(given.query_lengths && given.key_lengths, "actualSeqLengths: nullptr in layout ",
              given.layout);
  check_ends(*given.query_lengths, query.size(2), "actualSeqLengths");
  TORCH_CHECK(given.key_lengths->size() == given.query_lengths->size(),
              "actualSeqLengthsKv: another number of sequences");
  if (!given.block_table) {
    check_ends(*given.key_lengths, heads_first(given.key, layout, given.key_heads).size(2),
               "actualSeqLengthsKv");
  }
}

}  // namespace

void check_infer(const Call& call) {
  const auto given = arguments_of(call);
  const bool is_v5 = call.find<int64_t>("pseType");
  TORCH_CHECK(given.heads > 0 && given.heads % given.key_heads == 0, "numHeads: ", given.heads,
              " is no multiple of numKeyValueHeads ", given.key_heads);
  check_lists(given);
  check_outputs(call, given);
  constexpr int64_t kFirstCompressedMode = 2;
  TORCH_CHECK(
      !is_v5 || !given.mask || given.mask->dim() > 2 || given.sparse_mode >= kFirstCompressedMode,
      "attenMask: two axes in sparseMode 0 and 1");
  if (const auto* sink = call.find<TensorView>("learnableSinkOptional")) {
    TORCH_CHECK(sink->dtype == call.get<TensorView>("query").dtype, "learnableSink: dtype ",
                sink->dtype);
    TORCH_CHECK(sink->sizes == Sizes{given.heads}, "learnableSink: shape ", sink->sizes);
  }
}

}  // namespace cann_sim
