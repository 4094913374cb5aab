/* Broadcast in two hops: kernels/spread.cu, run_root() and run_peer(). It is two_shot.pml with fewer packets.
 *
 * The root changes with every other operation. In the first hop it sends each peer a chunk (group t: tile t). In the
 * second hop a peer sends its chunk to the other peers. A peer's answer to the root comes first, from block 0.
 */
#define ROOT(e) ((e) / 2 % N)
#ifdef BREAK_NO_ANSWER
#define ANSWER(dst, e, b, g) 0
#else
#define ANSWER(dst, e, b, g) ((dst) == ROOT(e) && (b) + (g) == 0)
#endif
#define FORWARDED(src, dst, e) ((src) != ROOT(e) && (dst) != ROOT(e))
#define SENT(src, dst, e, b, g) \
  ((g) < TILES -> ((src) == ROOT(e) || ANSWER(dst, e, b, g)) : FORWARDED(src, dst, e))
#include "two_shot.pml"
