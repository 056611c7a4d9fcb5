// The interface of the simulation's runtime library for its libopapi.so.
#pragma once

#include <acl/acl.h>

#include <compare>
#include <cstdint>
#include <functional>
#include <string>

namespace cann_sim {

enum class Product { a2, a3, p950, p310 };

struct CannVersion {
  int major = 9;
  int minor = 1;

  auto operator<=>(const CannVersion&) const = default;
  std::string text() const { return std::to_string(major) + "." + std::to_string(minor) + ".0"; }
};

inline constexpr CannVersion kCann90{9, 0};
inline constexpr CannVersion kCann91{9, 1};

// The choice of the environment: CANN_SIM_PRODUCT and CANN_SIM_VERSION.
Product product();
CannVersion cann_version();

using Task = std::function<int()>;

// Runs the task at once; when the stream no longer waits for an event; or, while the stream is
// being captured, in every replay of the graph.
int submit(aclrtStream stream, Task task);

// Whether tasks of the stream become part of a graph.
bool is_capturing(aclrtStream stream);
// While they do, an operator of torch runs at once all the same, for the sizes of its results: what
// it overwrites there is put back when the capture ends.
void save_until_recorded(aclrtStream stream, void* address, size_t bytes);
// Whether any stream is captured.
bool is_recording_anywhere();
// Whether they wait for an event.
bool is_waiting(aclrtStream stream);

// A kernel has failed: the next wait of the host, for whatever it is, returns the status.
void fail_at_wait(int status, std::string message);

// The error of a call that waits for all work, while a graph is being captured.
aclError may_wait_for_device(const char* call);

int device_of_stream(aclrtStream stream);
// The device that allocated this address, or -1.
int device_of_address(const void* address);
int stream_id(aclrtStream stream);
// How many cube cores a stream may use.
uint32_t cores_of_stream(aclrtStream stream);
int current_device();
// The parameter of the current context.
int64_t system_parameter(aclSysParamOpt option);

// Is called where torch_npu prepares an operator that CANN compiles, on the thread of the call, and
// may throw.
void set_compiled_operator_check(void (*function)());

// Sets the text that aclGetRecentErrMsg returns, once, on this thread.
void set_error_message(std::string message);

}  // namespace cann_sim
