/* close(): CommunicatorState.close (communicator_state.py), DeviceBackend.close (device/backend.py), IpcBackend._close (ipc/backend.py),
 * has_unmapped and leave (control_page.py), Watch (watchdog.py), give_back_after and flush (device/deferred_free.py).
 *
 * Each rank makes up to CALLS calls, as it likes, whose kernels store into the peers' memory, and closes. A call that
 * not all ranks make ends by the abort word, which a watchdog raises once a rank has left or died. DEATH: rank 0 dies
 * at any moment, close() included: first its kernel and mappings go, then its process's end is seen.
 */
#ifndef N
#define N 2
#endif
#ifndef CALLS
#define CALLS 1
#endif
#ifndef DEATH
#define DEATH 0
#endif

bit mapped[N * N], freed[N], state[N];   /* mapped[r * N + q]: r has q's memory; state: CLOSED */
bit marked[N];                           /* "dead": some rank has seen its end */
bit running[N], dying, abort;            /* running: a kernel of this rank */
byte came[N];                            /* calls made */

#define UNMAPPED(k) ((k) % N == r || state[(k) % N] || marked[(k) % N])
#define PEERS_HAVE_LEFT (UNMAPPED(0) && UNMAPPED(1) && UNMAPPED(2) && UNMAPPED(3))
#define COME(k) (came[(k) % N] >= came[r])
#define ALL_HAVE_COME (COME(0) && COME(1) && COME(2) && COME(3))

/* has_left_before: it has closed without making a call that another has made */
#define MORE(k, q) (came[(q) % N] > came[(k) % N])
#define LEFT(k) (marked[(k) % N] || state[(k) % N] && (MORE(k, 0) || MORE(k, 1) || MORE(k, 2) || MORE(k, 3)))

inline free_memory() {                   /* nobody who lives has it mapped, and no kernel stores into it */
  d_step {
    k = 0;
    do :: k < N -> assert(k == r || !mapped[k * N + r]); k++ :: k >= N -> break od;
    k = 0;
    freed[r] = 1
  }
}

proctype Kernels(byte r) {
  byte k;
end: do
  :: running[r] ->                         /* a store into a peer's memory: mapped, and not freed */
     d_step {
       k = 0;
       do
       :: k < N -> assert(!running[r] || k == r || (mapped[r * N + k] && !freed[k])); k++
       :: k >= N -> break
       od;
       k = 0
     };
     if
     :: ALL_HAVE_COME || abort -> running[r] = 0
     :: !running[r]
     fi
  od
}

proctype Rank(byte r) {
  byte k;
  {
    do
    :: atomic { came[r] < CALLS && !running[r] && !abort -> came[r]++; running[r] = 1 }
    :: break
    od;
#ifndef BREAK_KERNELS_RUN
    if                                   /* _end_calls: order.ends_by(deadline), else post_fault; wait_for_device */
    :: !running[r]
    :: running[r] -> abort = 1; !running[r]
    fi;
#endif
#ifdef BREAK_LEAVE_FIRST
    state[r] = 1;
#endif
    do                                   /* unmap_peers, one after the other */
    :: k < N -> mapped[r * N + k] = 0; k++
    :: k >= N -> k = 0; break
    od;
#ifndef BREAK_NEVER_LEAVES
    state[r] = 1;                        /* Page.leave */
#endif
#ifdef BREAK_FREE_AT_ONCE
    free_memory()
#else
    PEERS_HAVE_LEFT;                     /* asked until the deadline, and then at every flush() */
    free_memory()
#endif
  } unless { r == 0 && dying };
  if
  :: r == 0 && dying -> skip
  :: else -> assert(freed[r])
  fi
}

#if DEATH
proctype Death() {
  dying = 1;
#ifdef BREAK_DEAD_BEFORE_UNMAPPED
  marked[0] = 1;
#endif
  /* the driver ends its kernel and its mappings */
  d_step { running[0] = 0; mapped[1] = 0; mapped[N - 1] = 0; mapped[(N > 2 -> 2 : 1)] = 0 };
  marked[0] = 1                          /* pidfd: mark_dead */
}
#endif

/* in every process that lives: look() */
active proctype Watchdog() {
end: do
  :: atomic { !abort && (LEFT(0) || LEFT(1) || LEFT(2) || LEFT(3)) -> abort = 1 }
  od
}

init {
  byte k;
  atomic {
    do :: k < N * N -> mapped[k] = (k / N != k % N); k++ :: k >= N * N -> break od;
    k = 0;
#if DEATH
    run Death();
#endif
    do :: k < N -> run Rank(k); run Kernels(k); k++ :: k >= N -> break od
  }
}
