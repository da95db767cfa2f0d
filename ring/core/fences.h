/* Every ordering the ring relies on, each with the one it pairs with. No other file names a memory order.
 *
 * Two shapes occur.
 *
 * Publish/observe: data, then a release store; an acquire load, then the data.
 *
 *   store_tail      (writer)     ↔ load_tail       (consumer)     the record's bytes are there when the tail says so
 *   store_head      (consumer)   ↔ load_head       (writer)       the consumer is done with the bytes it gives back
 *   store_magic     (creator)    ↔ load_magic      (attacher)     the header is complete
 *   store_state     (consumer)   ↔ load_state      (writer)       the heads of a cursor opening, then of one open
 *   begin_turn      (consumer)   ↔ load_turn_again (writer)       a name read before this is the old one, whole
 *   store_turn      (consumer)   ↔ load_turn       (writer)       a name read after this is the new one, whole
 *   set_flag        (sleeper)    ↔ see_flag, take_flag (waker)    what the sleeper wrote before parking
 *   ring_bell       (waker)      ↔ turn_bell       (sleeper)      what the doorbell was rung for; both are locked
 *                                                                 steps on one word, so one sees the other's
 *   claim_owner     (last owner) ↔ claim_owner     (next owner)   what the last one left
 *   leave_guard     (thread)     ↔ take_guard      (next thread)  what the one before wrote to the handle
 *
 * Dekker: each side stores its own word, runs a full fence, loads the other's. In any order of the four
 * steps at least one side sees the other's store (C11 7.17.4: of two seq_cst fences one comes first, and a
 * load after the later one sees every store before the earlier one). That is what rules out a lost wake-up:
 *
 *   fence_published (writer:   tail store    | parked load) ↔ fence_parked (consumer: parked store | tail load)
 *   fence_released  (consumer: head store    | room load)   ↔ fence_room   (writer:   room store   | head load)
 *   fence_detached  (anyone:   state store   | room take)   ↔ fence_room   (writer:   room store   | state load)
 *   fence_closed    (anyone:   quarantine    | room take)   ↔ fence_room   (writer:   room store   | quarantine load)
 *   fence_attached  (consumer: state store   | tail load)   ↔ fence_heads  (writer:   tail store   | state load)
 */

#ifndef OUTFEED_RING_FENCES_H
#define OUTFEED_RING_FENCES_H

#include "layout.h"

#if defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define OUTFEED_TSAN 1
#endif
#endif
#ifdef __SANITIZE_THREAD__
#define OUTFEED_TSAN 1
#endif

static inline void full_fence(void) {
#ifdef OUTFEED_TSAN
    /* ThreadSanitizer does not know fences. A locked operation on the thread's own word is the same
     * barrier to the machine and, being private, adds no edge that would hide a race. */
    static _Thread_local word own;
    atomic_fetch_add(&own, 1);
#else
    atomic_thread_fence(memory_order_seq_cst);
#endif
}

/* Dekker pairs; see the table above. */
static inline void fence_published(void) { full_fence(); } /* pairs with fence_parked */
static inline void fence_parked(void) { full_fence(); }    /* pairs with fence_published */
static inline void fence_released(void) { full_fence(); }  /* pairs with fence_room */
static inline void fence_detached(void) { full_fence(); }  /* pairs with fence_room */
static inline void fence_closed(void) { full_fence(); }    /* pairs with fence_room */
static inline void fence_room(void) { full_fence(); }      /* pairs with fence_released, _detached and _closed */
static inline void fence_attached(void) { full_fence(); }  /* pairs with fence_heads */
static inline void fence_heads(void) { full_fence(); }     /* pairs with fence_attached */

/* Publish/observe pairs. */
static inline void store_tail(word *p, uint64_t v) { atomic_store_explicit(p, v, memory_order_release); }
static inline uint64_t load_tail(const word *p) { return atomic_load_explicit(p, memory_order_acquire); }
static inline void store_head(word *p, uint64_t v) { atomic_store_explicit(p, v, memory_order_release); }
static inline uint64_t load_head(const word *p) { return atomic_load_explicit(p, memory_order_acquire); }
static inline void store_state(half *p, uint32_t v) { atomic_store_explicit(p, v, memory_order_release); }
static inline uint32_t load_state(const half *p) { return atomic_load_explicit(p, memory_order_acquire); }
static inline void store_magic(word *p, uint64_t v) { atomic_store_explicit(p, v, memory_order_release); }
static inline uint64_t load_magic(const word *p) { return atomic_load_explicit(p, memory_order_acquire); }
static inline void store_turn(half *p, uint32_t v) { atomic_store_explicit(p, v, memory_order_release); }
static inline uint32_t load_turn(const half *p) { return atomic_load_explicit(p, memory_order_acquire); }
/* Before the name is rewritten: makes the turn odd and tells what it was. A plain store would not do: the words that
 * are stored after it could be seen before it. */
static inline uint32_t begin_turn(half *p) { return atomic_fetch_or_explicit(p, 1, memory_order_acq_rel); }
/* The second look of a reader of the name. Both change the word, so one comes first: this one, and begin_turn sees
 * that the words were loaded; or begin_turn, and this sees an odd turn. Pairs with begin_turn. */
static inline uint32_t load_turn_again(half *p) {
    return atomic_fetch_add_explicit(p, 0, memory_order_acq_rel);
}
static inline void set_flag(half *p) { atomic_store_explicit(p, 1, memory_order_release); }
/* A look before the locked instruction: usually the flag is not set. Pairs with set_flag. */
static inline int see_flag(const half *p) { return atomic_load_explicit(p, memory_order_acquire) == 1; }
/* True when the flag was set and this call cleared it: of several wakers exactly one wakes. */
static inline int take_flag(half *p) { return atomic_exchange_explicit(p, 0, memory_order_acq_rel) == 1; }
/* A doorbell's word, changed and told what it was in one locked step by either side. They pair with each other. */
static inline uint32_t ring_bell(half *p) {
    return atomic_fetch_or_explicit(p, BELL_RUNG, memory_order_acq_rel);
}
static inline uint32_t turn_bell(half *p, uint32_t v) {
    return atomic_exchange_explicit(p, v, memory_order_acq_rel);
}
/* Compare and swap of an owner word: one claimant wins. Everything a claim reads comes after it. */
static inline int claim_owner(word *p, uint64_t expected, uint64_t mine) {
    return atomic_compare_exchange_strong_explicit(p, &expected, mine, memory_order_acq_rel,
                                                   memory_order_acquire);
}
/* One thread at a time: true for the one that took it. Pairs with leave_guard. */
static inline int take_guard(half *p) { return atomic_exchange_explicit(p, 1, memory_order_acquire) == 0; }
static inline void leave_guard(half *p) { atomic_store_explicit(p, 0, memory_order_release); }

/* No ordering needed: statistics, hints that a fence above already orders, words of one's own. */
static inline uint64_t peek(const word *p) { return atomic_load_explicit(p, memory_order_relaxed); }
static inline void poke(word *p, uint64_t v) { atomic_store_explicit(p, v, memory_order_relaxed); }
static inline uint32_t peek_half(const half *p) { return atomic_load_explicit(p, memory_order_relaxed); }
static inline void poke_half(half *p, uint32_t v) { atomic_store_explicit(p, v, memory_order_relaxed); }
/* A counter with one writer: no locked instruction. */
static inline void bump(word *p, uint64_t by) { poke(p, peek(p) + by); }
static inline void raise_to(word *p, uint64_t v) {
    if (v > peek(p)) poke(p, v);
}

#endif
