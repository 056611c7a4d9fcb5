// SparseLightningIndexerKLLossGrad. Prototype:
// docs/operators/sparse_lightning_indexer_kl_loss_grad.md.
#include "opapi/ours/cu_seqlens.h"

using namespace cann_sim;

namespace {

void check(const Call& call) {
  for (const auto* name : {"cuSeqLensQOptional", "cuSeqLensKOptional"}) {
    check_packed(call, "layoutQ", name);
  }
  TORCH_CHECK(call.get<std::string>("layoutQ") == call.get<std::string>("layoutK"),
              "layoutQ and layoutK differ");
}

torch::jit::Stack gradients(const Call& call) {
  OperatorArguments arguments;
  add_ends(call, "cuSeqLensQOptional", "actual_seq_lengths_query", arguments);
  add_ends(call, "cuSeqLensKOptional", "actual_seq_lengths_key", arguments);
  add_residual(call, "cuSeqLensQOptional", arguments);
  return call.results(arguments);
}

// Keys behind the last sequence stay.
at::Tensor written(const Call& call, std::string_view name, const at::Tensor& output) {
  return name == "dk" ? rows_of_sequences(call, output, 0, "layoutQ", "cuSeqLensKOptional")
                      : output;
}

// The kernel finds the sequence of every row of the shape.
const KernelFault kRowsBehindTheLast{
    Harm::bounds, [](const Call& call) -> std::string {
      if (!call.is_tnd("layoutQ")) {
        return {};
      }
      const auto rows = call.get<TensorView>("q").sizes.at(0);
      const auto last = call.elements("cuSeqLensQOptional").back();
      return rows == last
                 ? ""
                 : c10::str(rows, " rows of queries, of which ", last,
                            " belong to a sequence: the device reads lengths out of bounds");
    }};

}  // namespace

CANN_SIM_FUNCTION(aclnnSparseLightningIndexerKLLossGrad,
                  {.schema_name = "ascend::sparse_lightning_indexer_kl_loss_grad",
                   .workspace = 1024,
                   .device = {.check = check, .written = written, .faults = {kRowsBehindTheLast}},
                   .compute = gradients},
                  input("q", "query_index", kHalf), input("k", "key_index", kHalf),
                  input("w", "weights", kFloat), input("sparseIndices", "sparse_indices", kInt32),
                  input("attnSoftmaxL1Norm", "attn_softmax_l1_norm", kFloat),
                  optional_input("cuSeqLensQOptional", "", kInt32),
                  optional_input("cuSeqLensKOptional", "", kInt32),
                  // A2 and A3 take no counts.
                  not_computed("seqUsedQOptional", "seqUsedKOptional"),
                  optional_input("cmpResidualKOptional", "cmp_residual_key", kInt32),
                  not_computed("metadataOptional"), attribute<char*>("layoutQ", "layout"),
                  attribute<char*>("layoutK"), attribute<int64_t>("maskMode", "sparse_mode"),
                  attribute<int64_t>("cmpRatio", "cmp_ratio"), output("dq"), output("dk"),
                  output("dw"), output("softmaxOut"))
