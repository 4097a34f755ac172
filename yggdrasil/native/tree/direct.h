// Calls that come between two passes, as plain C functions.
//
// A pass of a model streams its weights through every cache. A method of a PyTorch class then costs twenty microseconds
// for looking up modules and boxing arguments, whatever it does; a C function, three. Objects are PyTorch's classes all
// the same, which tell their address. Numbers go by a mailbox: a buffer that both sides hold.
#pragma once

#include <cstdint>
#include <exception>

#include "tree/counts.h"
#include "tree/ranking.h"
#include "tree/state_rows.h"
#include "tree/tree_ops.h"

namespace yggdrasil {

// -1 where it failed.
template <class Action>
int64_t guarded(const Action& action) {
  try {
    return action();
  } catch (const std::exception&) {
    return -1;
  }
}

}  // namespace yggdrasil

extern "C" {
int64_t yggdrasil_grow(void* counts) {
  return yggdrasil::guarded([&] { return static_cast<yggdrasil::Counts*>(counts)->grow(); });
}

int64_t yggdrasil_fill(void* counts) {
  return yggdrasil::guarded([&] { return static_cast<yggdrasil::Counts*>(counts)->fill(); });
}

int64_t yggdrasil_rank(void* ranking) {
  return yggdrasil::guarded([&] { return static_cast<yggdrasil::Ranking*>(ranking)->rank(), 0; });
}

int64_t yggdrasil_keep(void* states) {
  return yggdrasil::guarded([&] { return static_cast<yggdrasil::StateRows*>(states)->keep(), 0; });
}

int64_t yggdrasil_move(void* rows) {
  return yggdrasil::guarded([&] { return static_cast<yggdrasil::Rows*>(rows)->move(), 0; });
}
}
