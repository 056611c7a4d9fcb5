// The functions that torch_npu's own tensor methods call, as far as the tests need them.
#include "opapi.h"

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
const Function mul{.name = "aclnnMul",
                   .schema_name = "aten::mul",
                   .overload = "Tensor",
                   .arguments = {input("self", "self"), input("other", "other"), output("out")}};
const Function add{.name = "aclnnAdd",
                   .schema_name = "aten::add",
                   .overload = "Tensor",
                   .arguments = {input("self", "self"), input("other", "other"),
                                 attribute("alpha", "alpha"), output("out")}};
const Function inplace_add{
    .name = "aclnnInplaceAdd",
    .schema_name = "aten::add_",
    .overload = "Tensor",
    .arguments = {
        {"selfRef", "self", Kind::output}, input("other", "other"), attribute("alpha", "alpha")}};
// torch_npu calls aclnnMul and aclnnAdd only where these are there as well.
const Function mul_scalar{
    .name = "aclnnMuls",
    .schema_name = "aten::mul",
    .overload = "Scalar",
    .arguments = {input("self", "self"), attribute("other", "other"), output("out")}};
const Function add_scalar{.name = "aclnnAdds",
                          .schema_name = "aten::add",
                          .overload = "Scalar",
                          .arguments = {input("self", "self"), attribute("other", "other"),
                                        attribute("alpha", "alpha"), output("out")}};
const Function inplace_add_scalar{.name = "aclnnInplaceAdds",
                                  .schema_name = "aten::add_",
                                  .overload = "Scalar",
                                  .arguments = {{"selfRef", "self", Kind::output},
                                                attribute("other", "other"),
                                                attribute("alpha", "alpha")}};
const Function stack{
    .name = "aclnnStack",
    .schema_name = "aten::stack",
    .arguments = {input("tensors", "tensors"), attribute("dim", "dim"), output("out")},
    .always_computes = true};
const Function amax{.name = "aclnnAmax",
                    .schema_name = "aten::amax",
                    .arguments = {input("self", "self"), attribute("dim", "dim"),
                                  attribute("keepDim", "keepdim"), output("out")}};
const Function sum{
    .name = "aclnnReduceSum",
    .schema_name = "aten::sum",
    .overload = "dim_IntList",
    .arguments = {input("self", "self"), attribute("dims", "dim"), attribute("keepDims", "keepdim"),
                  attribute("dtype"), output("out")}};
const Function equals_scalar{
    .name = "aclnnEqScalar",
    .schema_name = "aten::eq",
    .overload = "Scalar",
    .arguments = {input("self", "self"), attribute("other", "other"), output("out")}};
const Function inplace_masked_fill{
    .name = "aclnnInplaceMaskedFillScalar",
    .schema_name = "aten::masked_fill_",
    .overload = "Scalar",
    .arguments = {
        {"selfRef", "self", Kind::output}, input("mask", "mask"), attribute("value", "value")}};
const Function softmax{
    .name = "aclnnSoftmax",
    .schema_name = "aten::softmax",
    .overload = "int",
    .arguments = {input("self", "self"), attribute("dim", "dim"), output("out")}};
const Function inplace_sub{
    .name = "aclnnInplaceSub",
    .schema_name = "aten::sub_",
    .overload = "Tensor",
    .arguments = {
        {"selfRef", "self", Kind::output}, input("other", "other"), attribute("alpha", "alpha")}};
const Function inplace_sub_scalar{.name = "aclnnInplaceSubs",
                                  .schema_name = "aten::sub_",
                                  .overload = "Scalar",
                                  .arguments = {{"selfRef", "self", Kind::output},
                                                attribute("other", "other"),
                                                attribute("alpha", "alpha")}};
const Function inplace_mul{
    .name = "aclnnInplaceMul",
    .schema_name = "aten::mul_",
    .overload = "Tensor",
    .arguments = {{"selfRef", "self", Kind::output}, input("other", "other")}};
const Function inplace_mul_scalar{
    .name = "aclnnInplaceMuls",
    .schema_name = "aten::mul_",
    .overload = "Scalar",
    .arguments = {{"selfRef", "self", Kind::output}, attribute("other", "other")}};

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

int aclnnMulGetWorkspaceSize(Tensor self, Tensor other, Tensor out, uint64_t* workspace_size,
                             aclOpExecutor** executor) {
  return prepare(mul, workspace_size, executor, self, other, out);
}
int aclnnMul(void* workspace, uint64_t size, aclOpExecutor* executor, aclrtStream stream) {
  return execute(workspace, size, executor, stream);
}

int aclnnAddGetWorkspaceSize(Tensor self, Tensor other, const aclScalar* alpha, Tensor out,
                             uint64_t* workspace_size, aclOpExecutor** executor) {
  return prepare(add, workspace_size, executor, self, other, alpha, out);
}
int aclnnAdd(void* workspace, uint64_t size, aclOpExecutor* executor, aclrtStream stream) {
  return execute(workspace, size, executor, stream);
}

int aclnnInplaceAddGetWorkspaceSize(Tensor self, Tensor other, const aclScalar* alpha,
                                    uint64_t* workspace_size, aclOpExecutor** executor) {
  return prepare(inplace_add, workspace_size, executor, self, other, alpha);
}
int aclnnInplaceAdd(void* workspace, uint64_t size, aclOpExecutor* executor, aclrtStream stream) {
  return execute(workspace, size, executor, stream);
}

