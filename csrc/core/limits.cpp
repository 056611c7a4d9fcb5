#include "core/limits.h"

#include <algorithm>
#include <array>
#include <atomic>

namespace ascend_attn {
namespace {

constexpr uint8_t kA2A3 = Product::A2 | Product::A3;
constexpr uint8_t kTraining = kA2A3 | static_cast<uint8_t>(Product::P950);
constexpr int64_t k128K = 128 * 1024;

constexpr int64_t k1M = 1024 * 1024;

const std::vector<c10::ScalarType> kHalf{at::kHalf, at::kBFloat16};

const Limit kBatch{"B", "batch size", {.min = 1, .max = 256}};
const Limit kQueryLength{"S1", "query tokens per sequence", {.min = 1, .max = k128K}};
const Limit kKeyLength{"S2", "key tokens per sequence", {.min = 1, .max = k128K}};
const Limit kHeadDim{"D", "head size without rope", {.one_of = {512}}};
const Limit kRopeDim{"Dr", "head size of the rope part", {.one_of = {64}}};
const Limit kIndexDim{"Didx", "head size of the indexer", {.one_of = {128}}};
const Limit kIndexHeads{"Nidx", "query heads of the indexer", {.one_of = {8, 16, 32, 64}}};
const Limit kAttentionHeads{"N1", "query heads", {.one_of = {1, 2, 4, 8, 16, 32, 64, 128}}};
// FlashAttentionScore says itself what it does with sequences of no tokens.
const std::vector<Limit> kFlashAttention{
    {"B", "batch size", {.min = 1, .max = 2 * k1M}},
    {"prefix", "batch size with prefix", {.min = 1, .max = 2048}},
    {"N", "query heads", {.min = 1, .max = 256}},
    {"S", "tokens per sequence", {.min = 0, .max = k1M}},
    {"T", "tokens of all sequences", {.min = 0, .max = k1M}},
    {"sequences", "sequences in layout TND", {.min = 1, .max = 2048}},
    {"D", "head size", {.min = 1, .max = 512}}};
// PromptFlashAttention takes empty tensors.
const Limit kPromptHeads{"N", "query heads", {.min = 1, .max = 256}};
const Limit kPromptSize{"D", "head size", {.min = 1, .max = 512}};
const std::vector<Limit> kPromptA2{
    {"B", "batch size", {.min = 0, .max = 65536}},
    {"unaligned B",
     "batch size when D is not a multiple of 16, in int8 of 32",
     {.min = 0, .max = 128}},
    kPromptHeads,
    {"S", "tokens per sequence", {.min = 0, .max = 20 * k1M}},
    kPromptSize,
    {"N*D", "size of a token in layouts BSH and BSND", {.min = 1, .max = 65534}}};
const std::vector<Limit> kPrompt310P{{"B", "batch size", {.min = 0, .max = 128}},
                                     kPromptHeads,
                                     {"S", "tokens per sequence", {.min = 0, .max = 65535}},
                                     kPromptSize};
const Limit kTrainingCount{
    "K", "selected keys or blocks per token", {.min = 1024, .max = 8192, .multiple_of = 1024}};

// Sources: the tables of the seeds of SparseLightningIndexerGradKLLoss,
// SparseFlashAttentionGrad, FlashAttentionScoreGradV2, ScatterPaKvCache and PromptFlashAttentionV2,
// and for the forward operators the sizes that feed the gradients.
const std::array<OperatorLimits, 9> kTable{{
    {"lightning_indexer",
     "aclnnLightningIndexer",
     {{kA2A3,
       kHalf,
       {kBatch,
        kQueryLength,
        kKeyLength,
        kIndexHeads,
        kIndexDim,
        {"K",
         "selected keys per token",
         {.min = 1, .max = 2048, .one_of = {3072, 4096, 5120, 6144, 7168, 8192}}}}}}},
    {"lightning_indexer_grad",
     "aclnnLightningIndexerGrad",
     {{kA2A3, kHalf, {kBatch, kQueryLength, kKeyLength, kIndexHeads, kIndexDim, kTrainingCount}}}},
    {"sparse_flash_attention",
     "aclnnSparseFlashAttention",
     {{kA2A3,
       kHalf,
       {kBatch,
        kQueryLength,
        kKeyLength,
        kAttentionHeads,
        kHeadDim,
        kRopeDim,
        kTrainingCount,
        {"sparse_block_size", "keys per block", {.one_of = {1, 2, 4, 8, 16, 32, 64, 128}}}}}}},
    {"sparse_flash_attention_grad",
     "aclnnSparseFlashAttentionGrad",
     {{kA2A3,
       kHalf,
       {kBatch,
        kQueryLength,
        kKeyLength,
        kAttentionHeads,
        kHeadDim,
        kRopeDim,
        kTrainingCount,
        {"sparse_block_size", "keys per block", {.one_of = {1, 8, 16, 32, 64}}}}}}},
    {"sparse_lightning_indexer_grad_kl_loss",
     "aclnnSparseLightningIndexerGradKLLoss",
     {{kA2A3,
       kHalf,
       {kBatch,
        kQueryLength,
        kKeyLength,
        {"N1", "query heads", {.one_of = {8, 16, 32, 64, 128}}},
        kHeadDim,
        kRopeDim,
        kIndexHeads,
        kIndexDim,
        kTrainingCount}}}},
    {"flash_attention_score",
     "aclnnFlashAttentionScoreV2",
     {{kTraining, {at::kHalf, at::kBFloat16, at::kFloat}, kFlashAttention}}},
    {"flash_attention_score_grad",
     "aclnnFlashAttentionScoreGradV2",
     {{kTraining, {at::kHalf, at::kBFloat16, at::kFloat}, kFlashAttention}}},
    {"scatter_pa_kv_cache_",
     "aclnnScatterPaKvCache",
     {{kA2A3, {at::kHalf, at::kBFloat16, at::kChar}, {}},
      {static_cast<uint8_t>(Product::P950),
       {at::kHalf, at::kBFloat16, at::kChar, at::kFloat, at::kByte, at::kShort, at::kUInt16,
        at::kInt, at::kUInt32, at::kFloat8_e5m2, at::kFloat8_e4m3fn},
       {}}}},
    {"prompt_flash_attention",
     "aclnnPromptFlashAttentionV2",
     {{static_cast<uint8_t>(Product::A2), {at::kHalf, at::kBFloat16, at::kChar}, kPromptA2},
      {static_cast<uint8_t>(Product::P310), {at::kHalf}, kPrompt310P}}},
}};

constexpr int64_t kNotSet = 0;
constexpr int64_t kOff = 1;
constexpr int64_t kFirstProduct = 2;

thread_local int64_t override_in_force = kNotSet;
std::atomic<Product> device_product{Product::A2};

}  // namespace

std::string_view product_name(Product product) {
  switch (product) {
    case Product::A2:
      return "A2";
    case Product::A3:
      return "A3";
    case Product::P950:
      return "950";
    case Product::P310:
      return "310P";
  }
  return "unknown";
}

Product product_of(std::string_view name) {
  for (const auto product : {Product::A2, Product::A3, Product::P950, Product::P310}) {
    if (product_name(product) == name) {
      return product;
    }
  }
  raise(Violation::value, "limits", "product",
        c10::str("expected None or one of 'A2', 'A3', '950', '310P', got '", name, "'"));
}

bool Allowed::contains(int64_t value) const {
  for (const auto listed : one_of) {
    if (value == listed) {
      return true;
    }
  }
  return value >= min && value <= max && value % multiple_of == 0;
}

std::string Allowed::text() const {
  std::string list;
  for (const auto listed : one_of) {
    list += (list.empty() ? "" : ", ") + std::to_string(listed);
  }
  if (min > max) {
    return one_of.size() == 1 ? list : "one of " + list;
  }
  const auto range = c10::str(min, "..", max);
  const auto multiples =
      multiple_of == 1 ? range : c10::str("a multiple of ", multiple_of, " in ", range);
  return list.empty() ? multiples : multiples + " or one of " + list;
}

const ProductLimits* OperatorLimits::on(Product product) const {
  const auto found = std::ranges::find_if(variants, [product](const ProductLimits& limits) {
    return (limits.products & static_cast<uint8_t>(product)) != 0;
  });
  return found == variants.end() ? nullptr : &*found;
}

std::span<const OperatorLimits> limits_table() { return kTable; }

std::optional<Product> product_in_force() {
  switch (override_in_force) {
    case kNotSet:
      return device_product.load(std::memory_order_relaxed);
    case kOff:
      return std::nullopt;
    default:
      return static_cast<Product>(override_in_force - kFirstProduct);
  }
}

int64_t limits_override() { return override_in_force; }
void set_limits_override(int64_t value) { override_in_force = value; }
int64_t limits_override_for(std::optional<Product> product) {
  return product ? kFirstProduct + static_cast<int64_t>(*product) : kOff;
}
void set_device_product(Product product) { device_product.store(product); }

LimitsCheck::LimitsCheck(std::string_view op) : op_(op), product_(product_in_force()) {
  const auto entry = std::ranges::find(kTable, op, &OperatorLimits::op);
  if (!product_ || entry == kTable.end()) {
    return;
  }
  limits_ = entry->on(*product_);
  if (!limits_) [[unlikely]] {
    raise(Violation::not_implemented, op, "product",
          c10::str("expected a product that has ", entry->aclnn, ", got Ascend ",
                   product_name(*product_), "; ascend_attn_ops.limits(...) chooses another"));
  }
}

void LimitsCheck::dtype(std::string_view argument, c10::ScalarType dtype) const {
  if (!limits_ || std::ranges::find(limits_->dtypes, dtype) != limits_->dtypes.end()) {
    return;
  }
  std::string expected;
  for (const auto allowed : limits_->dtypes) {
    expected += (expected.empty() ? "" : " or ") + std::string(dtype_name(allowed));
  }
  reject(Violation::type, argument, "dtype " + expected, std::string(dtype_name(dtype)));
}

void LimitsCheck::size(std::string_view argument, std::string_view quantity,
                       const c10::SymInt& value) const {
  if (!limits_) {
    return;
  }
  const auto known = value.maybe_as_int();
  if (!known) {
    return;
  }
  for (const auto& limit : limits_->limits) {
    if (limit.quantity == quantity && !limit.allowed.contains(*known)) [[unlikely]] {
      reject(Violation::value, argument,
             c10::str(quantity, " (", limit.meaning, ") to be ", limit.allowed.text()),
             std::to_string(*known));
    }
  }
}

void LimitsCheck::reject(Violation violation, std::string_view argument,
                         const std::string& expected, const std::string& got) const {
  raise(violation, op_, argument,
        c10::str("expected ", expected, " on Ascend ", product_name(*product_), ", got ", got,
                 "; on the CPU ascend_attn_ops.limits(None) lifts the device's limits"));
}

}  // namespace ascend_attn
