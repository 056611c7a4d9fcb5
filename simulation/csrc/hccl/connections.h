// Connections of the simulated HCCL: a socket between every two processes of a machine.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

namespace cann_sim {

// Another rank has ended, does not answer, or does something else.
class ConnectionError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

class Connections {
 public:
  // Waits until all ranks have come to the place of this name.
  Connections(const std::string& place, int ranks, int rank);
  // Flushes.
  ~Connections();

  int ranks() const { return static_cast<int>(peers_.size()); }
  int rank() const { return rank_; }

  // Copies the data and does not wait. `function` says what is being done: the receiver must do
  // the same.
  void send(int to, const char* function, const void* data, size_t bytes);
  // Waits until what was sent is on its way, but not for long: the other rank may not read any
  // more.
  void flush();
  // Waits for what the other rank sends next.
  void receive(int from, const char* function, void* data, size_t bytes);

 private:
  class Peer;
  Peer& peer(int rank) const;

  int rank_;
  std::vector<std::unique_ptr<Peer>> peers_;
};

}  // namespace cann_sim
