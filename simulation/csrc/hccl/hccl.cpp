// The simulated HCCL: communication between the processes of one machine, each rank one process.
// Streams run at once, so a function returns when its part is done. Sums are made in the order of
// the ranks, on every rank the same.
#include <hccl/hccl.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "ascendcl/report.h"
#include "ascendcl/runtime.h"
#include "ascendcl/stream_order.h"
#include "hccl/exchange.h"
#include "hccl/reductions.h"

using namespace cann_sim;

namespace {

struct Communicator {
  Communicator(const std::string& place, uint32_t ranks, uint32_t rank, std::string name)
      : connections(place, static_cast<int>(ranks), static_cast<int>(rank)),
        place(place),
        name(std::move(name)) {}

  Connections connections;
  std::string place;
  std::string name;
};

HcclResult failed(HcclResult result, const std::string& message) {
  set_error_message(message);
  return result;
}

HcclResult create(const std::string& place, uint32_t ranks, uint32_t rank, const std::string& name,
                  HcclComm* result) {
  try {
    *result = new Communicator(place, ranks, rank, name);
    return HCCL_SUCCESS;
  } catch (const std::exception& error) {
    return failed(HCCL_E_TIMEOUT, std::string("HcclCommInit: ") + error.what());
  }
}

// The memory that a function reads and writes on this rank.
struct Memory {
  std::vector<Range> reads = {};
  std::vector<Range> writes = {};
};

Range range(const void* buffer, uint64_t count, HcclDataType dtype, HcclComm of_all_ranks = {}) {
  const auto ranks =
      of_all_ranks ? static_cast<Communicator*>(of_all_ranks)->connections.ranks() : 1;
  return {buffer, static_cast<size_t>(ranks) * count * size_of(dtype)};
}

// Runs what a function does on its stream.
template <typename Function>
HcclResult run(const char* function, HcclComm comm, aclrtStream stream, const Memory& memory,
               Function body) {
  auto& communicator = *static_cast<Communicator*>(comm);
  count(Outcome::aclnn, function);
  if (const auto error = check_order(stream, function, memory.reads, memory.writes);
      !error.empty()) {
    return failed(HCCL_E_RUNTIME, error);
  }
  const int status = submit(stream, [function, &communicator, body = std::move(body)]() -> int {
    try {
      body(Exchange(function, communicator.connections));
      return HCCL_SUCCESS;
    } catch (const std::exception& error) {
      return failed(HCCL_E_REMOTE, std::string(function) + ": rank " +
                                       std::to_string(communicator.connections.rank()) + ": " +
                                       error.what());
    }
  });
  return static_cast<HcclResult>(status);
}

template <typename Function>
HcclResult run_reduction(const char* function, HcclDataType dtype, HcclComm comm,
                         aclrtStream stream, const Memory& memory, Function body) {
  if (!reduction_of(dtype)) {
    const auto message = std::string(function) +
                         ": dtype: expected one that an NPU reduces (int8 to int64, float16, "
                         "bfloat16, float32), got HcclDataType " +
                         std::to_string(dtype);
    count(Outcome::refused, message);
    return failed(HCCL_E_NOT_SUPPORT, message);
  }
  return run(function, comm, stream, memory, std::move(body));
}

// Receives between HcclGroupStart and HcclGroupEnd wait until all is sent.
thread_local int open_groups = 0;
thread_local std::vector<std::function<HcclResult()>> receive_later;

char* bytes_of(const void* buffer) { return static_cast<char*>(const_cast<void*>(buffer)); }

}  // namespace

