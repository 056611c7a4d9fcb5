#include "ops/sparse_flash_mla.h"

#include <optional>

#include "core/determinism.h"
#include "core/error.h"
#include "ops/compressed_keys.h"
#include "ops/sparse_rules.h"

namespace ascend_attn {
namespace {

constexpr Devices kSince91 = kA2A3.since(Cann::v9_1);

constexpr int64_t kWindowRatio = 1;
constexpr int64_t kSelectedRatio = 4;
constexpr int64_t kWholeRatio = 128;
constexpr int64_t kWindowMode = 4;
constexpr int64_t kCausalMode = 3;

constexpr Rule kRatioOfKind{"cmp_ratio",
                            "1 without cmp_kv, 4 with cmp_sparse_indices and 128 without them"};
constexpr Rule kSink{"sink", "a tensor, as the device knows no attention without a sink"};
// The document of CANN refuses them.
constexpr Rule kNoQueryCounts{"actual_seq_lengths_query", "None in layout BSND"};
constexpr Rule kNoCounts{"actual_seq_lengths", "None in layout BSND; layout TND takes lengths"};
constexpr Rule kNoDeterminismOfMla{
    "deterministic", "False or torch.use_deterministic_algorithms(True, warn_only=True)"};

std::vector<Dtypes> mla_dtypes() { return {{kSince91, {at::kHalf, at::kBFloat16}}}; }

std::vector<Limit> mla_limits() {
  return {{"N1", "query heads", {.one_of = {1, 2, 4, 8, 16, 32, 64, 128}}},
          kHeadDim,
          {"K", "selected keys per token", {.one_of = {512, 1024}}},
          {"ori_mask_mode", "mask of the original keys", {.one_of = {kWindowMode}}},
          {"cmp_mask_mode", "mask of the compressed keys", {.one_of = {kCausalMode}}},
          {"ori_win_left", "earlier keys in the window", {.one_of = {127}}},
          {"ori_win_right", "later keys in the window", {.one_of = {0}}}};
}

std::vector<Limit> with_pages(std::vector<Limit> limits) {
  limits.push_back(kPageSize);
  return limits;
}

constexpr KeyNames kOriNames{"layout_kv", "ori_block_table", "actual_seq_lengths_ori_kv"};
constexpr KeyNames kCmpNames{"layout_kv", "cmp_block_table", "actual_seq_lengths_cmp_kv",
                             /*may_be_empty=*/true};

void check_mode(std::string_view op, std::string_view argument, bool known,
                std::string_view expected, int64_t mode) {
  check_value(known, op, argument, "expected ", expected, ", got ", mode);
}

// Checks shared by the forward operator and its gradient, whose keys are never paged.
template <typename Op>
class MlaRules {
 public:
  MlaRules(const Op& op, const SparseMlaPages& pages)
      : op_(op),
        options_(op.options),
        ori_pages_(pages.ori()),
        cmp_pages_(pages.cmp()),
        rules_(Op::limits, op.options.layout, {"query", op.query}, {"ori_kv", op.ori_kv},
               &ori_pages_, kOriNames) {
    check_present(op.cmp_kv || !op.cmp_sparse_indices, Op::name, "cmp_kv",
                  "expected a tensor because cmp_sparse_indices is given, got None");
    rules_.check_indices_of_keys();
    rules_.check_lengths(options_.actual_seq_lengths_query, options_.actual_seq_lengths_ori_kv);
    check_ori_mask();
    if (op.cmp_kv) {
      check_compressed();
    }
    check_sink();
    check_scale_value(Op::name, options_.scale_value);
  }
  MlaRules(const MlaRules&) = delete;
  MlaRules& operator=(const MlaRules&) = delete;

  const SparseRules& operator*() const { return rules_; }
  const SparseRules* operator->() const { return &rules_; }

  // Checks the limits of the device, last: a call that violates them alone is right but for it.
  void check_limits() const {
    const auto& limits = rules_.limits();
    if (!limits) {
      return;
    }
    limits.size("query", "N1", rules_.heads());
    limits.size("query", "D", rules_.head_size());
    limits.size("ori_mask_mode", "ori_mask_mode", options_.ori_mask_mode);
    limits.size("ori_win_left", "ori_win_left", options_.ori_win_left);
    limits.size("ori_win_right", "ori_win_right", options_.ori_win_right);
    auto ratio = kWindowRatio;
    if (op_.cmp_kv) {
      limits.size("cmp_mask_mode", "cmp_mask_mode", options_.cmp_mask_mode);
      ratio = op_.cmp_sparse_indices ? kSelectedRatio : kWholeRatio;
    }
    if (op_.cmp_sparse_indices) {
      limits.size("cmp_sparse_indices", "K", op_.cmp_sparse_indices->sym_size(-1));
    }
    limits.rule(kRatioOfKind, options_.cmp_ratio == ratio, options_.cmp_ratio);
    limits.rule(kSink, options_.sink.has_value(), "None");
  }

