// Arguments that the versions of FlashAttentionScore and of its gradient share.
#pragma once

#include "opapi/core/opapi.h"

namespace cann_sim {

inline const std::vector<aclDataType> kByte{ACL_UINT8};
inline const std::vector<aclDataType> kAttentionMask{ACL_BOOL, ACL_UINT8};

inline const Argument kQuery = input("query", "query", kHalfOrFloat);
inline const Argument kKey = input("key", "key", kHalfOrFloat);
inline const Argument kValue = input("value", "value", kHalfOrFloat);
inline const Arguments kTensors{kQuery, kKey, kValue};
inline const Arguments kTerms{optional_input("pseShiftOptional", "pse_shift", kHalfOrFloat),
                              optional_input("dropMaskOptional", "drop_mask", kByte),
                              not_computed("paddingMaskOptional"),
                              optional_input("attenMaskOptional", "atten_mask", kAttentionMask)};
inline const Arguments kPrefix{attribute("prefixOptional", "prefix")};
inline const Arguments kLengths{attribute("actualSeqQLenOptional", "actual_seq_lengths_query"),
                                attribute("actualSeqKvLenOptional", "actual_seq_lengths_key")};
inline const Arguments kStarts{attribute("qStartIdxOptional", "q_start_idx"),
                               attribute("kvStartIdxOptional", "kv_start_idx")};
inline const Arguments kScalars{
    attribute("scaleValue", "scale_value"),     attribute("keepProb", "keep_prob"),
    attribute("preTokens", "pre_tokens"),       attribute("nextTokens", "next_tokens"),
    attribute("headNum", "num_heads"),          attribute("inputLayout", "layout"),
    attribute("innerPrecise", "inner_precise"), attribute("sparseMode", "sparse_mode")};
inline const Arguments kPseType{attribute("pseType", "pse_type")};
// The operator gives out first. softmaxOutOut and dpseOut are never written.
inline const Arguments kOutputs{output("softmaxMaxOut", 1), output("softmaxSumOut", 2),
                                attribute("softmaxOutOut"), output("attentionOutOut", 0)};
inline const Arguments kSaved{input("dy", "dy", kHalfOrFloat)};
inline const Arguments kStatistics{input("softmaxMaxOptional", "softmax_max", kFloat),
                                   input("softmaxSumOptional", "softmax_sum", kFloat),
                                   attribute("softmaxInOptional"),
                                   input("attentionInOptional", "attention_in", kHalfOrFloat)};
inline const Arguments kGradients{output("dqOut"), output("dkOut"), output("dvOut"),
                                  attribute("dpseOut")};

// Device rules: of all forms, and of the forward of packed sequences.
void check_tokens(const Call& call);
void check_pack(const Call& call);

// The forward of packed sequences: the operator's results with the arguments that reach the kernel.
torch::jit::Stack attention_of_pack(const Call& call);
OperatorArguments overwritten_arguments(const Call& call);

// In mode 0 the tokens only let the kernel leave out whole tiles: what the mask alone lets through
// within a tile is computed.
std::string mask_beyond_tokens(const Call& call);
inline const std::vector<KernelFault> kMaskFaults{{Harm::results, mask_beyond_tokens}};

}  // namespace cann_sim
