#include "core/value_checks.h"

namespace ascend_attn {

std::atomic<int> value_check_requests{0};

}  // namespace ascend_attn
