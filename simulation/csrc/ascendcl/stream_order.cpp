#include "ascendcl/stream_order.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <map>
#include <mutex>
#include <utility>

#include "ascendcl/runtime.h"

namespace cann_sim {
namespace {

void merge(Clock& clock, const Clock& other) {
  clock.resize(std::max(clock.size(), other.size()));
  for (size_t i = 0; i < other.size(); ++i) {
    clock[i] = std::max(clock[i], other[i]);
  }
}

// A piece of work: the count-th of a stream.
struct Work {
  size_t stream = 0;
  uint64_t count = 0;
  std::string name;

  bool is_known_to(const Clock& clock) const {
    return count == 0 || (stream < clock.size() && clock[stream] >= count);
  }
};

// Memory whose bytes have the same past.
struct Interval {
  uintptr_t end;
  Work written;
  std::vector<Work> read;  // since then, the last of each stream
};

struct Arrival {
  Work work;
  void* to;
  std::vector<char> data;
};

class Order {
 public:
  std::string add(aclrtStream stream, std::string_view name, const std::vector<Range>& reads,
                  const std::vector<Range>& writes) {
    const std::lock_guard lock(mutex_);
    const auto work = next(stream, name);
    const auto& clock = clocks_[work.stream];
    for (const auto* ranges : {&reads, &writes}) {
      for (const auto& range : *ranges) {
        if (auto error = touch(work, clock, range, ranges == &writes); !error.empty()) {
          return error;
        }
      }
    }
    return {};
  }

  Clock clock_of(aclrtStream stream) {
    const std::lock_guard lock(mutex_);
    return clocks_[number_of(stream)];
  }
  void stream_waits(aclrtStream stream, const Clock& other) {
    const std::lock_guard lock(mutex_);
    merge(clocks_[number_of(stream)], other);
  }
  void host_waits(const Clock& other) {
    const std::lock_guard lock(mutex_);
    merge(host_, other);
    deliver(host_);
    // Work that the host knows to be done comes before all later launches.
    std::erase_if(memory_, [&](const auto& entry) {
      const auto is_known = [&](const Work& work) { return work.is_known_to(host_); };
      return is_known(entry.second.written) && std::ranges::all_of(entry.second.read, is_known);
    });
  }

  Clock latest() {
    const std::lock_guard lock(mutex_);
    Clock all;
    for (const auto& clock : clocks_) {
      merge(all, clock);
    }
    return all;
  }

  void arrives(aclrtStream stream, void* to, const void* from, size_t bytes) {
    const std::lock_guard lock(mutex_);
    const auto* data = static_cast<const char*>(from);
    const auto number = number_of(stream);
    arrivals_.push_back({{number, clocks_[number].at(number), ""}, to, {data, data + bytes}});
    std::memset(to, 0x7F, bytes);
  }
  void deliver_to(aclrtStream stream) {
    const std::lock_guard lock(mutex_);
    deliver(clocks_[number_of(stream)]);
  }

  void forget(const void* begin, size_t bytes) {
    const std::lock_guard lock(mutex_);
    const auto first = reinterpret_cast<uintptr_t>(begin);
    split(first);
    split(first + bytes);
    memory_.erase(memory_.lower_bound(first), memory_.lower_bound(first + bytes));
  }

 private:
  size_t number_of(aclrtStream stream) {
    // A null stream stands for the host.
    const auto [place, is_new] = numbers_.try_emplace(stream, numbers_.size());
    if (is_new) {
      clocks_.resize(numbers_.size());
    }
    return place->second;
  }

  Work next(aclrtStream stream, std::string_view name) {
    const auto number = number_of(stream);
    auto& clock = clocks_[number];
    merge(clock, host_);
    clock.resize(std::max(clock.size(), number + 1));
    Work work{number, ++clock[number], std::string(name)};
    if (!stream) {
      merge(host_, clock);
      work.name += " on the host";
    } else {
      work.name += " on stream " + std::to_string(stream_id(stream));
    }
    return work;
  }

