/* All-gather, broadcast and reduce-scatter, among all-reduces: kernels/gather.cu and scatter.cu, run().
 *
 * One hop, as in one_shot.pml, but messages have one packet or two. Packet 1 is that of block 1, or, with PARTS=2, that
 * of group 1. A message without bytes has one packet, too: that of a rank without rows, that to a rank without rows, and
 * what all but the root send in a broadcast, which is its answer. These four operations come in turns:
 *
 *   ORDER 0   all-gather, rank 0 without rows; short broadcast of the last rank; reduce-scatter, the last rank without
 *             rows; all-reduce
 *   ORDER 1   broadcast of rank 0; short all-gather, the last rank without rows; broadcast of the last rank;
 *             reduce-scatter, rank 0 without rows
 *   ORDER 2   of mixed.pml: all-gather, rank 0 without rows; all-reduce; broadcast of rank 0; all-reduce
 */
#ifndef ORDER
#define ORDER 0
#endif
#define LAST (N - 1)
#if ORDER == 0
#define ALL_REDUCE(e) ((e) == 3)
#define LACKS_ROWS(src, e) ((e) == 0 && (src) == 0)
#define GETS_NO_ROWS(dst, e) ((e) == 2 && (dst) == LAST)
#define ANSWERS(src, e) ((e) == 1 && (src) != LAST)
#elif ORDER == 1
#define ALL_REDUCE(e) 0
#define LACKS_ROWS(src, e) ((e) == 1 && (src) == LAST)
#define GETS_NO_ROWS(dst, e) ((e) == 3 && (dst) == 0)
#define ANSWERS(src, e) (((e) == 0 && (src) != 0) || ((e) == 2 && (src) != LAST))
#else
#define ALL_REDUCE(e) ((e) % 2 == 1)
#define LACKS_ROWS(src, e) ((e) == 0 && (src) == 0)
#define GETS_NO_ROWS(dst, e) 0
#define ANSWERS(src, e) ((e) == 2 && (src) != 0)
#endif

#ifdef BREAK_NO_ROWS_NO_PACKET
#define LEFT_OUT(src, dst, e) LACKS_ROWS(src, e)
#elif defined(BREAK_NOTHING_TO_NO_ROWS)
#define LEFT_OUT(src, dst, e) GETS_NO_ROWS(dst, e)
#elif defined(BREAK_NO_ANSWER)
#define LEFT_OUT(src, dst, e) ANSWERS(src, e)
#else
#define LEFT_OUT(src, dst, e) 0
#endif
#define EMPTY(src, dst, e) (LACKS_ROWS(src, e) || GETS_NO_ROWS(dst, e) || ANSWERS(src, e))
#define SECOND(src, dst, e) (!EMPTY(src, dst, e) && ((e) != 1 || B == 1))
#define SENT(src, dst, e, b, g) \
  (ALL_REDUCE(e) || ((b) + (g) == 0 && !LEFT_OUT(src, dst, e)) || ((b) + (g) > 0 && SECOND(src, dst, e)))
#include "one_shot.pml"
