// Attention for inference: batch after batch, by this library's training kernel.
#include "opapi/ours/infer_attention.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/exp.h>
#include <ATen/ops/full.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/log.h>
#include <ATen/ops/logaddexp.h>
#include <ATen/ops/zeros.h>

#include <limits>

namespace cann_sim {

InferAttention arguments_of(const Call& call) {
  // Torch_npu gives lists of one tensor.
  const auto one = [&](std::string_view name) {
    const auto* views = call.find<std::vector<TensorView>>(name);
    TORCH_CHECK(!views || views->size() == 1, "the simulation takes ", name, " as one tensor");
    return views ? views->front().tensor() : call.tensor(name);
  };
  // FusedInferAttentionScore puts "Optional" behind the names.
  const auto tensor = [&](const std::string& name) {
    const auto given = call.optional_tensor(name);
    return given ? given : call.optional_tensor(name + "Optional");
  };
  const auto lengths = [&](const std::string& name) {
    const auto* given = call.find<std::vector<int64_t>>(name);
    given = given ? given : call.find<std::vector<int64_t>>(name + "Optional");
    return given && !given->empty() ? std::optional(*given) : std::nullopt;
  };
  const auto number = [&](std::string_view name) {
    const auto* given = call.find<int64_t>(name);
    return given ? *given : 0;
  };
  const auto heads = call.get<int64_t>("numHeads");
  const auto key_heads = call.get<int64_t>("numKeyValueHeads");
  return {.query = call.tensor("query"),
          .key = one("key"),
          .value = one("value"),
          .layout = call.get<std::string>("inputLayout"),
          .heads = heads,
          .key_heads = key_heads ? key_heads : heads,
          .scale = call.get<double>("scaleValue"),
          .out_sizes = call.get<TensorView>("attentionOut").sizes,
          .pse = tensor("pseShift"),
          .mask = tensor("attenMask"),
          .sparse_mode = number("sparseMode"),
          .pre_tokens = number("preTokens"),
          .next_tokens = number("nextTokens"),
          .query_lengths = lengths("actualSeqLengths"),
          .key_lengths = lengths("actualSeqLengthsKv"),
          .block_table = tensor("blockTable"),
          .query_padding = tensor("queryPaddingSize"),
          .key_padding = tensor("kvPaddingSize"),
          .key_prefix = tensor("keySharedPrefix"),
          .value_prefix = tensor("valueSharedPrefix"),
          .prefix_length = lengths("actualSharedPrefixLen"),
          .query_rope = tensor("queryRope"),
          .key_rope = tensor("keyRope"),
          .key_scale = tensor("keyAntiquantScale"),
          .value_scale = tensor("valueAntiquantScale"),
          .scale_mode = number("keyAntiquantMode"),
          .query_scale = tensor("dequantScaleQuery"),
          .query_mode = number("queryQuantMode")};
}

bool is_packed(std::string_view layout) { return layout == "TND" || layout == "NTD"; }

at::Tensor heads_first(const at::Tensor& x, std::string_view layout, int64_t heads) {
  if (layout == "BSH") {
    return x.unflatten(2, {heads, -1}).transpose(1, 2);
  }
  if (layout == "BSND") {
    return x.transpose(1, 2);
  }
  if (layout == "BNSD") {
    return x;
  }
  if (layout == "NBSD") {
    return x.transpose(0, 1);
  }
  if (layout == "TND") {
    return x.transpose(0, 1).unsqueeze(0);
  }
  TORCH_CHECK(layout == "NTD", "the simulation has no inputLayout ", layout);
  return x.unsqueeze(0);
}

namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// A cache as (blocks, N, block_size, D): (blocks, block_size, H), (blocks, N, block_size, D), or
// (blocks, N, D / 16, block_size, 16).
at::Tensor blocks_of(const at::Tensor& cache, int64_t heads) {
  if (cache.dim() == 3) {
    return cache.unflatten(2, {heads, -1}).transpose(1, 2);
  }
  return cache.dim() == 4 ? cache : cache.transpose(2, 3).flatten(3);
}

// Where a sequence stands on the axis of positions.
struct Range {
  int64_t begin;
  int64_t length;

