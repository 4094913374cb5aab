/* Rounds of tiles: kernels/tiles.cuh. Each rank brings rounds into its area, in four places, and its peers read them
 * there. The numbers of rounds of the operations are any from 0 to ROUNDS, the same on every rank.
 *
 * A store into the own area is on its way (storing) until the wait for it. A flag is on its way (coming), and its reader
 * empties its slot: that, too, is on its way (emptying), until the fence before the reader's next flag.
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
#define DATA(o, k) (1 + (o) * (ROUNDS + 1) + (k))
#define SLOT(src, dst, o, k) ((((dst) * N + (src)) * 2 + (o) % 2) * FLAGS + (k) % FLAGS)

byte area[N * PLACES], storing[N * PLACES], stores[N];
byte slot[N * N * 2 * FLAGS], coming[N * N * 2 * FLAGS];
bit emptying[N * N * 2 * FLAGS];
byte unsettled[N];
byte rounds[OPERATIONS];
bit abort;

active [N * PLACES] proctype Stores() {
end: do
  :: d_step { storing[_pid] != 0 ->
       area[_pid] = storing[_pid]; storing[_pid] = 0; stores[_pid / PLACES]-- }
  od
}

#define FIRST (N * PLACES)
active [N * N * 2 * FLAGS] proctype Memory() {
end: do
  :: d_step { coming[_pid - FIRST] != 0 ->
       assert(slot[_pid - FIRST] == 0);  /* a slot is written only when it is empty */
       slot[_pid - FIRST] = coming[_pid - FIRST]; coming[_pid - FIRST] = 0 }
  :: d_step { emptying[_pid - FIRST] ->
       slot[_pid - FIRST] = 0; emptying[_pid - FIRST] = 0; unsettled[(_pid - FIRST) / (N * 2 * FLAGS)]-- }
  od
}

inline bring(m) {
  d_step {
    if
    :: (m) < rounds[o] -> assert(storing[PLACE(r, m)] == 0); storing[PLACE(r, m)] = DATA(o, m); stores[r]++
    :: else
    fi
  }
}

inline send(m) {
#ifndef BREAK_NO_FENCE
  d_step { stores[r] == 0 && unsettled[r] == 0 -> skip };
#endif
  d_step {
    i = 0;
    do
    :: i < N && i != r -> assert(coming[SLOT(r, i, o, m)] == 0); coming[SLOT(r, i, o, m)] = DATA(o, m); i++
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
  :: d_step { alive && HERE(1, m) && HERE(2, m) ->
       i = 1;
       do
       :: i < N ->
            assert(slot[SLOT((r + i) % N, r, o, m)] == DATA(o, m));
            emptying[SLOT((r + i) % N, r, o, m)] = 1; unsettled[r]++; i++
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
  bit alive = 1;
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
            if
#ifdef BREAK_EARLY_ROUND
            :: k > 2 -> wait(k - 2)
#else
            :: k > 1 -> wait(k - 1)
#endif
            :: else
            fi;
            if
            :: alive -> exchange(k); bring(k + 2); send(k + 1)
            :: else
            fi;
            k++
       :: else -> break
       od;
#ifndef BREAK_NO_EXIT
       if :: rounds[o] > 1 -> wait(rounds[o] - 1) :: else fi;
       if :: rounds[o] > 0 -> wait(rounds[o]) :: else fi;
#endif
       stores[r] == 0 && unsettled[r] == 0;  /* a kernel's boundary */
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
