// With strict streams, work on a stream may touch memory that work on another one has touched only
// if something orders the two: an event that the stream waits for, or a host that has waited.
// Everything has run by then, so that a mistake shows in every run, and not in some.
#pragma once

#include <acl/acl.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace cann_sim {

struct Range {
  const void* begin;
  size_t bytes;
};

// The work that has happened before: how many pieces of each stream, by its number.
using Clock = std::vector<uint64_t>;

// Whether CANN_SIM_STREAMS is "strict". Without it, none of the following does anything.
bool streams_are_strict();

// A piece of work on a stream; the error that it makes with what came before, or nothing.
std::string check_order(aclrtStream stream, std::string_view work, const std::vector<Range>& reads,
                        const std::vector<Range>& writes);

Clock recorded(aclrtStream stream);
void stream_waits_for(aclrtStream stream, const Clock& recorded);
void host_waits_for(const Clock& recorded);
void host_waits_for_all();

// A copy to the host arrives when the host has waited for it; until then the memory holds 0x7F.
void arrives_later(aclrtStream stream, void* to, const void* from, size_t bytes);
// Delivers the copies that have arrived to a stream that reads memory of the host.
void deliver_to(aclrtStream stream);

// The memory is another's from now on.
void forget(const void* begin, size_t bytes);

}  // namespace cann_sim
