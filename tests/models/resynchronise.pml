/* Calls, faults, and the resynchronisation after them: CallSequence.enter, _tell, raise_pending, _resynchronise and
 * _start_anew (sequence.py), Rounds.meet (rounds.py), Page.post_fault and clear (control_page.py), Watch.look
 * (watchdog.py).
 *
 * Each rank makes calls, which run until every rank has come to them or the abort word is up. FAULTS: as often a call
 * is refused on one rank, or a wait reaches its deadline, whichever and whenever. A host's store that clears the abort
 * word is on its way (clearing) until a fence, at the latest. A rank that has been in a vote without the others has a
 * further round. DEATH 1: rank 0 is given up at any moment, by a watchdog or a meeting's deadline. 2: it has died.
 */
#ifndef N
#define N 2
#endif
#ifndef FAULTS
#define FAULTS 2
#endif
#ifndef DEATH
#define DEATH 0
#endif
#ifndef LAST
#define LAST 2                           /* calls of the program that succeed */
#endif
#define NONE 255

bit abort, lost, dead, clearing[N], running[N];
byte fault[N] = NONE;                    /* the call in a rank's fault record */
byte number[N], came[N], rounds[N];      /* last call, last call launched, last round */
byte meeting[N], told_number[N], told_rounds[N]; /* each rank's record of a meeting */
byte faults, quiet[N], resets[N], met[N]; /* how often a rank was quiet, has reset, has gone on */

#define ALL(is) (is(0) && is(1) && (N < 3 || is(2)) && (N < 4 || is(3)))
#define HAS_COME(k) (came[(k) % N] >= number[r])
#define NO_FAULT(k) (fault[(k) % N] == NONE)
#define LATER(k) (fault[(k) % N] > number[r])
#ifdef BREAK_EQUAL
#define HAS_MET(k) (meeting[(k) % N] == serial)
#else
#define HAS_MET(k) (meeting[(k) % N] >= serial) /* a peer may be one further */
#endif
#define IS_QUIET(k) (quiet[(k) % N] >= quiet[r] && !running[(k) % N])
#define HAS_RESET(k) (resets[(k) % N] >= resets[r])
#define HAS_ENDED(k) (came[(k) % N] >= came[r])
#define NOT_EARLIER(k) (fault[(k) % N] >= number[r])
#define SAME(k) (rounds[(k) % N] == rounds[r])
#define CONCERNS (ALL(NO_FAULT) || !ALL(LATER)) /* a fault of this call or an earlier one, or a deadline */

active [N] proctype Stores() {
end: do
  :: d_step { clearing[_pid] -> abort = 0; clearing[_pid] = 0 }
  od
}

inline meet() {
  serial++;
  d_step { told_number[r] = number[r]; told_rounds[r] = rounds[r]; meeting[r] = serial };
  if
  :: ALL(HAS_MET)
  :: lost -> goto gone                   /* check(): raise_lost */
  fi
}

inline clear() {                         /* Page.clear, and fence() */
  atomic { fault[r] = NONE; clearing[r] = 1 };
#ifndef BREAK_NO_FENCE
  !clearing[r]
#else
  skip
#endif
}

inline resynchronise() {
#ifdef BREAK_CLEAR_FIRST
  clear();
#endif
#ifndef BREAK_NO_QUIESCE
  atomic { ALL(HAS_ENDED) || abort || lost -> running[r] = 0 }; /* IpcBackend.quiesce: the last kernel has ended */
#endif
  quiet[r]++;
  meet();
  d_step {
    assert(ALL(IS_QUIET));               /* nobody resets before all are quiet */
    resets[r]++;
    k = 0;
    do
    :: k < N ->
       top_number = (told_number[k] > top_number -> told_number[k] : top_number);
       top_rounds = (told_rounds[k] > top_rounds -> told_rounds[k] : top_rounds);
       k++
    :: k >= N -> break
    od;
    k = 0
  };
#ifndef BREAK_CLEAR_FIRST
  clear();
#endif
#ifndef BREAK_ONE_MEETING
  meet();
#endif
  d_step {
    assert(ALL(HAS_RESET));              /* nobody goes on before all have reset */
    number[r] = top_number;
#ifndef BREAK_NO_CATCH_UP
    rounds[r] = top_rounds;
#endif
    met[r]++; raised = 0; top_number = 0; top_rounds = 0
  }
}

proctype Rank(byte r) {
  byte k, serial, top_number, top_rounds;
  bit raised;
  {
    do
    :: number[r] < LAST || abort -> number[r]++;
       if
       :: atomic { abort && !raised && CONCERNS -> raised = 1; /* the program gets the error */
            if :: rounds[r] < 2 -> rounds[r]++ :: skip fi }    /* perhaps within a vote */
       :: lost && abort -> goto gone
       :: else ->
          if :: abort && raised -> resynchronise() :: else fi;
          if
          :: atomic { faults < FAULTS -> faults++ };           /* refused here: _tell */
             (ALL(HAS_ENDED) || abort || lost);                /* drain(), in _post */
             if
             /* an earlier fault comes first */
             :: atomic { abort && (ALL(NO_FAULT) || !ALL(NOT_EARLIER)) -> raised = 1 }
             :: else ->
                fault[r] = number[r];
                atomic { abort = 1; raised = 1 }
             fi
          :: atomic { came[r] = number[r]; running[r] = 1 }     /* launched */
          fi
       fi
    :: number[r] >= LAST ->                                    /* synchronize(): the last call ends */
       if
       :: atomic { ALL(HAS_COME) && !abort -> assert(ALL(SAME)); goto over }
       :: abort
       :: atomic { faults < FAULTS && !abort && !ALL(HAS_COME) -> faults++; abort = 1 } /* post_timeout */
       fi
    od
  } unless { dead && r == 0 };
over: gone: skip
}

#if DEATH
active proctype Watchdog() {             /* in every rank that lives */
#if DEATH == 2
  dead = 1;
#endif
  lost = 1;
end: do
  :: atomic { !abort -> abort = 1 }      /* post_lost, at every turn */
  od
}
#endif

init {
  byte k;
  atomic { do :: k < N -> run Rank(k); k++ :: k >= N -> break od }
}
