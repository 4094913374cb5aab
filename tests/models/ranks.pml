/* Ranks that launch one kernel after another, and faults. The last part of one_shot.pml and so on; see slots.pml.
 *
 * Host stands for the stream order (two kernels of a rank never overlap: ipcreduce/device/stream_order.py) and, in
 * short, for a resynchronisation, which resynchronise.pml has in full. Block stands for the body of a kernel:
 * load_epoch, advance_epochs, and `sends` and `waits` of the kernel at hand.
 */
proctype Block(byte r; byte b) {
  byte e, i;
  bit alive;
  {
end: do
    :: atomic { todo[r] & (1 << b) ->
         todo[r] = todo[r] - (1 << b);
         e = epoch[r * B + b];
#ifdef BREAK_SENDS_WHEN_DEAD
         alive = 1;
#else
         alive = !dead[r * B + b];
#endif
         d_step {                                       /* advance_epochs */
           i = b;
           do :: i < B -> epoch[r * B + i] = (e + 1) % EPOCHS; i = i + GRID(e) :: i >= B -> break od;
           i = 0
         };
         sends()
       };
       waits();
       running[r]--
    od
  } unless { crashed[r] }
}

#ifndef STORES_PAST
#define STORES_PAST 1                                   /* plain stores into peers' arrays: direct.pml has some */
#endif
#ifdef BREAK_NO_BOUNDARY
#define BOUNDARY(r) (running[r] == 0)
#elif defined(BREAK_BLOCKS_APART)
#define BOUNDARY(r) (todo[r] == 0)                      /* the next kernel starts before this one has ended */
#else
#define BOUNDARY(r) (running[r] == 0 && unsettled[r] == 0)
#endif
#ifdef BREAK_NO_QUIESCE
#define QUIET(r) 1
#else
#define QUIET(r) (flying[r] == 0 && unsettled[r] == 0 && STORES_PAST)
#endif

/* After an abandoned wait a kernel does nothing but advance epochs, so it is left out. */
#ifdef BREAK_SENDS_WHEN_DEAD
#define LAUNCHES(r) !(gen[r] == 1 && epoch[r * B] >= 2)
#else
#define LAUNCHES(r) !(gen[r] == 1 && epoch[r * B] >= 2) && !dead[r * B]
#endif

proctype Host(byte r) {
  byte i, k, last;
  {
    do
    :: atomic { LAUNCHES(r) ->
         before_kernel();
         running[r] = running[r] + GRID(epoch[r * B]);
         todo[r] = (1 << GRID(epoch[r * B])) - 1
       };
       BOUNDARY(r);
       after_kernel()
#if FAULTS & 1
    :: atomic { abort && !anyone_crashed && gen[r] == 0 && QUIET(r) -> met1++ };
#ifndef BREAK_ONE_MEETING
       met1 == N || anyone_crashed;
#endif
       if
       :: anyone_crashed -> break                       /* lost: only close() */
       :: else
       fi;
       d_step {                                         /* Workspace.reset, and Page.clear */
#ifndef BREAK_NO_RESET
         do :: i < OWN -> slot[r * OWN + i] = 0; i++ :: i >= OWN -> break od;
#endif
         i = 0;
         do :: i < B -> epoch[r * B + i] = 0; dead[r * B + i] = 0; i++ :: i >= B -> break od;
         i = 0;
         gen[r] = 1;
         abort = 0;
         met2++
       };
       if
       :: met2 == N
       :: met2 < N && anyone_crashed -> break
       fi
#endif
#if FAULTS & 2
    :: anyone_crashed && abort -> break                 /* lost */
#endif
    :: gen[r] == 1 && epoch[r * B] >= 2 -> break        /* enough after a resynchronisation: both halves were used */
    od
  } unless { crashed[r] }
}

#if FAULTS & 1
active proctype Fault() { abort = 1 }                   /* a timeout, or a refused call */
#endif

#if FAULTS & 2
active proctype Death() {                               /* and the watchdogs of those who live */
  atomic { crashed[0] = 1; anyone_crashed = 1 };        /* rank 0 is any rank: they are alike */
end: do
  :: atomic { !abort -> abort = 1 }
  od
}
#endif

init {
  byte k;
  atomic {
    do
    :: k < N -> run Host(k); run Block(k, 0);
       if :: B > 1 -> run Block(k, 1) :: else fi;
       k++
    :: k >= N -> break
    od
  }
}
