#include "hccl/connections.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <mutex>
#include <string_view>
#include <thread>
#include <utility>

namespace cann_sim {
namespace {

using Clock = std::chrono::steady_clock;

// Seconds, by the variables that HCCL reads, and its defaults.
std::chrono::seconds timeout(const char* variable, int usual) {
  const char* text = std::getenv(variable);
  const int given = text ? std::atoi(text) : 0;
  return std::chrono::seconds(given > 0 ? given : usual);
}

struct Header {
  std::array<char, 24> function;
  uint64_t bytes;
};

Header header_of(std::string_view function, size_t bytes) {
  Header header{{}, bytes};
  function.copy(header.function.data(), header.function.size() - 1);
  return header;
}

// In the abstract namespace: nothing is left behind in a file system.
std::pair<sockaddr_un, socklen_t> address_of(const std::string& place, int rank) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  const auto name = place + "/" + std::to_string(rank);
  if (name.size() + 1 > sizeof(address.sun_path)) {
    throw ConnectionError("the name of a communicator is too long: " + name);
  }
  std::memcpy(address.sun_path + 1, name.data(), name.size());
  return {address, static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size())};
}

int new_socket() {
  const int socket = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (socket < 0) {
    throw ConnectionError(std::string("no socket: ") + std::strerror(errno));
  }
  return socket;
}

int connect_to(const std::string& place, int rank, Clock::time_point deadline) {
  const auto [address, size] = address_of(place, rank);
  while (true) {
    const int socket = new_socket();
    if (::connect(socket, reinterpret_cast<const sockaddr*>(&address), size) == 0) {
      return socket;
    }
    ::close(socket);
    if (Clock::now() > deadline) {
      throw ConnectionError("rank " + std::to_string(rank) +
                            " has not come (HCCL_CONNECT_TIMEOUT)");
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
}

bool is_readable(int socket, Clock::time_point deadline) {
  while (true) {
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now()).count();
    pollfd entry{socket, POLLIN, 0};
    const int ready = ::poll(&entry, 1, static_cast<int>(std::max<int64_t>(left, 0)));
    if (ready >= 0 || errno != EINTR) {
      return ready > 0;
    }
  }
}

// False where the other side has ended.
bool write_all(int socket, const char* data, size_t bytes) {
  while (bytes) {
    const auto written = ::send(socket, data, bytes, MSG_NOSIGNAL);
    if (written < 0 && errno == EINTR) {
      continue;
    }
    if (written <= 0) {
      return false;
    }
    data += written;
    bytes -= static_cast<size_t>(written);
  }
  return true;
}

}  // namespace

// The socket to a rank, and the thread that writes to it: two ranks that send to each other at the
// same time must not wait for each other.
class Connections::Peer {
 public:
  Peer(int rank, int socket) : rank_(rank), socket_(socket), writer_([this] { write(); }) {}

  ~Peer() {
    {
      const std::lock_guard lock(mutex_);
      ending_ = true;
    }
    changed_.notify_all();
    writer_.join();
    ::close(socket_);
  }
  Peer(const Peer&) = delete;
  Peer& operator=(const Peer&) = delete;

  void send(const Header& header, const void* data) {
    std::vector<char> message(sizeof(header) + header.bytes);
    std::memcpy(message.data(), &header, sizeof(header));
    if (header.bytes) {
      std::memcpy(message.data() + sizeof(header), data, header.bytes);
    }
    {
      const std::lock_guard lock(mutex_);
      messages_.push_back(std::move(message));
    }
    changed_.notify_all();
  }

  void flush() {
    std::unique_lock lock(mutex_);
    changed_.wait_for(lock, std::chrono::seconds(10),
                      [this] { return idle_ && messages_.empty(); });
  }

  void receive(const Header& expected, void* data) {
    const auto deadline = Clock::now() + timeout("HCCL_EXEC_TIMEOUT", 1836);
    Header header{};
    read(&header, sizeof(header), deadline);
    if (header.function != expected.function || header.bytes != expected.bytes) {
      throw ConnectionError("rank " + std::to_string(rank_) + " sends " +
                            std::to_string(header.bytes) + " bytes in " + header.function.data() +
                            ", where " + std::to_string(expected.bytes) + " are expected in " +
                            expected.function.data());
    }
    read(data, header.bytes, deadline);
  }

