// Functions that torch_npu itself calls, to copy, to clear and to pad tensors. cpu_fallback.cpp has
// torch's other operators.
#include "opapi/core/opapi.h"

using namespace cann_sim;

// aten::copy_ also converts dtypes, which makes it aclnnCast.
CANN_SIM_FUNCTION(aclnnInplaceCopy, {.schema_name = "aten::copy_"}, in_place("selfRef", "self"),
                  input("src", "src"))
CANN_SIM_FUNCTION(aclnnCast, {.schema_name = "aten::copy_"}, input("self", "src"),
                  attribute<aclDataType>("dtype"), in_place("out", "self"))
CANN_SIM_FUNCTION(aclnnInplaceZero, {.schema_name = "aten::zero_"}, in_place("selfRef", "self"))
CANN_SIM_FUNCTION(aclnnInplaceFillScalar, {.schema_name = "aten::fill_", .overload = "Scalar"},
                  in_place("selfRef", "self"), attribute<const aclScalar*>("value", "value"))
// torch_npu pads tensors that HCCL sends.
CANN_SIM_FUNCTION(aclnnConstantPadNd, {.schema_name = "aten::constant_pad_nd"},
                  input("self", "self"), attribute<IntArray>("padding", "pad"),
                  attribute<const aclScalar*>("value", "value"), output("out"))
