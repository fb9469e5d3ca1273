/* Offsets of a partition that were assigned, as intervals: sort them, join neighbours, write them. No Python here. */
#ifndef KPROXY_SPANS_H
#define KPROXY_SPANS_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

/* Spans: `count` numbers of at most `room`, first offsets and numbers of records by turns. */
typedef struct {
    int64_t *numbers;
    uint32_t count, room;
} kp_spans;

/* Offsets from `start` to before `end`. */
typedef struct {
    int64_t start, end;
} kp_interval;

/* Sort by start. Each connection's intervals come in order, so there are few sorted runs: they are merged two by two.
 * `spare` has room for `count` as well. Return the array with the sorted intervals, `all` or `spare`. */
static inline kp_interval *kp_sort_intervals(kp_interval *all, kp_interval *spare, size_t count) {
    for (;;) {
        size_t from = 0, runs = 0, to = 0;
        while (from < count) {
            size_t middle = from + 1, end;
            while (middle < count && all[middle - 1].start <= all[middle].start) middle++;
            if (middle == count && !runs) return all;
            runs++;
            for (end = middle < count ? middle + 1 : middle; end < count && all[end - 1].start <= all[end].start;) end++;
            size_t left = from, right = middle;
            while (left < middle && right < end)
                spare[to++] = all[right].start < all[left].start ? all[right++] : all[left++];
            memcpy(spare + to, all + left, (middle - left) * sizeof *all);
            to += middle - left;
            memcpy(spare + to, all + right, (end - right) * sizeof *all);
            to += end - right;
            from = end;
        }
        kp_interval *sorted = spare;
        spare = all;
        all = sorted;
        if (runs <= 1) return all;
    }
}

/* Join sorted intervals where one begins at the other's end. Return how many are left, 0 if two have an offset in
 * common. */
static inline size_t kp_join_intervals(kp_interval *all, size_t count) {
    size_t last = 0;
    for (size_t at = 1; at < count; at++) {
        if (all[at].start < all[last].end) return 0;
        if (all[at].start == all[last].end)
            all[last].end = all[at].end;
        else
            all[++last] = all[at];
    }
    return count ? last + 1 : 0;
}

/* A bitmap of offsets. */
#define KP_BITMAP_WORDS 1024

/* Set the bits of the spans' offsets, of which `low` has the first bit and `mapped` have one. Return 0 if an offset has
 * none, or its bit is set already. */
static inline int kp_map_spans(uint64_t *bits, int64_t low, int64_t mapped, const kp_spans *spans) {
    for (uint32_t at = 0; at < spans->count; at += 2) {
        uint64_t from = (uint64_t)(spans->numbers[at] - low), left = (uint64_t)spans->numbers[at + 1];
        if (from + left > (uint64_t)mapped) return 0;
        while (left) {
            uint64_t shift = from & 63, taken = 64 - shift < left ? 64 - shift : left;
            uint64_t mask = ~(uint64_t)0 >> (64 - taken) << shift;
            if (bits[from >> 6] & mask) return 0;
            bits[from >> 6] |= mask;
            from += taken;
            left -= taken;
        }
    }
    return 1;
}

/* The longest number in decimal digits: 19 of them, a sign and a comma. */
#define KP_NUMBER_BYTES 21

/* Write numbers in decimal digits with commas between them. Return the end of the written text; there must be room for
 * KP_NUMBER_BYTES each. */
static inline char *kp_put_numbers(char *to, const int64_t *numbers, size_t count) {
    for (size_t at = 0; at < count; at++) {
        char digits[KP_NUMBER_BYTES], *first = digits + sizeof digits;
        uint64_t left = numbers[at] < 0 ? 0 - (uint64_t)numbers[at] : (uint64_t)numbers[at];
        do *--first = (char)('0' + left % 10);
        while (left /= 10);
        if (numbers[at] < 0) *--first = '-';
        if (at) *to++ = ',';
        memcpy(to, first, (size_t)(digits + sizeof digits - first));
        to += digits + sizeof digits - first;
    }
    return to;
}

#endif
