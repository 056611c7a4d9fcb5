// The runtime of the simulated CANN: libascendcl.so. Device memory is host memory; streams are in
// streams.cpp, graphs in graphs.cpp. Signatures come from torch_npu's own acl headers, so that a
// function that does not match its declaration does not compile.
#include "ascendcl/runtime.h"

#include <acl/acl_op_compiler.h>
#include <dlfcn.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <initializer_list>
#include <map>
#include <memory>
#include <mutex>
#include <string_view>
#include <utility>
#include <vector>

#include "ascendcl/stream_order.h"

namespace cann_sim {
namespace {

constexpr int kMostDevices = 16;
constexpr int kParameters = 64;
constexpr size_t kMemoryPerDevice = size_t{8} << 30;
// Fills memory before anything is written to it: a large number or a NaN in every float, an index
// out of every range.
constexpr int kPoison = 0x7F;

struct Context {
  std::atomic<int64_t> parameters[kParameters] = {};
};

// Every allocation of every device, by address.
class Memory {
 public:
  void* allocate(int device, size_t size) {
    const std::lock_guard lock(mutex_);
    if (used_[device] + size > kMemoryPerDevice) {
      return nullptr;
    }
    void* address = std::aligned_alloc(512, (size + 511) / 512 * 512);
    if (address) {
      std::memset(address, kPoison, size);
      used_[device] += size;
      blocks_[address] = {device, size};
    }
    return address;
  }

  void release(void* address) {
    const std::lock_guard lock(mutex_);
    if (const auto block = blocks_.find(address); block != blocks_.end()) {
      used_[block->second.device] -= block->second.size;
      forget(address, block->second.size);
      blocks_.erase(block);
      std::free(address);
    }
  }

  int device_of(const void* address) const {
    const std::lock_guard lock(mutex_);
    auto block = blocks_.upper_bound(address);
    if (block == blocks_.begin()) {
      return -1;
    }
    --block;
    const auto* begin = static_cast<const char*>(block->first);
    return static_cast<const char*>(address) < begin + block->second.size ? block->second.device
                                                                          : -1;
  }

  size_t used(int device) const {
    const std::lock_guard lock(mutex_);
    return used_[device];
  }

 private:
  struct Block {
    int device;
    size_t size;
  };
  mutable std::mutex mutex_;
  std::map<const void*, Block> blocks_;
  size_t used_[kMostDevices] = {};
};

// Outlives every static object of the libraries that still free memory at exit.
Memory& memory() {
  static auto* instance = new Memory;
  return *instance;
}

Context contexts[kMostDevices];
std::atomic<int64_t> process_parameters[kParameters];

thread_local int thread_device = 0;
thread_local std::string thread_error;
thread_local std::string reported_error;

int device_count() {
  static const int count = [] {
    const char* text = std::getenv("CANN_SIM_DEVICES");
    const int given = text ? std::atoi(text) : 2;
    if (given < 1 || given > kMostDevices) {
      std::fprintf(stderr, "CANN_SIM_DEVICES: expected 1 to %d, got %s\n", kMostDevices, text);
      std::abort();
    }
    return given;
  }();
  return count;
}

template <typename Function>
aclError in_order(aclrtStream stream, const char* work, std::initializer_list<Range> reads,
                  std::initializer_list<Range> writes, Function function) {
  if (auto error = check_order(stream, work, reads, writes); !error.empty()) {
    set_error_message(std::move(error));
    return ACL_ERROR_INTERNAL_ERROR;
  }
  return submit(stream, [function] {
    function();
    return ACL_SUCCESS;
  });
}

}  // namespace

int device_of_address(const void* address) { return memory().device_of(address); }
int current_device() { return thread_device; }
int64_t system_parameter(aclSysParamOpt option) {
  return contexts[thread_device].parameters[option];
}
void set_error_message(std::string message) { thread_error = std::move(message); }

Product product() {
  const char* text = std::getenv("CANN_SIM_PRODUCT");
  const std::string_view name = text ? text : "";
  return name == "950"    ? Product::p950
         : name == "A3"   ? Product::a3
         : name == "310P" ? Product::p310
                          : Product::a2;
}

CannVersion cann_version() {
  const char* text = std::getenv("CANN_SIM_VERSION");
  CannVersion version;
  if (text && std::sscanf(text, "%d.%d", &version.major, &version.minor) != 2) {
    std::fprintf(stderr, "CANN_SIM_VERSION: expected a version such as 9.1, got %s\n", text);
    std::abort();
  }
  return version;
}

}  // namespace cann_sim

