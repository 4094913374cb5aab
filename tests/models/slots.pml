/* Workspaces, and the memory system between the GPUs. Part of all models of kernels.
 *
 * Stands for kernels/packets.cuh: slots in two halves by parity of the epoch, packets with a sentinel,
 * restore_sentinels, check_wait's abandoned flags. A store is first on its way and arrives later, whenever it likes: a
 * packet in `coming` of its slot, a restored sentinel in `emptying`. Only a kernel's boundary waits, for this rank's
 * own restored sentinels.
 *
 *   N      ranks            B      blocks of a grid: in every fourth operation the grid has one block only
 *   FAULTS 1: the abort word is raised once, at any moment. 2: one rank dies, at any moment. 3: both.
 *
 * A packet's value names its operation (generation and epoch), source and group of rows; 0 is the sentinel. Groups of
 * rows begin at other places in other operations, as messages of other lengths do. The program is a loop without end:
 * epochs wrap after 4 operations, so all numbers of operations are covered.
 */
#ifndef N
#define N 2
#endif
#ifndef B
#define B 1
#endif
#ifndef FAULTS
#define FAULTS 0
#endif
#ifdef BREAK_ODD_WRAP
#define EPOCHS 3                         /* the real one is 2^32, which is even */
#else
#define EPOCHS 4
#endif
#define GRID(e) ((e) == 1 -> 1 : B)
#ifdef BREAK_ONE_HALF
#define HALF(e) 0
#else
#define HALF(e) ((e) & 1)
#endif

#ifndef SENT                             /* a packet goes from src to dst: parts.pml has messages of several lengths */
#ifdef BREAK_SILENT_PAIR
#define SENT(src, dst, e, b, g) (!((e) == 1 && (b) == 0))
#else
#define SENT(src, dst, e, b, g) 1
#endif
#endif
#ifdef BREAK_OWN_LENGTH                  /* only the slots as far as this rank's own message goes */
#define RESTORED(src, e, b, g) SENT(r, src, e, b, g)
#else
#define RESTORED(src, e, b, g) SENT(src, r, e, b, g)
#endif

#define OWN (2 * (N - 1) * B * GROUPS)   /* slots of a rank */
#define SLOTS (N * OWN)
#define ROW(src, dst, e, g) ((((src) + N - (dst) - 1) % N * GROUPS + (g) + (e) / 2) % ((N - 1) * GROUPS))
#define SLOT(src, dst, e, b, g) ((dst) * OWN + (HALF(e) * B + (b)) * (N - 1) * GROUPS + ROW(src, dst, e, g))
#define VALUE(src, e, g) (1 + ((gen[src] * 4 + (e)) * N + (src)) * GROUPS + (g))
#define EXPECTED(r, src, e, g) (1 + ((gen[r] * 4 + (e)) * N + (src)) * GROUPS + (g))
#define SENDER(v) (((v) - 1) / GROUPS % N)

byte slot[SLOTS], coming[SLOTS];
bit emptying[SLOTS];
byte flying[N], unsettled[N];            /* packets of a rank, and its restored sentinels, on their way */
byte epoch[N * B];                       /* of each block */
bit dead[N * B];                         /* abandoned: beside each epoch */
bit gen[N], crashed[N], abort, anyone_crashed;
byte todo[N], running[N];                /* blocks of a kernel to start, and not yet over */
byte met1, met2;                         /* ranks that have come to a meeting */

active [SLOTS] proctype Memory() {
end: do
  :: d_step { coming[_pid] != 0 ->
       assert(slot[_pid] == 0);          /* a slot is written only when it is empty */
       slot[_pid] = coming[_pid];
       flying[SENDER(coming[_pid])]--;
       coming[_pid] = 0 }
#if FAULTS & 2
  :: d_step { coming[_pid] != 0 && crashed[SENDER(coming[_pid])] -> /* or never arrives */
       flying[SENDER(coming[_pid])]--;
       coming[_pid] = 0 }
#endif
  :: d_step { emptying[_pid] -> slot[_pid] = 0; emptying[_pid] = 0; unsettled[_pid / OWN]-- }
  od
}

/* send_packet to every peer for which this block has one */
inline send(g) {
  d_step {
    i = 0;
    do
    :: i < N && i != r && SENT(r, i, e, b, g) ->
       assert(coming[SLOT(r, i, e, b, g)] == 0);
       coming[SLOT(r, i, e, b, g)] = VALUE(r, e, g);
       flying[r]++;
       i++
    :: i < N && !(i != r && SENT(r, i, e, b, g)) -> i++
    :: i >= N -> break
    od;
    i = 0
  }
}

#define PEER(k) ((r + (k)) % N)
#define HERE(k, g) ((k) >= N || !SENT(PEER(k), r, e, b, g) || slot[SLOT(PEER(k), r, e, b, g)] != 0)
#ifdef BREAK_ANY_PEER
#define ARRIVED(g) HERE(1, g)
#else
#define ARRIVED(g) (HERE(1, g) && HERE(2, g) && HERE(3, g))
#endif

/* the data that a wait has ended with are those of this operation, from every peer */
inline take(g) {
  d_step {
    i = 1;
    do
    :: i < N ->
       assert(!SENT(PEER(i), r, e, b, g) || slot[SLOT(PEER(i), r, e, b, g)] == EXPECTED(r, PEER(i), e, g));
       i++
    :: i >= N -> break
    od;
    i = 0
  }
}

inline restore(g) {
#ifndef BREAK_NO_RESTORE
  d_step {
    i = 1;
    do
    :: i < N && RESTORED(PEER(i), e, b, g) -> emptying[SLOT(PEER(i), r, e, b, g)] = 1; unsettled[r]++; i++
    :: i < N && !RESTORED(PEER(i), e, b, g) -> i++
    :: i >= N -> break
    od;
    i = 0
  }
#else
  skip
#endif
}

/* check_wait, with the abort word up: this block's flag first, then the others' */
inline abandon() {
  atomic { abort -> alive = 0; dead[r * B + b] = 1 }
  d_step { i = 0; do :: i < B -> dead[r * B + i] = 1; i++ :: i >= B -> break od; i = 0 }
}
