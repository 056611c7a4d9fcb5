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

// Closes the socket that it owns.
class Socket {
 public:
  explicit Socket(int descriptor) : descriptor_(descriptor) {}
  Socket(Socket&& other) noexcept : descriptor_(std::exchange(other.descriptor_, -1)) {}
  Socket& operator=(Socket&& other) noexcept {
    std::swap(descriptor_, other.descriptor_);
    return *this;
  }
  ~Socket() {
    if (descriptor_ >= 0) {
      ::close(descriptor_);
    }
  }

  int get() const { return descriptor_; }
  explicit operator bool() const { return descriptor_ >= 0; }

 private:
  int descriptor_;
};

Socket new_socket() {
  Socket socket(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (!socket) {
    throw ConnectionError(std::string("no socket: ") + std::strerror(errno));
  }
  return socket;
}

// Names in the abstract namespace have no permissions: any user may connect to one, or take it.
bool is_of_this_user(const Socket& socket) {
  ucred other{};
  socklen_t size = sizeof(other);
  return ::getsockopt(socket.get(), SOL_SOCKET, SO_PEERCRED, &other, &size) == 0 &&
         other.uid == ::geteuid();
}

Socket connect_to(const std::string& place, int rank, Clock::time_point deadline) {
  const auto [address, size] = address_of(place, rank);
  while (true) {
    Socket socket = new_socket();
    if (::connect(socket.get(), reinterpret_cast<const sockaddr*>(&address), size) == 0) {
      if (!is_of_this_user(socket)) {
        throw ConnectionError("a process of another user is in the place of rank " +
                              std::to_string(rank));
      }
      return socket;
    }
    if (Clock::now() > deadline) {
      throw ConnectionError("rank " + std::to_string(rank) +
                            " has not come (HCCL_CONNECT_TIMEOUT)");
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
}

// Waits for one of the entries.
bool poll_until(std::vector<pollfd>& entries, Clock::time_point deadline) {
  while (true) {
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now()).count();
    const int ready =
        ::poll(entries.data(), entries.size(), static_cast<int>(std::max<int64_t>(left, 0)));
    if (ready >= 0 || errno != EINTR) {
      return ready > 0;
    }
  }
}

bool is_readable(const Socket& socket, Clock::time_point deadline) {
  std::vector<pollfd> entries{{socket.get(), POLLIN, 0}};
  return poll_until(entries, deadline);
}

// The connections to a listener whose processes have not said yet which rank they are.
class Waiting {
 public:
  explicit Waiting(const Socket& listener) : listener_(listener) {}

  // The next that says so. None of the others delays it.
  std::pair<int, Socket> next(Clock::time_point deadline) {
    while (true) {
      std::vector<pollfd> entries{{listener_.get(), POLLIN, 0}};
      for (const auto& socket : sockets_) {
        entries.push_back({socket.get(), POLLIN, 0});
      }
      if (!poll_until(entries, deadline)) {
        return {-1, Socket(-1)};
      }
      for (size_t i = sockets_.size(); i-- > 0;) {
        if (entries[i + 1].revents) {
          int rank = -1;
          const auto got = ::recv(sockets_[i].get(), &rank, sizeof(rank), MSG_DONTWAIT);
          Socket socket = std::move(sockets_[i]);
          sockets_.erase(sockets_.begin() + static_cast<ptrdiff_t>(i));
          if (got == sizeof(rank)) {
            return {rank, std::move(socket)};
          }
        }
      }
      if (entries.front().revents) {
        Socket socket(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC));
        if (socket && is_of_this_user(socket)) {
          sockets_.push_back(std::move(socket));
        }
      }
    }
  }

 private:
  const Socket& listener_;
  std::vector<Socket> sockets_;
};

// Returns false if the other side has ended.
bool write_all(const Socket& socket, const char* data, size_t bytes) {
  while (bytes) {
    const auto written = ::send(socket.get(), data, bytes, MSG_NOSIGNAL);
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
  Peer(int rank, Socket socket)
      : rank_(rank), socket_(std::move(socket)), writer_([this] { write(); }) {}

  ~Peer() {
    flush();
    {
      const std::lock_guard lock(mutex_);
      ending_ = true;
      messages_.clear();
    }
    changed_.notify_all();
    // Or the writer would wait for a rank that does not read any more.
    ::shutdown(socket_.get(), SHUT_WR);
    writer_.join();
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
      const auto got = ::recv(socket_.get(), at, bytes, 0);
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
  Socket socket_;
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
  const Socket listener = new_socket();
  const auto [address, size] = address_of(place, rank);
  if (::bind(listener.get(), reinterpret_cast<const sockaddr*>(&address), size) != 0 ||
      ::listen(listener.get(), SOMAXCONN) != 0) {
    throw ConnectionError("rank " + std::to_string(rank) + " of " + place + ": " +
                          std::strerror(errno));
  }
  // Each connects to those before it, and says who it is to those.
  for (int other = 0; other < rank; ++other) {
    Socket socket = connect_to(place, other, deadline);
    write_all(socket, reinterpret_cast<const char*>(&rank), sizeof(rank));
    peers_[static_cast<size_t>(other)] = std::make_unique<Peer>(other, std::move(socket));
  }
  Waiting waiting(listener);
  for (int missing = ranks - rank - 1; missing > 0;) {
    auto [other, socket] = waiting.next(deadline);
    if (!socket) {
      throw ConnectionError(std::to_string(missing) +
                            " ranks have not come (HCCL_CONNECT_TIMEOUT)");
    }
    const bool expected = other > rank && other < ranks && !peers_[static_cast<size_t>(other)];
    if (expected) {
      peers_[static_cast<size_t>(other)] = std::make_unique<Peer>(other, std::move(socket));
      --missing;
    }
  }
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