  at::Tensor of(const at::Tensor& x) const { return x.narrow(1, begin, length); }
};

class Sequences {
 public:
  Sequences(std::string_view layout, const InferAttention::Lengths& lengths,
            const InferAttention::Optional& padding, int64_t positions)
      : packed_(is_packed(layout)),
        lengths_(lengths),
        padding_(padding ? std::optional(padding->item<int64_t>()) : std::nullopt),
        positions_(positions) {}

  // The range of one batch, on the axis of its positions or of all tokens.
  Range at(int64_t batch) const {
    if (packed_) {
      const auto begin = batch == 0 ? 0 : lengths_->at(batch - 1);
      return {begin, lengths_->at(batch) - begin};
    }
    const auto length = length_of(batch);
    return {padding_ ? positions_ - *padding_ - length : 0, length};
  }
  int64_t length_of(int64_t batch) const {
    return lengths_ ? lengths_->at(lengths_->size() == 1 ? 0 : batch) : positions_;
  }

 private:
  bool packed_;
  InferAttention::Lengths lengths_;
  std::optional<int64_t> padding_;
  int64_t positions_;
};

// The keys of each batch as (N, S, D), and what stands before and beside them.
class Keys {
 public:
  Keys(const InferAttention& arguments, std::string_view layout)
      : arguments_(arguments),
        layout_(layout),
        sequences_(layout, arguments.key_lengths, arguments.key_padding,
                   arguments.block_table ? 0 : view(arguments.key).size(2)) {
    TORCH_CHECK(!arguments.block_table || arguments.key_lengths,
                "a cache in blocks without actualSeqLengthsKv");
  }

  at::Tensor key(int64_t batch) const {
    auto keys = of(arguments_.key, batch);
    if (arguments_.key_rope) {
      keys = at::cat({keys, of(*arguments_.key_rope, batch)}, -1);
    }
    return behind(arguments_.key_prefix, keys);
  }
  at::Tensor value(int64_t batch) const {
    return behind(arguments_.value_prefix, of(arguments_.value, batch));
  }

 private:
  at::Tensor view(const at::Tensor& x) const {
    return heads_first(x, layout_, arguments_.key_heads);
  }
  at::Tensor of(const at::Tensor& x, int64_t batch) const {
    if (!arguments_.block_table) {
      return sequences_.at(batch).of(view(x)[is_packed(layout_) ? 0 : batch]);
    }
    const auto length = arguments_.key_lengths->at(arguments_.key_lengths->size() == 1 ? 0 : batch);
    const auto blocks = blocks_of(x, arguments_.key_heads);
    const auto count = (length + blocks.size(2) - 1) / blocks.size(2);
    const auto used = (*arguments_.block_table)[batch].narrow(0, 0, count);
    return blocks.index_select(0, used).transpose(0, 1).flatten(1, 2).narrow(1, 0, length);
  }
  at::Tensor behind(const InferAttention::Optional& prefix, const at::Tensor& x) const {
    if (!prefix) {
      return x;
    }
    const auto all = view(*prefix)[0];
    const auto length = arguments_.prefix_length ? arguments_.prefix_length->at(0) : all.size(1);
    return at::cat({all.narrow(1, 0, length), x}, 1);
  }

