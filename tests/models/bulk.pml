/* Bulk copies: kernels/bulk.cu between two of copy.cu. Each rank reads its chunk in every area, at any moment after the
 * entry flags, and stores the result over it. The flags are packets: group 0 of slots has those of the entry, group 1
 * those of the exit.
 *
 * area[q][s] is chunk s in rank q's area, of each block: the operation's input, then its result. A store into a peer's
 * area is on its way (storing) until the wait for it and the fence before the exit flag, at the latest.
 */
#define GROUPS 2
#include "slots.pml"
#define INPUT(e) (1 + 2 * (e))
#define RESULT(e) (2 + 2 * (e))
#define CHUNK(q, s, b) (((q) * N + (s)) * B + (b))

byte area[N * N * B], storing[N * N * B];
byte stores[N * B];                      /* of a block, on their way */

active [N * N * B] proctype Stores() {
end: do
  :: d_step { storing[_pid - SLOTS] != 0 ->
       area[_pid - SLOTS] = storing[_pid - SLOTS];
       storing[_pid - SLOTS] = 0;
       stores[(_pid - SLOTS) / B % N * B + (_pid - SLOTS) % B]-- }
  od
}

inline reduce() {
  d_step {
    i = 0;
    do :: i < N -> assert(area[CHUNK(i, r, b)] == INPUT(e)); i++ :: i >= N -> break od;
    i = 0;
    do
    :: i < N && i == r -> area[CHUNK(r, r, b)] = RESULT(e); i++
    :: i < N && i != r -> storing[CHUNK(i, r, b)] = RESULT(e); stores[r * B + b]++; i++
    :: i >= N -> break
    od;
    i = 0
  }
}

inline sends() { if :: alive -> send(0) :: else fi }

inline waits() {
#ifndef BREAK_NO_ENTRY
  if
  :: !alive
  :: atomic { alive && ARRIVED(0) -> take(0); restore(0) }
  :: alive && abort -> abandon()
  fi;
#endif
  if
  :: !alive
  :: else ->
       reduce();
#ifndef BREAK_NO_FENCE
       stores[r * B + b] == 0;           /* wait_group, fence.acq_rel.sys */
#endif
       send(1);
#ifdef BREAK_NO_ENTRY
       atomic { ARRIVED(0) -> take(0); restore(0) };
#endif
#ifdef BREAK_NO_EXIT
       if :: atomic { ARRIVED(1) -> take(1); restore(1) } :: restore(1) fi
#else
       if
       :: atomic { ARRIVED(1) -> take(1); restore(1) }
       :: abort -> abandon()
       fi
#endif
  fi
}

/* copy.cu: it brings the next input, and takes the result. After an abandoned wait it leaves the area as it is. */
inline before_kernel() {
  d_step {
    last = epoch[r * B];
    k = 0;
    do :: k < N * GRID(last) -> area[CHUNK(r, k % N, k / N)] = INPUT(last); k++ :: else -> break od;
    k = 0
  }
}

inline after_kernel() {
  d_step {
    k = 0;
    do
    :: k < N * GRID(last) ->
#ifdef BREAK_POISONED_AREA
       if :: dead[r * B] -> area[CHUNK(r, k % N, k / N)] = 0 :: else fi;
#endif
       assert(area[CHUNK(r, k % N, k / N)] == RESULT(last) || dead[r * B]);
       k++
    :: else -> break
    od;
    k = 0
  }
}

#define STORES_PAST (stores[r * B] == 0 && stores[r * B + B - 1] == 0)
#include "ranks.pml"
