#include "hccl/connections.h"

#include <poll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <string_view>
#include <thread>

namespace cann_sim {
namespace {

using Clock = std::chrono::steady_clock;

// Seconds, by the variables that HCCL reads, and its defaults.
std::chrono::seconds timeout(const char* variable, int usual) {
  const char* text = std::getenv(variable);
  const int given = text ? std::atoi(text) : 0;
  return std::chrono::seconds(given > 0 ? given : usual);
}

// In the abstract namespace: nothing is left behind in a file system.
struct Address {
  Address() = default;
  explicit Address(const std::string& name)
      : size(static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size())) {
    if (size > sizeof(address)) {
      throw ConnectionError("the name of a communicator is too long: " + name);
    }
    address.sun_family = AF_UNIX;
    std::memcpy(address.sun_path + 1, name.data(), name.size());
  }

  sockaddr* get() { return reinterpret_cast<sockaddr*>(&address); }
  std::string_view name() const { return {address.sun_path + 1, sizeof(address.sun_path) - 1}; }

  sockaddr_un address{};
  socklen_t size = sizeof(address);
};

std::string name_of(const std::string& place, int rank) {
  return place + "/" + std::to_string(rank);
}

// The name of a socket that is connected begins so: it tells the other rank whose it is.
std::string name_of(const std::string& place, int from, int to) {
  return name_of(place, from) + ">" + std::to_string(to) + "/";
}

Descriptor socket_with(const std::string& name) {
  Address address(name);
  Descriptor socket(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  if (!socket || ::bind(socket.get(), address.get(), address.size) != 0) {
    throw ConnectionError("no socket " + name + ": " + std::strerror(errno));
  }
  return socket;
}

// Names in the abstract namespace have no permissions: any user may connect to one, or take it.
bool is_of_this_user(const Descriptor& socket) {
  ucred other{};
  socklen_t size = sizeof(other);
  return ::getsockopt(socket.get(), SOL_SOCKET, SO_PEERCRED, &other, &size) == 0 &&
         other.uid == ::geteuid();
}

Descriptor connect(const std::string& place, int from, int to, Clock::time_point deadline) {
  auto socket = socket_with(name_of(place, from, to) + std::to_string(::getpid()));
  Address address(name_of(place, to));
  while (::connect(socket.get(), address.get(), address.size) != 0) {
    if (Clock::now() > deadline) {
      throw ConnectionError("rank " + std::to_string(to) + " has not come (HCCL_CONNECT_TIMEOUT)");
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  if (!is_of_this_user(socket)) {
    throw ConnectionError("a process of another user is in the place of rank " +
                          std::to_string(to));
  }
  return socket;
}

bool wait_for(const Descriptor& socket, short event, Clock::time_point deadline) {
  while (true) {
    pollfd entry{socket.get(), event, 0};
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now()).count();
    const int ready = ::poll(&entry, 1, static_cast<int>(std::max<int64_t>(left, 0)));
    if (ready >= 0 || errno != EINTR) {
      return ready > 0;
    }
  }
}

// sendmsg and recvmsg pass on what is sent in which function, and the descriptor of memory with the
// data. So a message is small, and two ranks that send to each other do not wait for each other.
struct Message {
  Message() = default;
  Message(const Message&) = delete;
  Message& operator=(const Message&) = delete;

  struct {
    std::array<char, 24> function{};
    uint64_t bytes = 0;
  } content;
  iovec part{&content, sizeof(content)};
  alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(int))> attached{};
  msghdr header{nullptr, 0, &part, 1, attached.data(), attached.size(), 0};
};

// Calls a function, which reads or writes a part from a place on, until all is done.
template <typename Function>
bool do_all(size_t bytes, const Function& function) {
  for (size_t done = 0; done < bytes;) {
    const auto part = function(done);
    if (part <= 0) {
      return false;
    }
    done += static_cast<size_t>(part);
  }
  return true;
}

}  // namespace

Descriptor::~Descriptor() {
  if (number_ >= 0) {
    ::close(number_);
  }
}

Connections::Connections(const std::string& place, int ranks, int rank)
    : rank_(rank), sockets_(static_cast<size_t>(ranks)) {
  const auto deadline = Clock::now() + timeout("HCCL_CONNECT_TIMEOUT", 120);
  const auto listener = socket_with(name_of(place, rank));
  if (::listen(listener.get(), SOMAXCONN) != 0) {
    throw ConnectionError("rank " + std::to_string(rank) + " of " + place + ": " +
                          std::strerror(errno));
  }
  // Each connects to those before it.
  for (int other = 0; other < rank; ++other) {
    sockets_[static_cast<size_t>(other)] = connect(place, rank, other, deadline);
  }
  for (int missing = ranks - rank - 1; missing > 0;) {
    if (!wait_for(listener, POLLIN, deadline)) {
      throw ConnectionError(std::to_string(missing) +
                            " ranks have not come (HCCL_CONNECT_TIMEOUT)");
    }
    Address from;
    Descriptor socket(::accept4(listener.get(), from.get(), &from.size, SOCK_CLOEXEC));
    for (int other = rank + 1; other < ranks; ++other) {
      if (from.name().starts_with(name_of(place, other, rank)) && is_of_this_user(socket)) {
        sockets_[static_cast<size_t>(other)] = std::move(socket);
        --missing;
      }
    }
  }
}

const Descriptor& Connections::socket(int rank) const {
  if (rank < 0 || rank >= ranks() || rank == rank_) {
    throw ConnectionError("rank " + std::to_string(rank) + " is none of the others");
  }
  return sockets_[static_cast<size_t>(rank)];
}

void Connections::send(int to, std::string_view function, const void* data, size_t bytes) {
  const auto& other = socket(to);
  const Descriptor memory(::memfd_create("HCCL", MFD_CLOEXEC));
  if (!memory || !do_all(bytes, [&](size_t at) {
        return ::pwrite(memory.get(), static_cast<const char*>(data) + at, bytes - at,
                        static_cast<off_t>(at));
      })) {
    throw ConnectionError(std::string("no memory for a message: ") + std::strerror(errno));
  }
  Message message;
  message.content.bytes = bytes;
  function.copy(message.content.function.data(), message.content.function.size() - 1);
  auto* attached = CMSG_FIRSTHDR(&message.header);
  *attached = {
      .cmsg_len = CMSG_LEN(sizeof(int)), .cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS};
  const int number = memory.get();
  std::memcpy(CMSG_DATA(attached), &number, sizeof(number));
  const auto deadline = Clock::now() + timeout("HCCL_EXEC_TIMEOUT", 1836);
  while (::sendmsg(other.get(), &message.header, MSG_NOSIGNAL | MSG_DONTWAIT) < 0) {
    if (errno == EPIPE || errno == ECONNRESET) {
      return;  // That the other rank has ended, this one finds out when it waits for it.
    }
    if (errno != EAGAIN || !wait_for(other, POLLOUT, deadline)) {
      throw ConnectionError("rank " + std::to_string(to) +
                            " takes nothing: " + std::strerror(errno));
    }
  }
}

void Connections::receive(int from, std::string_view function, void* data, size_t bytes) {
  const auto& other = socket(from);
  const auto rank = "rank " + std::to_string(from);
  if (!wait_for(other, POLLIN, Clock::now() + timeout("HCCL_EXEC_TIMEOUT", 1836))) {
    throw ConnectionError(rank + " has sent nothing for too long (HCCL_EXEC_TIMEOUT)");
  }
  Message message;
  const auto got = ::recvmsg(other.get(), &message.header, MSG_CMSG_CLOEXEC);
  const auto* attached = got > 0 ? CMSG_FIRSTHDR(&message.header) : nullptr;
  if (!attached) {
    throw ConnectionError(rank + " has ended");
  }
  int number = -1;
  std::memcpy(&number, CMSG_DATA(attached), sizeof(number));
  const Descriptor memory(number);
  if (message.content.function.data() != function || message.content.bytes != bytes) {
    throw ConnectionError(rank + " sends " + std::to_string(message.content.bytes) + " bytes in " +
                          message.content.function.data() + ", where " + std::to_string(bytes) +
                          " are expected in " + std::string(function));
  }
  if (!do_all(bytes, [&](size_t at) {
        return ::pread(memory.get(), static_cast<char*>(data) + at, bytes - at,
                       static_cast<off_t>(at));
      })) {
    throw ConnectionError(rank + " has sent too little");
  }
}

}  // namespace cann_sim
