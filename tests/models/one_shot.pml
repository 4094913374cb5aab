/* One-shot all-reduce: kernels/one_shot.cu, run(). Every packet of a rank goes to every peer, in one hop.
 *
 * PARTS: accesses of a packet, each with a flag of its own. 1: a whole packet. 2: the data packet and the escape
 * packet of integers, or the two halves of a packet where links split it (IPCREDUCE_WHOLE_PACKETS == 0).
 */
#ifndef MIXED
#ifndef PARTS
#define PARTS 1
#endif
#define GROUPS PARTS
#endif
#include "slots.pml"

inline one_shot_sends() {
  if
  :: alive -> send(0);
#if PARTS > 1
     send(1)
#endif
  :: else
  fi
}

inline one_shot_waits() {
  if
  :: !alive
#if PARTS > 1 && defined(BREAK_TORN)
  /* the last word is taken for the flag of all */
  :: atomic { alive && ARRIVED(1) -> take(0); take(1); restore(0); restore(1) }
#elif PARTS > 1
  :: atomic { alive && ARRIVED(0) && ARRIVED(1) -> take(0); take(1); restore(0); restore(1) }
#else
  :: atomic { alive && ARRIVED(0) -> take(0); restore(0) }
#endif
  :: alive && abort -> abandon()
  fi
}

#ifndef MIXED
#define sends one_shot_sends
#define waits one_shot_waits
#define before_kernel() skip
#define after_kernel() skip
#include "ranks.pml"
#endif
