/* The vote that ends a recording, and the rounds under it: Rounds._round (rounds.py), vote and agree (votes.py),
 * CallSequence.gather (calls.py), Slot.write and read (records.py), Page.write_round and read_round (control_page.py).
 *
 * Odd rounds are votes: each rank votes yes or no, and one that gives up leaves a no. In even rounds it leaves a Left.
 * A record is on its way, and arrives in two parts; its checksum tells when it is whole. LEAVES: as often a rank gives
 * up by itself, at any moment of a wait: a deadline, an interrupt. The abort word, which is then raised, ends the
 * others' waits. After that the ranks meet, in short (resynchronise.pml has it in full), and go on. DEATH: rank 0
 * dies.
 */
#ifndef N
#define N 2
#endif
#ifndef LEAVES
#define LEAVES 1
#endif
#ifndef DEATH
#define DEATH 0
#endif
#ifndef SERIALS
#define SERIALS 5                        /* rounds in all */
#endif
#ifdef BREAK_ONE_BUFFER
#define PARITY(s) 0
#else
#define PARITY(s) ((s) & 1)
#endif
#define AT(k, s) ((k) * 2 + PARITY(s))
#define IS_VOTE(s) ((s) & 1)
#define LEFT 1
#define NO 2
#define PAYLOAD(s) (3 + (s))             /* of round s; in a vote, a yes */

byte serial[2 * N], text[2 * N];         /* records on the page, as others see them */
bit whole[2 * N], coming[2 * N];
byte new_serial[2 * N], new_text[2 * N]; /* as written last */
bit abort, dead, met_all;
byte last[N], left[N], leaves, met;      /* left: the round in which a rank has given up, if any */
byte outcome[SERIALS + 1];               /* of a vote that nobody has left: 1 yes, 2 no */
bit anyone_left;

active [2 * N] proctype Stores() {       /* for each buffer of each rank */
end: do
  :: d_step { coming[_pid] -> serial[_pid] = new_serial[_pid]; whole[_pid] = 0; coming[_pid] = 0 };
#ifdef BREAK_NO_SEAL
     whole[_pid] = 1;
#endif
     d_step { serial[_pid] = new_serial[_pid]; text[_pid] = new_text[_pid]; whole[_pid] = 1 }
  od
}

inline write(what) {
  d_step { new_serial[AT(r, last[r])] = last[r]; new_text[AT(r, last[r])] = what; coming[AT(r, last[r])] = 1 }
}

inline give_up() {                       /* the `except` of Rounds._round */
  assert(!met_all || dead);              /* once all have met, rounds end well */
  anyone_left = 1;
#ifndef BREAK_SILENT
  if
#ifdef BREAK_NO_ABANDON
  :: IS_VOTE(last[r])
#else
  :: IS_VOTE(last[r]) -> write(NO)
#endif
  :: else -> write(LEFT)
  fi;
  !coming[AT(r, last[r])] && whole[AT(r, last[r])];
#endif
  left[r] = last[r];
  abort = 1
}

#define VISIBLE (whole[AT(k, last[r])] && serial[AT(k, last[r])] == last[r])

proctype Rank(byte r) {
  byte k, gone;                          /* gone: a bit for each rank that had given this round up when we came */
  bit yes;
  {
end: do
    :: last[r] < SERIALS && !abort ->
       atomic {
         last[r]++;
         k = 0;
         do :: k < N -> gone = gone | ((left[k] == last[r]) << k); k++ :: k >= N -> break od;
         k = 0;
         yes = 1;
         if
         :: write(PAYLOAD(last[r]))
         :: IS_VOTE(last[r]) && r == N - 1 -> write(NO); yes = 0 /* any rank: they are alike */
         fi
       };
       do
       :: k == r -> k++
       :: atomic { k < N && k != r && VISIBLE ->
            if
            :: text[AT(k, last[r])] == LEFT -> give_up(); goto raise
            :: text[AT(k, last[r])] == NO -> yes = 0
            :: else -> assert(text[AT(k, last[r])] == PAYLOAD(last[r])); /* nothing torn, nothing of another round */
                 assert(!(gone & (1 << k)) || !IS_VOTE(last[r]))        /* we do not count on a rank that has gone */
            fi;
            k++ }
       :: k >= N -> break
       :: k < N && k != r && (abort || dead) && !VISIBLE -> give_up(); goto raise
       :: atomic { k < N && k != r && leaves < LEAVES && !VISIBLE -> leaves++ };
          if :: abort = 1 :: skip fi;    /* post_timeout comes first, an interrupt's refusal last */
          give_up(); goto raise
       od;
       atomic {
         if
         :: IS_VOTE(last[r]) && !anyone_left ->
            assert(outcome[last[r]] == 0 || outcome[last[r]] == 2 - yes); /* all conclude alike */
            outcome[last[r]] = 2 - yes
         :: else
         fi;
         yes = 0; gone = 0; k = 0
       }
    :: abort ->
raise: yes = 0;
       d_step { gone = 0; k = 0; met++ };
       if
       :: met == N || met_all -> met_all = 1
       :: dead -> goto over              /* lost */
       fi;
       d_step {
#ifndef BREAK_KEEP_NUMBERS
         do :: k < N -> last[r] = (last[k] > last[r] -> last[k] : last[r]); k++ :: k >= N -> break od;
#endif
         k = 0;
         met--;
         if :: met == 0 -> abort = 0; anyone_left = 0 :: else fi
       };
       if
       :: met == 0                       /* the second meeting */
       :: dead -> goto over
       fi
    :: dead -> break
    od
  } unless { dead && r == 0 };
over: skip
}

#if DEATH
active proctype Death() { atomic { dead = 1; abort = 1 } }
#endif

init {
  byte k;
  atomic { do :: k < N -> run Rank(k); k++ :: k >= N -> break od }
}
