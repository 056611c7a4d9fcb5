// The two phases of a call, and what it owns between them.
#pragma once

#include <acl/acl.h>

#include <array>
#include <cstdint>
#include <memory>
#include <string>

#include "npu/aclnn/executor_cache.h"
#include "npu/aclnn/launcher.h"
#include "npu/aclnn/torch_npu_compat.h"

namespace ascend_attn::aclnn {

// Messages of CANN and of torch_npu have several lines.
std::string on_one_line(std::string text);

// Where a call runs, and how: what the caller's thread has to say, which the task queue's thread
// cannot know.
struct CallContext {
  CallContext(const Function& function, ContextDeterminism deterministic,
              c10::ArrayRef<Fill> fills);

  void add_to(ExecutorKey& key) const;

  aclrtStream stream;
  ContextDeterminism deterministic;
  Fills fills;
  Determinism determinism;
  std::array<uint32_t, 2> cores{};
};

// A call whose first phase is over, or was not necessary: CANN had kept the executor of an earlier
// call. Either way the executor is the call's own, and is destroyed if no second phase follows.
class PreparedCall {
 public:
  PreparedCall(const Function& function, const Arguments& arguments, const CallContext& context,
               CallThread thread);
  ~PreparedCall() { end(); }
  PreparedCall(const PreparedCall&) = delete;
  PreparedCall& operator=(const PreparedCall&) = delete;

  uint64_t workspace_size() const { return workspace_size_; }
  // Writes the fills of the call and calls the second phase.
  int execute(void* workspace);

 private:
  struct Destroy {
    void operator()(aclOpExecutor* executor) const;
  };

  // The other constructor calls this one, so that the destructor runs when that one raises.
  PreparedCall(const Function& function, const CallContext& context)
      : function_(function), context_(context) {}
  void make_executor(const Arguments& arguments);
  void end();

  const Function& function_;
  CallContext context_;
  uint64_t workspace_size_ = 0;
  std::unique_ptr<aclOpExecutor, Destroy> executor_;
  std::shared_ptr<void> handles_;  // none beside an executor that CANN had kept
  bool has_memory_ = false;        // of CANN's pool for executors and handles
};

}  // namespace ascend_attn::aclnn
