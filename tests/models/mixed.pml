/* One communicator's operations of different kernels, in turns: they share slots, halves and epochs.
 *
 * Operation e of 4 is one-shot, direct, two-shot, two-shot; or, with ORDER 1, direct, one-shot, one-shot, two-shot; or,
 * with ORDER 2, all-gather, two-shot, broadcast, direct: see parts.pml. So the same half is used by different kernels in
 * a row, and each kernel is followed by another one.
 */
#ifndef ORDER
#define ORDER 0
#endif
#define MIXED
#define GROUPS 2
#if ORDER == 2
#define PARTS 2
#include "parts.pml"
#else
#define PARTS 1
#include "one_shot.pml"
#endif
#include "two_shot.pml"
#include "direct.pml"
#if ORDER == 0
#define ONE_SHOT(e) ((e) == 0)
#define DIRECT(e) ((e) == 1)
#elif ORDER == 1
#define ONE_SHOT(e) ((e) == 1 || (e) == 2)
#define DIRECT(e) ((e) == 0)
#else
#define ONE_SHOT(e) ((e) % 2 == 0)
#define DIRECT(e) ((e) == 3)
#endif

inline mixed_sends() {
  if
  :: ONE_SHOT(e) -> one_shot_sends()
  :: DIRECT(e) -> direct_sends()
  :: else -> two_shot_sends()
  fi
}

inline mixed_waits() {
  if
  :: ONE_SHOT(e) -> one_shot_waits()
  :: DIRECT(e) -> direct_waits()
  :: else -> two_shot_waits()
  fi
}

#define sends mixed_sends
#define waits mixed_waits
#define before_kernel() if :: DIRECT(epoch[r * B]) -> produce() :: else fi; last = epoch[r * B]
#define after_kernel() if :: DIRECT(last) -> consume(last) :: else fi
#define STORES_PAST (stores[r * B] == 0 && stores[r * B + B - 1] == 0)
#include "ranks.pml"