 private:
  void check_ori_mask() const {
    const auto mode = options_.ori_mask_mode;
    check_mode(Op::name, "ori_mask_mode", mode == 0 || mode == kCausalMode || mode == kWindowMode,
               "0, 3 or 4", mode);
    if (mode == kWindowMode) {
      check_window("ori_win_left", options_.ori_win_left);
      check_window("ori_win_right", options_.ori_win_right);
    }
  }
  void check_window(std::string_view argument, int64_t keys) const {
    check_value(keys >= -1, Op::name, argument,
                "expected a number of keys, or -1 for all of them, got ", keys);
  }

  void check_compressed() const {
    const SparseRules rules(Op::limits, options_.layout, {"query", op_.query},
                            {"cmp_kv", *op_.cmp_kv}, &cmp_pages_, kCmpNames);
    rules.check_indices_of_keys();
    rules.check_lengths(options_.actual_seq_lengths_query, options_.actual_seq_lengths_cmp_kv);
    const auto mode = options_.cmp_mask_mode;
    check_mode(Op::name, "cmp_mask_mode", mode == 0 || mode == kCausalMode, "0 or 3", mode);
    check_cmp_ratio(Op::name, options_.cmp_ratio);
    check_residual(Op::name, {"cmp_residual_kv", options_.cmp_residual_kv}, {"query", op_.query},
                   batch());
    const bool of_shapes = options_.layout == Layout::BSND && !ori_pages_.given() &&
                           !options_.actual_seq_lengths_ori_kv &&
                           !options_.actual_seq_lengths_cmp_kv;
    if (of_shapes && mode == kCausalMode && !options_.cmp_residual_kv) {
      check_derived_residual(Op::name, "cmp_residual_kv", options_.cmp_ratio, batch(),
                             op_.ori_kv.sym_size(1), op_.cmp_kv->sym_size(1));
    }
    if (op_.cmp_sparse_indices) {
      rules.check_sparse_indices({"cmp_sparse_indices", *op_.cmp_sparse_indices});
    }
  }
  c10::SymInt batch() const {
    return options_.layout == Layout::TND ? options_.actual_seq_lengths_query->sym_numel()
                                          : op_.query.sym_size(0);
  }

  void check_sink() const {
    if (!options_.sink) {
      return;
    }
    const NamedTensor sink{"sink", *options_.sink};
    rules_.check_same_device(sink);
    check_dtype(Op::name, sink, statistics_dtype(op_.query));
    check_shape(Op::name, sink, {{rules_.heads()}}, "(N1)");
  }

  const Op& op_;
  const SparseMlaOptions& options_;
  KeyPages ori_pages_;
  KeyPages cmp_pages_;
  SparseRules rules_;
};

}  // namespace

const OperatorLimits SparseFlashMla::limits{name,
                                            functions,
                                            mla_dtypes(),
                                            with_pages(mla_limits()),
                                            {kNotEmpty, kRatioOfKind, kSink, kNoQueryCounts}};

const OperatorLimits SparseFlashMlaGrad::limits{
    name,
    functions,
    mla_dtypes(),
    mla_limits(),
    {kNotEmpty, kRatioOfKind, kSink, kNoCounts, kNoDeterminismOfMla}};

SparseFlashMla::Outputs SparseFlashMla::check_and_allocate() const {
  const MlaRules rules(*this, pages);
  rules.check_limits();
  rules->limits().rule(kNoQueryCounts,
                       options.layout == Layout::TND || !options.actual_seq_lengths_query,
                       "a tensor");
  const auto statistics =
      return_softmax_lse ? rules->statistics_sizes() : c10::SymDimVector{c10::SymInt(0)};
  return {new_like(query), new_tensor(statistics, query.options().dtype(statistics_dtype(query)))};
}

SparseFlashMlaGrad::Outputs SparseFlashMlaGrad::check_and_allocate() const {
  const SparseMlaPages contiguous{};
  const MlaRules rules(*this, contiguous);
  const auto check_like_out = [&](NamedTensor argument) {
    rules->check_same_dtype(argument);
    rules->check_like_query(argument, rules->heads(), rules->head_size());
  };
  check_some_gradient(name, {"d_out", d_out}, {"d_softmax_lse", d_softmax_lse});
  if (d_out) {
    check_like_out({"d_out", *d_out});
  }
  check_like_out({"out", out});
  rules->check_statistics({"softmax_lse", softmax_lse});
  if (d_softmax_lse) {
    rules->check_statistics({"d_softmax_lse", *d_softmax_lse});
  }
  rules.check_limits();
  const bool counts = options.layout == Layout::BSND &&
                      (options.actual_seq_lengths_query || options.actual_seq_lengths_ori_kv ||
                       options.actual_seq_lengths_cmp_kv);
  rules->limits().rule(kNoCounts, !counts, "a tensor");
  rules->limits().rule(kNoDeterminismOfMla,
                       !is_deterministic(options.deterministic) ||
                           at::globalContext().deterministicAlgorithmsWarnOnly(),
                       "True");
  const auto numbers = query.options().dtype(statistics_dtype(query));
  return {new_like(query), new_like(ori_kv),
          cmp_kv ? new_like(*cmp_kv) : new_tensor({0}, query.options()),
          options.sink ? new_like(*options.sink) : new_tensor({0}, numbers),
          cmp_sparse_indices ? new_tensor(cmp_sparse_indices->sym_sizes(), numbers)
                             : new_tensor({0}, numbers)};
}

}  // namespace ascend_attn