  void deliver(const Clock& clock) {
    std::erase_if(arrivals_, [&](const Arrival& arrival) {
      if (!arrival.work.is_known_to(clock)) {
        return false;
      }
      std::memcpy(arrival.to, arrival.data.data(), arrival.data.size());
      return true;
    });
  }

  // Makes an interval begin here if one contains it.
  void split(uintptr_t at) {
    auto next = memory_.upper_bound(at);
    if (next == memory_.begin()) {
      return;
    }
    auto& [begin, interval] = *std::prev(next);
    if (begin < at && at < interval.end) {
      auto second = interval;
      interval.end = at;
      memory_.emplace_hint(next, at, std::move(second));
    }
  }

  static std::string conflict(const Work& work, bool writes, const Work& before, bool wrote) {
    return "strict streams: " + work.name + (writes ? " writes" : " reads") + " memory that " +
           before.name + (wrote ? " writes" : " reads") +
           ", and nothing makes it wait for that: torch.npu.Stream.wait_stream, an event, "
           "synchronize, or, where the memory was freed, Tensor.record_stream";
  }

  std::string touch(const Work& work, const Clock& clock, const Range& range, bool writes) {
    if (!range.bytes) {
      return {};
    }
    auto at = reinterpret_cast<uintptr_t>(range.begin);
    const auto end = at + range.bytes;
    split(at);
    split(end);
    while (at < end) {
      auto place = memory_.lower_bound(at);
      if (place == memory_.end() || place->first > at) {
        const auto gap_end = place == memory_.end() ? end : std::min(end, place->first);
        place = memory_.emplace_hint(place, at, Interval{gap_end, {}, {}});
      }
      auto& interval = place->second;
      if (!interval.written.is_known_to(clock)) {
        return conflict(work, writes, interval.written, true);
      }
      if (writes) {
        for (const auto& reader : interval.read) {
          if (!reader.is_known_to(clock)) {
            return conflict(work, true, reader, false);
          }
        }
        interval.written = work;
        interval.read.clear();
      } else {
        std::erase_if(interval.read, [&](const Work& x) { return x.stream == work.stream; });
        interval.read.push_back(work);
      }
      at = interval.end;
    }
    return {};
  }

  std::mutex mutex_;
  std::map<aclrtStream, size_t> numbers_;
  std::vector<Clock> clocks_;
  Clock host_;
  std::map<uintptr_t, Interval> memory_;
  std::vector<Arrival> arrivals_;
};

Order& order() {
  static auto* instance = new Order;
  return *instance;
}

template <typename Function>
void where_strict(const Function& function) {
  if (streams_are_strict()) {
    function();
  }
}

}  // namespace

bool streams_are_strict() {
  static const bool strict = [] {
    const char* text = std::getenv("CANN_SIM_STREAMS");
    return text && std::string_view(text) == "strict";
  }();
  return strict;
}

std::string check_order(aclrtStream stream, std::string_view work, const std::vector<Range>& reads,
                        const std::vector<Range>& writes) {
  return streams_are_strict() ? order().add(stream, work, reads, writes) : std::string();
}

Clock recorded(aclrtStream stream) {
  return streams_are_strict() ? order().clock_of(stream) : Clock();
}
void stream_waits_for(aclrtStream stream, const Clock& recorded) {
  where_strict([&] { order().stream_waits(stream, recorded); });
}
void host_waits_for(const Clock& recorded) {
  where_strict([&] { order().host_waits(recorded); });
}
void host_waits_for_all() {
  where_strict([] { order().host_waits(order().latest()); });
}
void arrives_later(aclrtStream stream, void* to, const void* from, size_t bytes) {
  order().arrives(stream, to, from, bytes);
}
void deliver_to(aclrtStream stream) {
  where_strict([&] { order().deliver_to(stream); });
}
void forget(const void* begin, size_t bytes) {
  where_strict([&] { order().forget(begin, bytes); });
}

}  // namespace cann_sim
