/* Rounds of tiles: kernels/tiles.cuh. Each rank brings rounds into its area, in four places, and its peers read them
 * there. The numbers of rounds of the operations are any from 0 to ROUNDS, the same on every rank.
 *
 * A round is one tile here, the first one or the last one. Loads are ordered ahead: behind its flag, the first tile of the
 * next round is loaded before the last one of this round is brought. What has been ordered is taken in any case.
 *
 * What takes time is done at its first or its last moment:
 *   a store into the own area   at once, or at the wait for it: a read at any time sees what it would see in one of these
 *   a flag                      at once: if it comes later, its reader waits longer
 *   the end of a read flag      at the fence before its reader's next flag: if it ends earlier, nobody notices
 *
 *   N   ranks     FAULTS 1: the abort word is raised once, at any moment.
 */
#ifndef N
#define N 2
#endif
#ifndef FAULTS
#define FAULTS 0
#endif
#ifndef ROUNDS
#define ROUNDS 6
#endif
#ifndef OPERATIONS
#define OPERATIONS 3
#endif
#ifdef BREAK_TWO_SLOTS
#define FLAGS 2
#else
#define FLAGS 4
#endif
#ifdef BREAK_THREE_PLACES
#define PLACES 3
#else
#define PLACES 4
#endif
#define PLACE(q, k) ((q) * PLACES + (k) % PLACES)
#ifdef BREAK_EARLY_ROUND
#define BEHIND(k) ((k) - 2)
#elif defined(BREAK_FAR_AHEAD)
#define BEHIND(k) (k)
#else
#define BEHIND(k) ((k) - 1)  /* the flag behind which a round is loaded; rounds 0 and 1 are behind flag 0 */
#endif
#define DATA(o, k) (1 + (o) * (ROUNDS + 1) + (k))
#define READ 255
#define SLOTS_OF(dst) ((dst) * N * 2 * FLAGS)
#define SLOT(src, dst, o, k) (SLOTS_OF(dst) + ((src) * 2 + (o) % 2) * FLAGS + (k) % FLAGS)

byte area[N * PLACES], storing[N * PLACES];
byte slot[SLOTS_OF(N)];
byte rounds[OPERATIONS];
bit abort;

inline bring(m) {
  atomic {
    if
    :: (m) < rounds[o] ->
         assert(storing[PLACE(r, m)] == 0);
         if :: area[PLACE(r, m)] = DATA(o, m) :: storing[PLACE(r, m)] = DATA(o, m) fi
    :: else
    fi
  }
}

/* wait_group, and the fences */
inline settle() {
#ifndef BREAK_NO_FENCE
  i = PLACE(r, 0);
  do
  :: i < PLACE(r + 1, 0) -> area[i] = (storing[i] -> storing[i] : area[i]); storing[i] = 0; i++
  :: else -> break
  od;
#endif
  i = SLOTS_OF(r);
  do :: i < SLOTS_OF(r + 1) -> slot[i] = (slot[i] == READ -> 0 : slot[i]); i++ :: else -> break od;
  i = 0
}

inline send(m) {
  d_step {
    settle();
    i = 0;
    do
    :: i < N && i != r ->
         assert(slot[SLOT(r, i, o, m)] == 0);  /* a slot is written only when it is empty */
         slot[SLOT(r, i, o, m)] = DATA(o, m); i++
    :: i == r -> i++
    :: i >= N -> break
    od;
    i = 0
  }
}

#define HERE(j, m) ((j) >= N || slot[SLOT((r + (j)) % N, r, o, m)] != 0)

inline wait(m) {
  if
  :: !alive
  :: d_step { alive && HERE(1, m) && HERE(2, m) && HERE(3, m) ->
       i = 1;
       do
       :: i < N ->
            assert(slot[SLOT((r + i) % N, r, o, m)] == DATA(o, m));
            slot[SLOT((r + i) % N, r, o, m)] = READ; i++
       :: i >= N -> break
       od;
       i = 0 }
  :: alive && abort -> alive = 0
  fi
}

inline exchange(m) {
  d_step {
    i = 0;
    do :: i < N -> assert(i == r || area[PLACE(i, m)] == DATA(o, m)); i++ :: i >= N -> break od;
    i = 0
  }
}

proctype Rank(byte r) {
  byte o, k, i;
  bit alive = 1, brought;
  do
  :: o < OPERATIONS ->
#ifdef BREAK_BRINGS_WHEN_DEAD
       area[PLACE(r, 0)] = DATA(o, 0);
#endif
       if
       :: !alive -> goto over
       :: else
       fi;
       bring(0); bring(1);
       send(0);
       wait(0);
       k = 0;
       do
       :: k < rounds[o] && alive ->
            exchange(k);
            brought = 0;
            if :: k + 2 < rounds[o] -> bring(k + 2); brought = 1 :: true fi;
            if
            :: k + 1 < rounds[o] && BEHIND(k + 1) > 0 -> wait(BEHIND(k + 1))
            :: else
            fi;
            if :: alive && k + 1 < rounds[o] -> exchange(k + 1) :: else fi;
            if :: !brought -> bring(k + 2) :: else fi;
            if :: alive -> send(k + 1) :: else fi;
            k++
       :: else -> break
       od;
#ifndef BREAK_NO_EXIT
       if :: rounds[o] > 1 -> wait(rounds[o] - 1) :: else fi;
       if :: rounds[o] > 0 -> wait(rounds[o]) :: else fi;
#endif
       atomic { true -> settle() };  /* a kernel's boundary */
over:  o++
  :: else -> break
  od
}

init {
  byte q;
  atomic {
    do
    :: q < OPERATIONS ->
         if :: rounds[q] < ROUNDS -> rounds[q]++ :: q++ fi
    :: else -> break
    od;
    q = 0;
    do :: q < N -> run Rank(q); q++ :: else -> break od
  }
#if FAULTS & 1
  abort = 1
#endif
}
