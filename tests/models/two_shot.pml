/* Two-shot all-reduce: kernels/two_shot.cu, run(). Chunks go to the rank that reduces them, results go to all.
 *
 * TILES: 1 is the kernel's code for a single tile; with 2, tile 1 is pushed before tile 0 is reduced, and tile 0 is
 * gathered after tile 1 is reduced. Group t is `scatter` of tile t, group TILES + t its `gather`.
 */
#ifndef TILES
#define TILES 1
#endif
#ifndef MIXED
#define GROUPS (2 * TILES)
#include "slots.pml"
#endif

inline reduce_columns(t) {
  if
  :: !alive
  :: atomic { alive && ARRIVED(t) -> take(t); send(TILES + t) }
  :: alive && abort -> abandon()
  fi
}

inline gather_columns(t) {
  if
  :: !alive
  :: atomic { alive && ARRIVED(TILES + t) ->
#ifdef BREAK_LATE_READ
       restore(t); restore(TILES + t)
#else
       take(TILES + t); restore(t); restore(TILES + t)
#endif
     }
#ifdef BREAK_LATE_READ
     ;
     if :: alive -> take(TILES + t) :: else fi          /* the slots are given back before they are read */
#endif
  :: alive && abort -> abandon()
  fi
}

inline two_shot_sends() {
  if :: alive -> send(0) :: else fi
}

inline two_shot_waits() {
#if TILES > 1
  if :: alive -> send(1) :: else fi;
#endif
  reduce_columns(0);
#if TILES > 1
  reduce_columns(1);
#endif
  gather_columns(0);
#if TILES > 1
  gather_columns(1)
#endif
}

#ifndef MIXED
#define sends two_shot_sends
#define waits two_shot_waits
#define before_kernel() skip
#define after_kernel() skip
#include "ranks.pml"
#endif