extern "C" {

// Communicators.

HcclResult HcclGetRootInfo(HcclRootInfo* info) {
  static std::atomic<int> number{0};
  const auto place = "ascend_attn_ops.simulate/" + std::to_string(getpid()) + "/" +
                     std::to_string(std::random_device{}()) + "/" + std::to_string(number++);
  *info = {};
  place.copy(info->internal, sizeof(info->internal) - 1);
  return HCCL_SUCCESS;
}
HcclResult HcclCommInitRootInfo(uint32_t ranks, const HcclRootInfo* info, uint32_t rank,
                                HcclComm* comm) {
  return HcclCommInitRootInfoConfig(ranks, info, rank, nullptr, comm);
}
HcclResult HcclCommInitRootInfoConfig(uint32_t ranks, const HcclRootInfo* info, uint32_t rank,
                                      const HcclCommConfig* config, HcclComm* comm) {
  const std::string name =
      config && config->hcclCommName[0] ? config->hcclCommName : info->internal;
  return create(info->internal, ranks, rank, name, comm);
}
HcclResult HcclCreateSubCommConfig(HcclComm* comm, uint32_t ranks, uint32_t*, uint64_t id,
                                   uint32_t rank, HcclCommConfig*, HcclComm* sub) {
  const auto place = static_cast<Communicator*>(*comm)->place + "/" + std::to_string(id);
  return create(place, ranks, rank, place, sub);
}
HcclResult HcclCommDestroy(HcclComm comm) {
  delete static_cast<Communicator*>(comm);
  return HCCL_SUCCESS;
}
HcclResult HcclGetCommName(HcclComm comm, char* name) {
  std::strncpy(name, static_cast<Communicator*>(comm)->name.c_str(), COMM_NAME_MAX_LENGTH - 1);
  name[COMM_NAME_MAX_LENGTH - 1] = '\0';
  return HCCL_SUCCESS;
}
HcclResult HcclGetRankSize(HcclComm comm, uint32_t* ranks) {
  *ranks = static_cast<uint32_t>(static_cast<Communicator*>(comm)->connections.ranks());
  return HCCL_SUCCESS;
}
HcclResult HcclGetRankId(HcclComm comm, uint32_t* rank) {
  *rank = static_cast<uint32_t>(static_cast<Communicator*>(comm)->connections.rank());
  return HCCL_SUCCESS;
}
HcclResult HcclGetCommAsyncError(HcclComm, HcclResult* error) {
  *error = HCCL_SUCCESS;
  return HCCL_SUCCESS;
}
const char* HcclGetErrorString(HcclResult) { return aclGetRecentErrMsg(); }
uint32_t HcclGetCommConfigCapability() { return 0; }
HcclResult HcclSetConfig(HcclConfig, HcclConfigValue) { return HCCL_SUCCESS; }

// Collective operations.

HcclResult HcclBarrier(HcclComm comm, aclrtStream stream) {
  return run("HcclBarrier", comm, stream, {}, [](const Exchange& exchange) {
    exchange.for_others([&](int other) { exchange.send(other, nullptr, 0); });
    exchange.for_others([&](int other) { exchange.receive(other, nullptr, 0); });
  });
}

HcclResult HcclBroadcast(void* buffer, uint64_t count, HcclDataType dtype, uint32_t root,
                         HcclComm comm, aclrtStream stream) {
  return run("HcclBroadcast", comm, stream, {.writes = {range(buffer, count, dtype)}},
             [=](const Exchange& exchange) {
               const auto bytes = count * size_of(dtype);
               if (exchange.rank() == static_cast<int>(root)) {
                 exchange.for_others([&](int other) { exchange.send(other, buffer, bytes); });
               } else {
                 exchange.receive(static_cast<int>(root), buffer, bytes);
               }
             });
}

HcclResult HcclAllGather(void* source, void* target, uint64_t count, HcclDataType dtype,
                         HcclComm comm, aclrtStream stream) {
  return run("HcclAllGather", comm, stream,
             {{range(source, count, dtype)}, {range(target, count, dtype, comm)}},
             [=](const Exchange& exchange) {
               exchange.all_gather(bytes_of(source), bytes_of(target),
                                   Parts::equal(exchange.ranks(), count * size_of(dtype)));
             });
}
HcclResult HcclAllGatherV(void* source, uint64_t, void* target, const void* counts,
                          const void* displacements, HcclDataType dtype, HcclComm comm,
                          aclrtStream stream) {
  const int ranks = static_cast<Communicator*>(comm)->connections.ranks();
  return run("HcclAllGatherV", comm, stream, {},
             [=, parts = Parts::given(ranks, counts, displacements, size_of(dtype))](
                 const Exchange& exchange) {
               exchange.all_gather(bytes_of(source), bytes_of(target), parts);
             });
}

HcclResult HcclAllReduce(void* source, void* target, uint64_t count, HcclDataType dtype,
                         HcclReduceOp op, HcclComm comm, aclrtStream stream) {
  return run_reduction(
      "HcclAllReduce", dtype, comm, stream,
      {{range(source, count, dtype)}, {range(target, count, dtype)}},
      [=](const Exchange& exchange) {
        const auto ranks = static_cast<uint64_t>(exchange.ranks());
        std::vector<size_t> sizes(ranks);
        for (uint64_t i = 0; i < ranks; ++i) {
          sizes[i] = (count * (i + 1) / ranks - count * i / ranks) * size_of(dtype);
        }
        const Parts parts(std::move(sizes));
        const auto own = static_cast<size_t>(exchange.rank());
        std::vector<char> reduced(parts.sizes[own]);
        exchange.reduce_scatter(bytes_of(source), reduced.data(), parts, dtype, op);
        exchange.all_gather(reduced.data(), bytes_of(target), parts);
      });
}

HcclResult HcclReduceScatter(void* source, void* target, uint64_t count, HcclDataType dtype,
                             HcclReduceOp op, HcclComm comm, aclrtStream stream) {
  return run_reduction("HcclReduceScatter", dtype, comm, stream,
                       {{range(source, count, dtype, comm)}, {range(target, count, dtype)}},
                       [=](const Exchange& exchange) {
                         exchange.reduce_scatter(
                             bytes_of(source), bytes_of(target),
                             Parts::equal(exchange.ranks(), count * size_of(dtype)), dtype, op);
                       });
}
HcclResult HcclReduceScatterV(void* source, const void* counts, const void* displacements,
                              void* target, uint64_t, HcclDataType dtype, HcclReduceOp op,
                              HcclComm comm, aclrtStream stream) {
  const int ranks = static_cast<Communicator*>(comm)->connections.ranks();
  return run_reduction("HcclReduceScatterV", dtype, comm, stream, {},
                       [=, parts = Parts::given(ranks, counts, displacements, size_of(dtype))](
                           const Exchange& exchange) {
                         exchange.reduce_scatter(bytes_of(source), bytes_of(target), parts, dtype,
                                                 op);
                       });
}

HcclResult HcclReduce(void* source, void* target, uint64_t count, HcclDataType dtype,
                      HcclReduceOp op, uint32_t root, HcclComm comm, aclrtStream stream) {
  return run_reduction("HcclReduce", dtype, comm, stream, {.reads = {range(source, count, dtype)}},
                       [=](const Exchange& exchange) {
                         const auto bytes = count * size_of(dtype);
                         if (exchange.rank() == static_cast<int>(root)) {
                           exchange.reduce_received(bytes_of(source), bytes_of(target), bytes,
                                                    dtype, op);
                         } else {
                           exchange.send(static_cast<int>(root), source, bytes);
                         }
                       });
}

HcclResult HcclScatter(void* source, void* target, uint64_t count, HcclDataType dtype,
                       uint32_t root, HcclComm comm, aclrtStream stream) {
  return run("HcclScatter", comm, stream, {.writes = {range(target, count, dtype)}},
             [=](const Exchange& exchange) {
               const auto bytes = count * size_of(dtype);
               if (exchange.rank() != static_cast<int>(root)) {
                 exchange.receive(static_cast<int>(root), target, bytes);
                 return;
               }
               const auto part = [&](int rank) {
                 return bytes_of(source) + static_cast<size_t>(rank) * bytes;
               };
               exchange.for_others([&](int other) { exchange.send(other, part(other), bytes); });
               if (bytes) {
                 std::memmove(target, part(exchange.rank()), bytes);
               }
             });
}

HcclResult HcclAlltoAll(const void* source, uint64_t count, HcclDataType dtype, const void* target,
                        uint64_t, HcclDataType, HcclComm comm, aclrtStream stream) {
  return run("HcclAlltoAll", comm, stream,
             {{range(source, count, dtype, comm)}, {range(target, count, dtype, comm)}},
             [=](const Exchange& exchange) {
               const auto parts = Parts::equal(exchange.ranks(), count * size_of(dtype));
               exchange.all_to_all(bytes_of(source), parts, bytes_of(target), parts);
             });
}
HcclResult HcclAlltoAllV(const void* source, const void* sent, const void* sent_at,
                         HcclDataType sent_dtype, const void* target, const void* got,
                         const void* got_at, HcclDataType got_dtype, HcclComm comm,
                         aclrtStream stream) {
  const int ranks = static_cast<Communicator*>(comm)->connections.ranks();
  return run("HcclAlltoAllV", comm, stream, {},
             [=, out = Parts::given(ranks, sent, sent_at, size_of(sent_dtype)),
              in = Parts::given(ranks, got, got_at, size_of(got_dtype))](const Exchange& exchange) {
               exchange.all_to_all(bytes_of(source), out, bytes_of(target), in);
             });
}
HcclResult HcclAlltoAllVC(const void* source, const void* matrix, HcclDataType sent_dtype,
                          const void* target, HcclDataType got_dtype, HcclComm comm,
                          aclrtStream stream) {
  const auto& connections = static_cast<Communicator*>(comm)->connections;
  const auto ranks = static_cast<size_t>(connections.ranks());
  const auto rank = static_cast<size_t>(connections.rank());
  // Row i is what rank i sends.
  const auto* counts = static_cast<const uint64_t*>(matrix);
  std::vector<size_t> sent(ranks);
  std::vector<size_t> got(ranks);
  for (size_t other = 0; other < ranks; ++other) {
    sent[other] = counts[rank * ranks + other] * size_of(sent_dtype);
    got[other] = counts[other * ranks + rank] * size_of(got_dtype);
  }
  return run("HcclAlltoAllVC", comm, stream, {},
             [=, out = Parts(sent), in = Parts(got)](const Exchange& exchange) {
               exchange.all_to_all(bytes_of(source), out, bytes_of(target), in);
             });
}

// From one rank to another.

HcclResult HcclSend(void* source, uint64_t count, HcclDataType dtype, uint32_t to, HcclComm comm,
                    aclrtStream stream) {
  return run("HcclSend", comm, stream, {.reads = {range(source, count, dtype)}},
             [=](const Exchange& exchange) {
               exchange.send(static_cast<int>(to), source, count * size_of(dtype));
             });
}
HcclResult HcclRecv(void* target, uint64_t count, HcclDataType dtype, uint32_t from, HcclComm comm,
                    aclrtStream stream) {
  const auto receive = [=] {
    // In the words of the sender.
    return run("HcclSend", comm, stream, {.writes = {range(target, count, dtype)}},
               [=](const Exchange& exchange) {
                 exchange.receive(static_cast<int>(from), target, count * size_of(dtype));
               });
  };
  if (open_groups == 0) {
    return receive();
  }
  receive_later.emplace_back(receive);
  return HCCL_SUCCESS;
}
HcclResult HcclGroupStart() {
  ++open_groups;
  return HCCL_SUCCESS;
}
HcclResult HcclGroupEnd() {
  if (--open_groups > 0) {
    return HCCL_SUCCESS;
  }
  for (const auto& receive : std::exchange(receive_later, {})) {
    if (const auto result = receive(); result != HCCL_SUCCESS) {
      return result;
    }
  }
  return HCCL_SUCCESS;
}
HcclResult HcclBatchSendRecv(HcclSendRecvItem* items, uint32_t number, HcclComm comm,
                             aclrtStream stream) {
  return run(
      "HcclBatchSendRecv", comm, stream, {},
      [batch = std::vector<HcclSendRecvItem>(items, items + number)](const Exchange& exchange) {
        for (const bool sends : {true, false}) {
          for (const auto& [type, buffer, count, dtype, other] : batch) {
            const auto bytes = count * size_of(dtype);
            if (sends && type == HCCL_SEND) {
              exchange.send(static_cast<int>(other), buffer, bytes);
            } else if (!sends && type == HCCL_RECV) {
              exchange.receive(static_cast<int>(other), buffer, bytes);
            }
          }
        }
      });
}

}  // extern "C"