using namespace cann_sim;

extern "C" {

// torch_npu is loaded by now, with all of its kernels.
aclError aclInit(const char*) {
  Dl_info here;
  dladdr(reinterpret_cast<void*>(&aclInit), &here);
  const auto library = std::filesystem::path(here.dli_fname).parent_path() / "libcpu_fallback.so";
  void* handle = dlopen(library.c_str(), RTLD_NOW);
  if (!handle) {
    std::fprintf(stderr, "the simulated CANN: %s\n", dlerror());
    return ACL_ERROR_FAILURE;
  }
  reinterpret_cast<void (*)()>(dlsym(handle, "cann_sim_run_rest_on_cpu"))();
  return ACL_SUCCESS;
}
aclError aclFinalize() { return ACL_SUCCESS; }

const char* aclGetRecentErrMsg() {
  reported_error = std::exchange(thread_error, {});
  return reported_error.c_str();
}

aclError aclsysGetCANNVersion(aclCANNPackageName, aclCANNPackageVersion* version) {
  const auto [major, minor] = cann_version();
  *version = {};
  std::strcpy(version->version, cann_version().text().c_str());
  std::strcpy(version->majorVersion, std::to_string(major).c_str());
  std::strcpy(version->minorVersion, std::to_string(minor).c_str());
  std::strcpy(version->releaseVersion, "0");
  return ACL_SUCCESS;
}
aclError aclsysGetVersionStr(char*, char* version) {
  std::strcpy(version, cann_version().text().c_str());
  return ACL_SUCCESS;
}

const char* aclrtGetSocName() {
  const char* name = std::getenv("CANN_SIM_SOC");
  return name ? name : "Ascend910B2";
}

// The capabilities of an Ascend 910B2, for every product.
aclError aclGetDeviceCapability(uint32_t, aclDeviceInfo info, int64_t* value) {
  *value = info == ACL_DEVICE_INFO_AI_CORE_NUM       ? 24
           : info == ACL_DEVICE_INFO_VECTOR_CORE_NUM ? 48
                                                     : int64_t{192} << 20;
  return ACL_SUCCESS;
}

// torch's own operators call aclnn, not the older operators that CANN compiles: as on a device.
constexpr std::string_view kJitCompile = "disable";
size_t aclGetCompileoptSize(aclCompileOpt) { return kJitCompile.size() + 1; }
aclError aclGetCompileopt(aclCompileOpt, char* value, size_t size) {
  std::snprintf(value, size, "%s", kJitCompile.data());
  return ACL_SUCCESS;
}

// Devices and contexts.

aclError aclrtGetDeviceCount(uint32_t* count) {
  *count = device_count();
  return ACL_SUCCESS;
}
aclError aclrtSetDevice(int32_t device) {
  if (device < 0 || device >= device_count()) {
    return ACL_ERROR_INVALID_PARAM;
  }
  thread_device = device;
  return ACL_SUCCESS;
}
aclError aclrtGetDevice(int32_t* device) {
  *device = thread_device;
  return ACL_SUCCESS;
}
aclError aclrtGetCurrentContext(aclrtContext* context) {
  *context = &contexts[thread_device];
  return ACL_SUCCESS;
}
aclError aclrtSetCurrentContext(aclrtContext context) {
  thread_device = static_cast<int>(static_cast<Context*>(context) - contexts);
  return ACL_SUCCESS;
}
aclError aclrtGetPrimaryCtxState(int32_t, uint32_t* flags, int32_t* active) {
  *flags = 0;
  *active = 1;
  return ACL_SUCCESS;
}
aclError aclrtDeviceCanAccessPeer(int32_t* can_access, int32_t, int32_t) {
  *can_access = 1;
  return ACL_SUCCESS;
}
// A parameter of the process is one of all of its contexts; kernels read that of their context.
aclError aclrtGetSysParamOpt(aclSysParamOpt option, int64_t* value) {
  *value = process_parameters[option];
  return ACL_SUCCESS;
}
aclError aclrtSetSysParamOpt(aclSysParamOpt option, int64_t value) {
  process_parameters[option] = value;
  for (auto& context : contexts) {
    context.parameters[option] = value;
  }
  return ACL_SUCCESS;
}
aclError aclrtCtxGetSysParamOpt(aclSysParamOpt option, int64_t* value) {
  *value = system_parameter(option);
  return ACL_SUCCESS;
}
aclError aclrtCtxSetSysParamOpt(aclSysParamOpt option, int64_t value) {
  contexts[thread_device].parameters[option] = value;
  return ACL_SUCCESS;
}
aclError aclrtGetDeviceSatMode(aclrtFloatOverflowMode* mode) {
  *mode = ACL_RT_OVERFLOW_MODE_INFNAN;
  return ACL_SUCCESS;
}

// Memory.

aclError aclrtMalloc(void** address, size_t size, aclrtMemMallocPolicy) {
  *address = memory().allocate(thread_device, size);
  return *address ? ACL_SUCCESS : ACL_ERROR_RT_MEMORY_ALLOCATION;
}
aclError aclrtMallocAlign32(void** address, size_t size, aclrtMemMallocPolicy policy) {
  return aclrtMalloc(address, size, policy);
}
aclError aclrtFree(void* address) {
  memory().release(address);
  return ACL_SUCCESS;
}
aclError aclrtMallocHost(void** address, size_t size) {
  *address = std::aligned_alloc(64, (size + 63) / 64 * 64);
  return *address ? ACL_SUCCESS : ACL_ERROR_RT_MEMORY_ALLOCATION;
}
aclError aclrtFreeHost(void* address) {
  std::free(address);
  return ACL_SUCCESS;
}
aclError aclrtGetMemInfo(aclrtMemAttr, size_t* free, size_t* total) {
  *total = kMemoryPerDevice;
  *free = kMemoryPerDevice - memory().used(thread_device);
  return ACL_SUCCESS;
}
aclError aclrtMemcpy(void* to, size_t, const void* from, size_t size, aclrtMemcpyKind) {
  if (const auto error = may_wait_for_device("aclrtMemcpy")) {
    return error;
  }
  return in_order(nullptr, "a copy", {{from, size}}, {{to, size}}, [=] {
    deliver_to(nullptr);
    std::memmove(to, from, size);
  });
}
aclError aclrtMemcpyAsync(void* to, size_t, const void* from, size_t size, aclrtMemcpyKind kind,
                          aclrtStream stream) {
  return in_order(stream, "a copy", {{from, size}}, {{to, size}}, [=] {
    if (streams_are_strict() && kind == ACL_MEMCPY_DEVICE_TO_HOST) {
      arrives_later(stream, to, from, size);
      return;
    }
    deliver_to(stream);
    std::memmove(to, from, size);
  });
}
aclError aclrtMemset(void* to, size_t, int32_t value, size_t size) {
  return in_order(nullptr, "a fill", {}, {{to, size}}, [=] { std::memset(to, value, size); });
}
aclError aclrtMemsetAsync(void* to, size_t, int32_t value, size_t size, aclrtStream stream) {
  return in_order(stream, "a fill", {}, {{to, size}}, [=] { std::memset(to, value, size); });
}

}  // extern "C"
