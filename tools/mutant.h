// Included before everything else in the build of tools/mutation.py, whose expressions ask for it.
#pragma once

#include <pthread.h>

#include <cstdlib>

// The number of the mutant that this process runs; 0 for none.
inline int active_mutant = 0;

inline void read_mutant() {
  const char* number = std::getenv("MUTANT");
  active_mutant = number ? std::atoi(number) : 0;
}

// tools/mutation.py forks a process for each mutant.
inline const int kMutantsAreRead = (read_mutant(), pthread_atfork(nullptr, nullptr, read_mutant));

inline bool mutant(int number) { return number == active_mutant; }
