/* Direct all-reduce: kernels/direct.cu. Chunks as in two_shot.pml; results are plain stores into the peers' arrays,
 * which a flag packet follows. The all-reduces are in place, the hardest case, and each uses the arrays of the one
 * before.
 *
 * array[q][s] is chunk s of rank q's array, of each block: the operation's input, then its result. Group 0 of slots is
 * `scatter`, group 1 the flags. A plain store is on its way (storing) until the fence before the flag, at the latest.
 */
#ifndef MIXED
#define GROUPS 2
#include "slots.pml"
#endif
#define INPUT(e) (1 + 2 * (e))
#define RESULT(e) (2 + 2 * (e))
#define CHUNK(q, s, b) (((q) * N + (s)) * B + (b))

byte array[N * N * B], storing[N * N * B];
byte stores[N * B];                      /* of a block, on their way */

active [N * N * B] proctype Stores() {
end: do
  :: d_step { storing[_pid - SLOTS] != 0 ->
       array[_pid - SLOTS] = storing[_pid - SLOTS];
       storing[_pid - SLOTS] = 0;
       stores[(_pid - SLOTS) / B % N * B + (_pid - SLOTS) % B]-- }
  od
}

inline store_results() {
  d_step {
    i = 0;
    do
    :: i < N && i == r -> array[CHUNK(r, r, b)] = RESULT(e); i++
    :: i < N && i != r -> storing[CHUNK(i, r, b)] = RESULT(e); stores[r * B + b]++; i++
    :: i >= N -> break
    od;
    i = 0
  }
}

/* what a packet carries is the input of this operation */
inline load_chunks() {
  d_step {
    i = 0;
    do :: i < N -> assert(array[CHUNK(r, i, b)] == INPUT(e)); i++ :: i >= N -> break od;
    i = 0
  }
}

inline direct_sends() {
  if :: alive -> load_chunks(); send(0) :: else fi
}

inline direct_waits() {
#ifdef BREAK_EARLY_ENTRY
  if :: alive -> store_results() :: else fi;            /* before the peers' columns have arrived */
#endif
  if
  :: !alive
  :: atomic { alive && ARRIVED(0) -> take(0); restore(0);
#ifndef BREAK_EARLY_ENTRY
       store_results()
#endif
     }
  :: alive && abort -> abandon()
  fi;
#ifndef BREAK_NO_FENCE
  stores[r * B + b] == 0;                               /* barrier of the block, fence.acq_rel.sys */
#endif
  if
#ifdef BREAK_FLAG_AFTER_ABANDON
  :: send(1)
#else
  :: atomic { !dead[r * B + b] -> send(1) }
  :: dead[r * B + b]
#endif
  fi;
#ifndef BREAK_NO_EXIT
  if
  :: !alive
  :: atomic { alive && ARRIVED(1) -> take(1); restore(1) }
  :: alive && abort -> abandon()
  fi
#else
  if :: atomic { alive && ARRIVED(1) -> take(1); restore(1) } :: alive -> restore(1) :: !alive fi
#endif
}

/* the program's part: it makes the next input, and uses the result unless the wait was abandoned */
inline produce() {
  d_step {
    k = 0;
    do :: k < N * GRID(epoch[r * B]) -> array[CHUNK(r, k % N, k / N)] = INPUT(epoch[r * B]); k++ :: else -> break od;
    k = 0
  }
}

inline consume(e) {
  d_step {
    k = 0;
    do
    :: k < N * GRID(e) -> assert(array[CHUNK(r, k % N, k / N)] == RESULT(e) || dead[r * B + k / N]); k++
    :: else -> break
    od;
    k = 0
  }
}

#ifndef MIXED
#define sends direct_sends
#define waits direct_waits
#define before_kernel() produce(); last = epoch[r * B]
#define after_kernel() consume(last)
#define STORES_PAST (stores[r * B] == 0 && stores[r * B + B - 1] == 0)
#include "ranks.pml"
#endif
