// Connections of the simulated HCCL: a socket between every two processes of a machine.
#pragma once

#include <cstddef>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace cann_sim {

// Another rank has ended, does not answer, or does something else.
class ConnectionError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Closes what it owns.
class Descriptor {
 public:
  explicit Descriptor(int number = -1) : number_(number) {}
  Descriptor(Descriptor&& other) noexcept : number_(std::exchange(other.number_, -1)) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    std::swap(number_, other.number_);
    return *this;
  }
  ~Descriptor();

  int get() const { return number_; }
  explicit operator bool() const { return number_ >= 0; }

 private:
  int number_;
};

class Connections {
 public:
  // Waits until all ranks have come to the place of this name.
  Connections(const std::string& place, int ranks, int rank);

  int ranks() const { return static_cast<int>(sockets_.size()); }
  int rank() const { return rank_; }

  // Copies the data, and waits for the receiver only where that is hundreds of messages behind.
  // `function` says what is being done: the receiver must do the same.
  void send(int to, std::string_view function, const void* data, size_t bytes);
  // Waits for what the other rank sends next.
  void receive(int from, std::string_view function, void* data, size_t bytes);

 private:
  const Descriptor& socket(int rank) const;

  int rank_;
  std::vector<Descriptor> sockets_;
};

}  // namespace cann_sim
