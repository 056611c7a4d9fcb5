// Functions that torch_npu itself calls, to copy, to clear and to pad tensors. cpu_fallback.cpp has
// torch's other operators.
#include "opapi/core/opapi.h"

using namespace cann_sim;

namespace {

// aten::copy_ also converts dtypes, which makes it aclnnCast.
const Function inplace_copy{.name = "aclnnInplaceCopy",
                            .schema_name = "aten::copy_",
                            .arguments = {{"selfRef", "self", Kind::output}, input("src", "src")}};
const Function cast{
    .name = "aclnnCast",
    .schema_name = "aten::copy_",
    .arguments = {input("self", "src"), attribute("dtype"), {"out", "self", Kind::output}}};
const Function inplace_zero{.name = "aclnnInplaceZero",
                            .schema_name = "aten::zero_",
                            .arguments = {{"selfRef", "self", Kind::output}}};
const Function inplace_fill{
    .name = "aclnnInplaceFillScalar",
    .schema_name = "aten::fill_",
    .overload = "Scalar",
    .arguments = {{"selfRef", "self", Kind::output}, attribute("value", "value")}};
// torch_npu pads tensors that HCCL sends.
const Function pad{.name = "aclnnConstantPadNd",
                   .schema_name = "aten::constant_pad_nd",
                   .arguments = {input("self", "self"), attribute("padding", "pad"),
                                 attribute("value", "value"), output("out")}};

}  // namespace

extern "C" {

int aclnnInplaceCopyGetWorkspaceSize(Tensor self, Tensor src, uint64_t* workspace_size,
                                     aclOpExecutor** executor) {
  return prepare(inplace_copy, workspace_size, executor, self, src);
}
int aclnnInplaceCopy(void* workspace, uint64_t size, aclOpExecutor* executor, aclrtStream stream) {
  return execute(workspace, size, executor, stream);
}

int aclnnCastGetWorkspaceSize(Tensor self, aclDataType dtype, Tensor out, uint64_t* workspace_size,
                              aclOpExecutor** executor) {
  return prepare(cast, workspace_size, executor, self, int64_t{dtype}, out);
}
int aclnnCast(void* workspace, uint64_t size, aclOpExecutor* executor, aclrtStream stream) {
  return execute(workspace, size, executor, stream);
}

int aclnnInplaceZeroGetWorkspaceSize(Tensor self, uint64_t* workspace_size,
                                     aclOpExecutor** executor) {
  return prepare(inplace_zero, workspace_size, executor, self);
}
int aclnnInplaceZero(void* workspace, uint64_t size, aclOpExecutor* executor, aclrtStream stream) {
  return execute(workspace, size, executor, stream);
}

int aclnnInplaceFillScalarGetWorkspaceSize(Tensor self, const aclScalar* value,
                                           uint64_t* workspace_size, aclOpExecutor** executor) {
  return prepare(inplace_fill, workspace_size, executor, self, value);
}
int aclnnInplaceFillScalar(void* workspace, uint64_t size, aclOpExecutor* executor,
                           aclrtStream stream) {
  return execute(workspace, size, executor, stream);
}

int aclnnConstantPadNdGetWorkspaceSize(Tensor self, const aclIntArray* padding,
                                       const aclScalar* value, Tensor out, uint64_t* workspace_size,
                                       aclOpExecutor** executor) {
  return prepare(pad, workspace_size, executor, self, padding, value, out);
}
CANN_SIM_SECOND_PHASE(aclnnConstantPadNd)

}  // extern "C"