  const InferAttention& arguments_;
  std::string layout_;
  Sequences sequences_;
};

// Returns the part of a whole mask for one batch. The mask is (B or 1, 1 or none, Sq, Skv), (Sq,
// Skv), or (B, Skv) for one query.
at::Tensor mask_of(const InferAttention& arguments, int64_t batch, int64_t queries, int64_t keys,
                   int64_t batches) {
  auto mask = arguments.mask->to(at::kBool);
  constexpr int64_t kFirstCompressedMode = 2;
  if (arguments.sparse_mode >= kFirstCompressedMode) {
    return mask.view({mask.size(-2), mask.size(-1)});
  }
  const bool one_row_per_batch =
      mask.dim() == 2 && mask.size(0) == batches && mask.size(0) != queries;
  mask = one_row_per_batch ? mask.unsqueeze(1) : mask.reshape({-1, mask.size(-2), mask.size(-1)});
  return mask[mask.size(0) == 1 ? 0 : batch].narrow(0, 0, queries).narrow(1, 0, keys);
}

// The kernel's results for one batch: (1, N, S, D) and the statistics of its rows as (1, N, S).
struct Attention {
  at::Tensor out;
  at::Tensor log_sum_exp;
};

Attention attention(const InferAttention& arguments, const at::Tensor& query, const at::Tensor& key,
                    const at::Tensor& value, int64_t batch, int64_t batches) {
  OperatorArguments given{{"num_heads", arguments.heads},
                          {"layout", "BNSD"},
                          {"scale_value", arguments.scale},
                          {"pre_tokens", arguments.pre_tokens},
                          {"next_tokens", arguments.next_tokens}};
  // A sink takes its share of the softmax from a result that is not rounded yet.
  const auto dtype = arguments.sinks ? at::kFloat : query.scalar_type();
  given["query"] = query.unsqueeze(0).to(dtype);
  given["key"] = key.unsqueeze(0).to(dtype);
  given["value"] = value.unsqueeze(0).to(dtype);
  const auto queries = query.size(1);
  const auto keys = key.size(1);
  if (arguments.mask) {
    given["atten_mask"] = mask_of(arguments, batch, queries, keys, batches);
    given["sparse_mode"] = arguments.sparse_mode;
  }
  if (arguments.pse) {
    // Added to what has been scaled.
    const auto& pse = *arguments.pse;
    given["pse_type"] = 0;
    given["pse_shift"] = pse.narrow(0, pse.size(0) == 1 ? 0 : batch, 1)
                             .narrow(2, 0, queries)
                             .narrow(3, 0, keys)
                             .to(dtype);
  }
  const auto results = call_operator("ascend::flash_attention_score", "", given);
  auto out = results[0].toTensor();
  const auto max = results[1].toTensor().select(-1, 0);
  auto log_sum_exp = max + at::log(results[2].toTensor().select(-1, 0));
  const auto empty = keys == 0 ? at::full_like(max, true, at::kBool)
                               : max.eq(std::numeric_limits<float>::lowest());
  log_sum_exp.masked_fill_(empty,
                           arguments.sinks ? -kInfinity : arguments.log_sum_exp_without_keys);
  if (arguments.sinks) {
    const auto with_sinks = at::logaddexp(log_sum_exp, arguments.sinks->view({1, -1, 1}));
    out = out * at::exp(log_sum_exp - with_sinks).unsqueeze(-1);
    log_sum_exp = with_sinks;
  }
  return {out, log_sum_exp};
}

}  // namespace

torch::jit::Stack infer_attention(const InferAttention& arguments) {
  const auto split = arguments.layout.find('_');
  const auto layout = arguments.layout.substr(0, split);
  const auto out_layout = split == std::string::npos ? layout : arguments.layout.substr(split + 1);
  const bool packed = is_packed(layout);
  TORCH_CHECK(!packed || (arguments.query_lengths && arguments.key_lengths), "inputLayout ", layout,
              " without lengths");
  TORCH_CHECK(
      !(arguments.query_padding || arguments.key_padding) || !(arguments.mask || arguments.pse),
      "the simulation takes no attenMask or pseShift with queryPaddingSize or "
      "kvPaddingSize");

  auto query = heads_first(arguments.query, layout, arguments.heads);
  if (arguments.query_rope) {
    query = at::cat({query, heads_first(*arguments.query_rope, layout, arguments.heads)}, -1);
  }
  const auto batches =
      packed ? static_cast<int64_t>(arguments.query_lengths->size()) : query.size(0);
  const Sequences sequences(layout, arguments.query_lengths, arguments.query_padding,
                            query.size(2));
  const Keys keys(arguments, layout);

  auto out = at::zeros(arguments.out_sizes, arguments.query.options());
  const auto out_view = heads_first(out, out_layout, arguments.heads);
  auto log_sum_exp = at::full({query.size(0), query.size(1), query.size(2), 1},
                              arguments.log_sum_exp_without_keys, at::kFloat);
  for (int64_t batch = 0; batch < batches; ++batch) {
    const auto where = sequences.at(batch);
    const auto row = packed ? 0 : batch;
    if (where.length == 0) {
      continue;
    }
    const auto one = attention(arguments, where.of(query[row]), keys.key(batch), keys.value(batch),
                               batch, batches);
    where.of(out_view[row]).copy_(one.out.squeeze(0));
    where.of(log_sum_exp[row]).copy_(one.log_sum_exp.squeeze(0).unsqueeze(-1));
  }
  if (packed) {
    log_sum_exp = log_sum_exp.squeeze(0).transpose(0, 1).contiguous();
  }
  return {out, log_sum_exp};
}

}  // namespace cann_sim