 private:
  void read(void* data, size_t bytes, Clock::time_point deadline) {
    auto* at = static_cast<char*>(data);
    while (bytes) {
      if (!is_readable(socket_, deadline)) {
        throw ConnectionError("rank " + std::to_string(rank_) +
                              " has sent nothing for too long (HCCL_EXEC_TIMEOUT)");
      }
      const auto got = ::recv(socket_, at, bytes, 0);
      if (got < 0 && errno == EINTR) {
        continue;
      }
      if (got <= 0) {
        throw ConnectionError("rank " + std::to_string(rank_) + " has ended");
      }
      at += got;
      bytes -= static_cast<size_t>(got);
    }
  }

  void write() {
    std::unique_lock lock(mutex_);
    while (true) {
      changed_.wait(lock, [this] { return ending_ || !messages_.empty(); });
      if (messages_.empty()) {
        return;
      }
      const auto message = std::move(messages_.front());
      messages_.pop_front();
      idle_ = false;
      lock.unlock();
      // That the other rank has ended, this one finds out when it waits for it.
      write_all(socket_, message.data(), message.size());
      lock.lock();
      idle_ = true;
      changed_.notify_all();
    }
  }

  int rank_;
  int socket_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::vector<char>> messages_;
  bool idle_ = true;
  bool ending_ = false;
  std::thread writer_;  // last: it uses all of the others
};

Connections::Connections(const std::string& place, int ranks, int rank)
    : rank_(rank), peers_(static_cast<size_t>(ranks)) {
  const auto deadline = Clock::now() + timeout("HCCL_CONNECT_TIMEOUT", 120);
  const int listener = new_socket();
  const auto [address, size] = address_of(place, rank);
  if (::bind(listener, reinterpret_cast<const sockaddr*>(&address), size) != 0 ||
      ::listen(listener, ranks) != 0) {
    const std::string reason = std::strerror(errno);
    ::close(listener);
    throw ConnectionError("rank " + std::to_string(rank) + " of " + place + ": " + reason);
  }
  try {
    // Each connects to those before it, and says who it is to those.
    for (int other = 0; other < rank; ++other) {
      const int socket = connect_to(place, other, deadline);
      write_all(socket, reinterpret_cast<const char*>(&rank), sizeof(rank));
      peers_[static_cast<size_t>(other)] = std::make_unique<Peer>(other, socket);
    }
    for (int missing = ranks - rank - 1; missing > 0; --missing) {
      const int socket = is_readable(listener, deadline)
                             ? ::accept4(listener, nullptr, nullptr, SOCK_CLOEXEC)
                             : -1;
      int other = -1;
      if (socket < 0 || ::recv(socket, &other, sizeof(other), MSG_WAITALL) != sizeof(other)) {
        throw ConnectionError(std::to_string(missing) +
                              " ranks have not come (HCCL_CONNECT_TIMEOUT)");
      }
      peers_.at(static_cast<size_t>(other)) = std::make_unique<Peer>(other, socket);
    }
  } catch (...) {
    ::close(listener);
    throw;
  }
  ::close(listener);
}

Connections::~Connections() = default;

void Connections::flush() {
  for (const auto& peer : peers_) {
    if (peer) {
      peer->flush();
    }
  }
}

Connections::Peer& Connections::peer(int rank) const {
  if (rank < 0 || rank >= ranks() || rank == rank_) {
    throw ConnectionError("rank " + std::to_string(rank) + " is none of the others");
  }
  return *peers_[static_cast<size_t>(rank)];
}

void Connections::send(int to, const char* function, const void* data, size_t bytes) {
  peer(to).send(header_of(function, bytes), data);
}

void Connections::receive(int from, const char* function, void* data, size_t bytes) {
  peer(from).receive(header_of(function, bytes), data);
}

}  // namespace cann_sim
