// What libopapi.so of the simulation asks of its runtime library.
#pragma once

#include <acl/acl.h>

#include <cstdint>
#include <functional>
#include <string>

namespace cann_sim {

using Task = std::function<int()>;

// Runs the task at once, or, while the stream is being captured, appends it to the graph.
int submit(aclrtStream stream, Task task);

int device_of_stream(aclrtStream stream);
// The device that allocated this address, or -1.
int device_of_address(const void* address);
int stream_id(aclrtStream stream);
int current_device();
int64_t system_parameter(aclSysParamOpt option);

// What aclGetRecentErrMsg will say, once, on this thread.
void set_error_message(std::string message);

}  // namespace cann_sim
