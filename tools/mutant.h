// Included before everything else in the build of tools/mutation.py, whose expressions ask for it.
#pragma once

#include <cstdlib>

// The number of the mutant that this process runs; 0 for none.
inline const int kMutant = [] {
  const char* number = std::getenv("MUTANT");
  return number ? std::atoi(number) : 0;
}();

inline bool mutant(int number) { return number == kMutant; }
