/* The check over a body: tells a changed, torn or reordered body from a whole one.
 *
 * Four lanes of xor, multiply, shift over 8-byte words, then the lanes one after the other. Each step is a
 * bijection of the state for a given word and of the word for a given state, so a change within one word
 * always shows; any other change is missed once in 2^64. It guards against accidents, not against somebody
 * who can write the segment: that one can write a right check as well.
 *
 * A header of its own, so that whoever builds a body in C (the sidecar's core) seals it the same way.
 * Little-endian, like the body. batch.h, beside it, says what a body is made of.
 */
#ifndef OUTFEED_CHECK_H
#define OUTFEED_CHECK_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

static inline uint64_t outfeed_check_step(uint64_t state, uint64_t word) {
    state = (state ^ word) * UINT64_C(0x9E3779B97F4A7C15);
    return state ^ (state >> 32);
}

static inline uint64_t outfeed_check_word(const uint8_t *at) {
    uint64_t word;
    memcpy(&word, at, sizeof word);
    return word;
}

static inline uint64_t outfeed_check_bytes(const uint8_t *data, size_t size, uint64_t seed) {
    uint64_t a = seed + 1, b = seed + 2, c = seed + 3, d = seed + 4;
    size_t at = 0;
    for (; size - at >= 32; at += 32) {
        a = outfeed_check_step(a, outfeed_check_word(data + at));
        b = outfeed_check_step(b, outfeed_check_word(data + at + 8));
        c = outfeed_check_step(c, outfeed_check_word(data + at + 16));
        d = outfeed_check_step(d, outfeed_check_word(data + at + 24));
    }
    for (; size - at >= 8; at += 8) a = outfeed_check_step(a, outfeed_check_word(data + at));
    uint64_t rest = 0;
    if (size > at) memcpy(&rest, data + at, size - at);
    a = outfeed_check_step(a, rest);
    a = outfeed_check_step(a, b);
    a = outfeed_check_step(a, c);
    a = outfeed_check_step(a, d);
    return outfeed_check_step(a, size);
}

#endif