int aclnnMulsGetWorkspaceSize(Tensor self, const aclScalar* other, Tensor out,
                              uint64_t* workspace_size, aclOpExecutor** executor) {
  return prepare(mul_scalar, workspace_size, executor, self, other, out);
}
int aclnnMuls(void* workspace, uint64_t size, aclOpExecutor* executor, aclrtStream stream) {
  return execute(workspace, size, executor, stream);
}

int aclnnAddsGetWorkspaceSize(Tensor self, const aclScalar* other, const aclScalar* alpha,
                              Tensor out, uint64_t* workspace_size, aclOpExecutor** executor) {
  return prepare(add_scalar, workspace_size, executor, self, other, alpha, out);
}
int aclnnAdds(void* workspace, uint64_t size, aclOpExecutor* executor, aclrtStream stream) {
  return execute(workspace, size, executor, stream);
}

int aclnnInplaceAddsGetWorkspaceSize(Tensor self, const aclScalar* other, const aclScalar* alpha,
                                     uint64_t* workspace_size, aclOpExecutor** executor) {
  return prepare(inplace_add_scalar, workspace_size, executor, self, other, alpha);
}
int aclnnInplaceAdds(void* workspace, uint64_t size, aclOpExecutor* executor, aclrtStream stream) {
  return execute(workspace, size, executor, stream);
}

int aclnnStackGetWorkspaceSize(TensorList tensors, int64_t dim, Tensor out,
                               uint64_t* workspace_size, aclOpExecutor** executor) {
  return prepare(stack, workspace_size, executor, tensors, dim, out);
}
int aclnnStack(void* workspace, uint64_t size, aclOpExecutor* executor, aclrtStream stream) {
  return execute(workspace, size, executor, stream);
}

int aclnnAmaxGetWorkspaceSize(Tensor self, IntArray dim, bool keep, Tensor out,
                              uint64_t* workspace_size, aclOpExecutor** executor) {
  return prepare(amax, workspace_size, executor, self, dim, keep, out);
}
int aclnnAmax(void* workspace, uint64_t size, aclOpExecutor* executor, aclrtStream stream) {
  return execute(workspace, size, executor, stream);
}

int aclnnReduceSumGetWorkspaceSize(Tensor self, IntArray dims, bool keep, aclDataType dtype,
                                   Tensor out, uint64_t* workspace_size, aclOpExecutor** executor) {
  return prepare(sum, workspace_size, executor, self, dims, keep, int64_t{dtype}, out);
}
int aclnnReduceSum(void* workspace, uint64_t size, aclOpExecutor* executor, aclrtStream stream) {
  return execute(workspace, size, executor, stream);
}

int aclnnEqScalarGetWorkspaceSize(Tensor self, const aclScalar* other, Tensor out,
                                  uint64_t* workspace_size, aclOpExecutor** executor) {
  return prepare(equals_scalar, workspace_size, executor, self, other, out);
}
int aclnnEqScalar(void* workspace, uint64_t size, aclOpExecutor* executor, aclrtStream stream) {
  return execute(workspace, size, executor, stream);
}

int aclnnInplaceMaskedFillScalarGetWorkspaceSize(Tensor self, Tensor mask, const aclScalar* value,
                                                 uint64_t* workspace_size,
                                                 aclOpExecutor** executor) {
  return prepare(inplace_masked_fill, workspace_size, executor, self, mask, value);
}
int aclnnInplaceMaskedFillScalar(void* workspace, uint64_t size, aclOpExecutor* executor,
                                 aclrtStream stream) {
  return execute(workspace, size, executor, stream);
}

int aclnnSoftmaxGetWorkspaceSize(Tensor self, int64_t dim, Tensor out, uint64_t* workspace_size,
                                 aclOpExecutor** executor) {
  return prepare(softmax, workspace_size, executor, self, dim, out);
}
int aclnnSoftmax(void* workspace, uint64_t size, aclOpExecutor* executor, aclrtStream stream) {
  return execute(workspace, size, executor, stream);
}

int aclnnInplaceSubGetWorkspaceSize(Tensor self, Tensor other, const aclScalar* alpha,
                                    uint64_t* workspace_size, aclOpExecutor** executor) {
  return prepare(inplace_sub, workspace_size, executor, self, other, alpha);
}
int aclnnInplaceSub(void* workspace, uint64_t size, aclOpExecutor* executor, aclrtStream stream) {
  return execute(workspace, size, executor, stream);
}

int aclnnInplaceSubsGetWorkspaceSize(Tensor self, const aclScalar* other, const aclScalar* alpha,
                                     uint64_t* workspace_size, aclOpExecutor** executor) {
  return prepare(inplace_sub_scalar, workspace_size, executor, self, other, alpha);
}
int aclnnInplaceSubs(void* workspace, uint64_t size, aclOpExecutor* executor, aclrtStream stream) {
  return execute(workspace, size, executor, stream);
}

int aclnnInplaceMulGetWorkspaceSize(Tensor self, Tensor other, uint64_t* workspace_size,
                                    aclOpExecutor** executor) {
  return prepare(inplace_mul, workspace_size, executor, self, other);
}
int aclnnInplaceMul(void* workspace, uint64_t size, aclOpExecutor* executor, aclrtStream stream) {
  return execute(workspace, size, executor, stream);
}

int aclnnInplaceMulsGetWorkspaceSize(Tensor self, const aclScalar* other, uint64_t* workspace_size,
                                     aclOpExecutor** executor) {
  return prepare(inplace_mul_scalar, workspace_size, executor, self, other);
}
int aclnnInplaceMuls(void* workspace, uint64_t size, aclOpExecutor* executor, aclrtStream stream) {
  return execute(workspace, size, executor, stream);
}

}  // extern "C"
